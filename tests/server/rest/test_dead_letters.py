"""Dead letters over REST: seen by pages, redriven and dropped by ids or a filter."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import psycopg

from harness.states import age_dead
from tests.server.rest.api import Api, opened

LETTERS = "/v1/queues/q/dead_letters"


@asynccontextmanager
async def buried(dsn: str) -> AsyncGenerator[Api]:
    """Six dead letters: even ones of topic a.even, the first three an hour old."""
    async with opened(dsn) as api:
        await api.done("POST", "/v1/queues", json={"name": "q"})
        for number in range(6):
            await api.publish(number, topic="a.odd" if number % 2 else "a.even")
            got = await api.receive()
            error = {"error": f"failed_{number}"}
            await api.done("POST", f"/v1/queues/q/leases/{got['lease']}/bury", json=error)
        with psycopg.connect(dsn, autocommit=True) as connection:
            age_dead(connection, "1 hour", first=3)
        yield api


async def left(api: Api) -> list[Any]:
    return [one["event"]["payload"] for one in (await api.done("GET", LETTERS))["dead_letters"]]


async def test_they_are_seen_a_page_at_a_time(dsn: str) -> None:
    async with buried(dsn) as api:
        seen: list[Any] = []
        query: dict[str, Any] = {"max": 4}
        while query.get("after", 0) is not None:
            page = await api.done("GET", LETTERS, params=query)
            seen += page["dead_letters"]
            query["after"] = page["next"]
        assert [one["event"]["payload"] for one in seen] == list(range(6))
        assert seen[0]["error"] == "failed_0"
        for asked, payloads in (
            ({"topic": "a.odd"}, [1, 3, 5]),
            ({"error": "failed_2"}, [2]),
            ({"error": "%led_4"}, [4]),
            ({"error": "\\"}, []),
            ({"error": "%\\"}, []),
        ):
            found = (await api.done("GET", LETTERS, params=asked))["dead_letters"]
            assert [one["event"]["payload"] for one in found] == payloads, asked
        assert await api.refused("GET", LETTERS.replace("/q/", "/none/")) == (404, "not_found")
        for wrong in ({"max": 0}, {"max": 1001}, {"max": "x"}, {"after": -1}, {"after": 2**63}, {"other": 1}):
            assert (await api.refused("GET", LETTERS, params=wrong))[0] == 422, wrong
        assert (await api.refused("GET", f"{LETTERS}?max=1&max=2"))[0] == 422


async def test_they_are_redriven_by_ids_or_a_filter(dsn: str) -> None:
    async with buried(dsn) as api:
        ids = [one["id"] for one in (await api.done("GET", LETTERS))["dead_letters"]]
        half_ago = datetime.now(UTC).timestamp() - 1800
        when = datetime.fromtimestamp(half_ago, UTC).isoformat()
        for asked, count, remaining in (
            ({"ids": []}, 0, [0, 1, 2, 3, 4, 5]),
            ({"ids": ids[:1]}, 1, [1, 2, 3, 4, 5]),
            ({"topic": "a.even", "died_before": when}, 1, [1, 3, 4, 5]),
            ({"error": "failed_5", "died_since": when}, 1, [1, 3, 4]),
            ({"topic": "none"}, 0, [1, 3, 4]),
            ({}, 3, []),
        ):
            assert await api.done("POST", f"{LETTERS}/redrive", json=asked) == {"count": count}
            assert await left(api) == remaining
        again = (await api.receive(wait=30))["events"]
        assert {event["attempt"] for event in again} == {1}
        assert (await api.refused("POST", f"{LETTERS}/redrive", json={"died_before": "2026-01-01"}))[0] == 422


async def test_they_are_dropped_only_where_it_is_said_which(dsn: str) -> None:
    async with buried(dsn) as api:
        assert await api.refused("POST", f"{LETTERS}/drop", json={}) == (422, "invalid_argument")
        assert await api.done("POST", f"{LETTERS}/drop", json={"topic": "a.odd"}) == {"count": 3}
        assert await left(api) == [0, 2, 4]
        assert await api.done("POST", f"{LETTERS}/drop", json={"all": True}) == {"count": 3}
        assert await left(api) == []
    with psycopg.connect(dsn) as connection:
        rows = connection.execute(
            "select action, detail ->> 'count' from pgmb.audit where action = 'drop_dead' order by id"
        ).fetchall()
    assert rows == [("drop_dead", "3"), ("drop_dead", "3")]


async def test_those_of_another_queue_stay(dsn: str) -> None:
    async with buried(dsn) as api:
        await api.done("POST", "/v1/queues", json={"name": "other"})
        ids = [one["id"] for one in (await api.done("GET", LETTERS))["dead_letters"]]
        other = LETTERS.replace("/q/", "/other/")
        key = api.make_key("other", "consume:other")
        for path in (f"{other}/redrive", f"{other}/drop"):
            assert await api.done("POST", path, json={"ids": ids}, key=key) == {"count": 0}
        assert len(await left(api)) == 6
