"""Tails lose and repeat nothing: late commits, rollbacks, rotation, and connections cut again and again."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import Any

import psycopg
import pytest

import pgmb

SECONDS = 6
WRITERS = 8
QUIET = 5.0
"""A tail that hears nothing for so long after the last commit has seen everything."""

CUT = (
    "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database()"
    " and (application_name = 'pgmb listener' or query ~ 'pgmb.(between|tick)') and pid <> pg_backend_pid()"
)


def write(dsn: str, number: int, stop: threading.Event, committed: set[str]) -> None:
    chance = random.Random(number)
    count = 0
    with psycopg.connect(dsn) as connection:
        while not stop.is_set():
            mine: list[str] = []
            if chance.random() < 0.3:
                connection.execute("select pg_current_xact_id()")
                time.sleep(chance.random() * 0.05)
            for _ in range(chance.randint(1, 5)):
                count += 1
                mine.append(f"{number}.{count}")
                connection.execute("select pgmb.publish('t', to_json(%s::text))", mine[-1:])
                if chance.random() < 0.2:
                    time.sleep(chance.random() * 0.1)
            if chance.random() < 0.15:
                connection.rollback()
            else:
                connection.commit()
                committed.update(mine)


async def read(broker: pgmb.AsyncBroker, listen: bool, seen: list[Any]) -> None:
    tail = broker.tail(listen=listen, max_wait=QUIET)
    await tail.start()
    cuts = 0
    while True:
        try:
            async for event in tail:
                seen.append(event.payload)  # noqa: PERF401 - as they come, for when it breaks off
            tail.close()
            return
        except psycopg.Error:
            cuts += 1
            await asyncio.sleep(0.05)
        if cuts % 2:
            # Another reader takes up its place.
            tail.close()
            tail = broker.tail(after=str(tail.position), listen=listen, max_wait=QUIET)


@pytest.mark.slow
async def test_every_commit_is_seen_once_whatever_happens(dsn: str, db: psycopg.Connection[Any]) -> None:
    stop = threading.Event()
    committed = [set[str]() for _ in range(WRITERS)]
    async with await pgmb.aconnect(dsn) as broker:
        start = await broker.position()
        seen: dict[bool, list[Any]] = {True: [], False: []}
        readers = [asyncio.create_task(read(broker, listen, got)) for listen, got in seen.items()]
        await asyncio.sleep(0.5)
        writers = [
            threading.Thread(target=write, args=(dsn, number, stop, committed[number]))
            for number in range(WRITERS)
        ]
        for thread in writers:
            thread.start()
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            await asyncio.sleep(0.5)
            for statement in ("select pgmb.rotate()", "select pgmb.maintain()", CUT):
                await asyncio.to_thread(db.execute, statement)
        stop.set()
        for thread in writers:
            await asyncio.to_thread(thread.join)
        await asyncio.gather(*readers)
    async with await pgmb.aconnect(dsn) as broker:
        again = [event.payload async for event in broker.tail(after=start, follow=False)]
    wanted = set().union(*committed)
    for got in (*seen.values(), again):
        assert len(got) == len(set(got)), "none twice"
        assert set(got) == wanted, "none lost, none that was rolled back"
