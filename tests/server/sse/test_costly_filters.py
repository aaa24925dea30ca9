"""A reader's filter that takes too long costs this reader its connection, and the others little."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import psycopg

from pgmb.server import sse
from pgmb.server.application import Application
from tests.server.hosting import served
from tests.server.sse.client import EVENTS, Client, make_key, publish

NESTED = "exists($p[*] ? (exists($p[*] ? (exists($p[*] ? (exists($p[*] ? (@ < 0))))))))"
PARAMS = json.dumps({"p": list(range(200))})


async def test_it_ends_and_is_refused_and_the_others_read_on(
    dsn: str, key: str, db: psycopg.Connection[Any]
) -> None:
    hostile = make_key(db, "read:main", name="hostile")
    async with (
        served(Application(dsn, parts=[sse.routes], max_size=4)) as port,
        Client(port, EVENTS, key=key) as plain,
        Client(port, EVENTS, key=key, filter="$.payload < 10") as filtered,
    ):
        await filtered.until(lambda: filtered.last_id != "")
        bombs = [
            Client(port, EVENTS, key=hostile, filter=f"{NESTED} || $.payload == {number}", params=PARAMS)
            for number in range(100, 104)
        ]
        for bomb in bombs:
            await asyncio.wait_for(bomb.__aenter__(), 10)
        assert [bomb.status for bomb in bombs] == [200] * 4
        publish(db, 1)
        assert await plain.numbers(1) == [1]
        assert await filtered.numbers(1) == [1]
        for bomb in bombs:
            await asyncio.wait_for(bomb.ended.wait(), 10)
            assert bomb.messages == []
        running = "select count(*) from pg_stat_activity where query ~ 'passing_events' and state = 'active'"
        while db.execute(running + " and pid <> pg_backend_pid()").fetchone() != (0,):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        for number in (103, 104):
            again = Client(
                port, EVENTS, key=hostile, filter=f"{NESTED} || $.payload == {number}", params=PARAMS
            )
            async with again:
                assert again.status == 422
        began = time.monotonic()
        publish(db, 2)
        assert await plain.numbers(2) == [1, 2]
        assert await filtered.numbers(2) == [1, 2]
        assert time.monotonic() - began < 10
        for bomb in bombs:
            await bomb.__aexit__(None, None, None)


async def test_one_that_takes_too_long_for_what_was_missed_ends_too(
    dsn: str, key: str, db: psycopg.Connection[Any]
) -> None:
    async with served(Application(dsn, parts=[sse.routes], max_size=4)) as port:
        publish(db, 1)
        async with Client(
            port, EVENTS, key=key, filter=NESTED, params=PARAMS, last_event_id="earliest"
        ) as client:
            await asyncio.wait_for(client.ended.wait(), 10)
        async with Client(port, EVENTS, key=key, filter=NESTED, params=PARAMS) as again:
            assert again.status == 422
