"""Server-sent events: what a client sees, resumes and is refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import psycopg
import pytest

from tests.server.sse.client import EVENTS, Client, make_key, publish


async def test_events_come_as_they_are_committed(port: int, key: str, db: psycopg.Connection[Any]) -> None:
    async with Client(port, EVENTS, key=key) as client:
        assert client.status == 200
        assert client.answered["content-type"].startswith("text/event-stream")
        assert client.answered["cache-control"] == "no-store, no-transform"
        assert client.answered["x-accel-buffering"] == "no"
        await client.until(lambda: client.last_id != "")
        publish(db, 1, 2, 3)
        assert await client.numbers(3) == [1, 2, 3]
        assert client.retry is not None
        assert client.got[0].event == "message"
        assert set(client.got[0].json) == {"id", "topic", "key", "payload", "headers", "published_at"}


async def test_topics_fields_and_filters_choose(port: int, key: str, db: psycopg.Connection[Any]) -> None:
    async with (
        Client(port, EVENTS, key=key, topic=["order.*", "user.#"]) as topics,
        Client(port, EVENTS, key=key, equals='{"payload": {"room": 7}}') as rooms,
        Client(port, EVENTS, key=key, filter="$.payload.room > $least", params='{"least": 7}') as filtered,
    ):
        for client in (topics, rooms, filtered):
            await client.until(lambda: client.last_id != "")  # noqa: B023
        for topic, room in [
            ("order.paid", 7),
            ("order.paid.late", 8),
            ("user", 9),
            ("user.a.b", 7),
            ("x", 10),
        ]:
            db.execute("select pgmb.publish(%s, %s)", [topic, json.dumps({"room": room})])
        db.execute("select pgmb.publish('x', '{\"room\": 7.0}')")
        db.execute("select pgmb.publish('user.end', '{\"room\": 7}')")
        db.execute("select pgmb.publish('user.end', '{\"room\": 70}')")
        await topics.until(lambda: len(topics.got) == 5)
        await rooms.until(lambda: len(rooms.got) == 4)
        await filtered.until(lambda: len(filtered.got) == 4)
    assert [got.json["topic"] for got in topics.got] == [
        "order.paid",
        "user",
        "user.a.b",
        "user.end",
        "user.end",
    ]
    assert [got.json["payload"]["room"] for got in rooms.got] == [7, 7, 7.0, 7]
    assert [got.json["payload"]["room"] for got in filtered.got] == [8, 9, 10, 70]
    # And the same out of memory, and out of the log.
    again: list[tuple[Client, dict[str, Any]]] = [
        (topics, {"topic": ["order.*", "user.#"]}),
        (rooms, {"equals": '{"payload": {"room": 7}}'}),
        (filtered, {"filter": "$.payload.room > $least", "params": '{"least": 7}'}),
    ]
    for before, asked in again:
        for since, expected in [(before.got[0].id, before.got[1:]), ("earliest", before.got)]:
            async with Client(port, EVENTS, key=key, last_event_id=since, **asked) as back:
                got = await back.events(len(expected))
                assert [one.data for one in got] == [one.data for one in expected]


async def test_nothing_that_is_published_becomes_a_field(
    port: int, key: str, db: psycopg.Connection[Any]
) -> None:
    hostile = "t\nevent: reset\ndata: x\r\nid: 0\rretry: 1"
    async with Client(port, EVENTS, key=key, event="topic") as client:
        await client.until(lambda: client.last_id != "")
        retry = client.retry
        db.execute(
            "select pgmb.publish(%s, %s, key => %s)", [hostile, '{\n"a":\r\n1,\r"b": "\\n\\r"}', hostile]
        )
        await client.until(lambda: len(client.got) == 1)
    (got,) = client.got
    assert got.json["topic"] == hostile
    assert got.json["key"] == hostile
    assert got.json["payload"] == {"a": 1, "b": "\n\r"}
    assert "\n" not in got.event
    assert client.retry == retry
    assert client.last_id == got.id


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ({"topic": "a**"}, 422),
        ({"equals": "[1]"}, 422),
        ({"equals": '{"other": 1}'}, 422),
        ({"filter": "$.("}, 422),
        ({"event": "other"}, 422),
        ({"what": "1"}, 422),
    ],
    ids=str,
)
async def test_what_is_not_a_question_is_refused(
    port: int, key: str, query: dict[str, Any], status: int
) -> None:
    async with Client(port, EVENTS, key=key, **query) as client:
        await client.ended.wait()
    assert client.status == status
    assert client.answered["content-type"] == "application/problem+json"


async def test_a_look_at_the_headers_ends(port: int, key: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(2):
        writer.write(f"HEAD {EVENTS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n".encode())
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        assert head.startswith(b"HTTP/1.1 200")
    writer.close()


async def test_who_may_not_read_sees_nothing(port: int, db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.create_stream('other')")
    key = make_key(db, "read:other", "publish:main")
    for given, path, status in [
        (None, EVENTS, 401),
        ("pgmb_key_wrong", EVENTS, 401),
        (key, EVENTS, 403),
        (key, "/v1/streams/nope/events", 403),
        (key, "/v1/streams/other/events", 200),
    ]:
        async with Client(port, path, key=given) as client:
            assert client.status == status, path
    allowed = make_key(db, "read:*", name="all")
    async with Client(port, "/v1/streams/nope/events", key=allowed) as client:
        assert client.status == 404
