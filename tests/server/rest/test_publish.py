"""Publishing over REST: one, many, lines; all of a request or nothing of it; ids are answered."""

from __future__ import annotations

import gzip
from typing import Any

import psycopg

from pgmb.server.limits import Limits
from tests.server.rest.api import opened

EVENTS = "/v1/streams/main/events"


def published(dsn: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn) as connection:
        return connection.execute(
            "select topic, payload::text, key, headers::text from pgmb.log_main order by seq"
        ).fetchall()


async def test_one_event_is_published_to_the_letter(dsn: str) -> None:
    async with opened(dsn) as api:
        body = b'{"topic": "a.b", "key": "k", "headers": {"x": 1}, "payload": {"b":  1.50, "a": [1e3]}}'
        answer = await api.done(
            "POST", EVENTS, content=body, headers={"Content-Type": "application/json; charset=utf-8"}
        )
        assert len(answer["ids"]) == 1
        assert published(dsn) == [("a.b", '{"b":  1.50, "a": [1e3]}', "k", '{"x":1}')]


async def test_an_id_that_was_given_is_answered_and_kept(dsn: str) -> None:
    given = "0190a1b2-0000-7000-8000-000000000001"
    async with opened(dsn) as api:
        answer = await api.done("POST", EVENTS, json={"topic": "t", "payload": None, "id": given})
        assert answer["ids"] == [given]
    with psycopg.connect(dsn) as connection:
        assert str(connection.execute("select id from pgmb.log_main").fetchall()[0][0]) == given


async def test_many_are_published_in_their_order_with_their_ids(dsn: str) -> None:
    async with opened(dsn) as api:
        await api.done("POST", "/v1/queues", json={"name": "q"})
        ids = await api.publish(*range(2500))
        assert len(set(ids)) == 2500
        received = await api.receive(max=2500)
        while len(received["events"]) < 2500:
            received["events"] += (await api.receive(max=2500))["events"]
        assert [event["payload"] for event in received["events"]] == list(range(2500))
        assert [event["id"] for event in received["events"]] == ids


async def test_json_lines_are_published(dsn: str) -> None:
    lines = b'{"topic":"a","payload":1}\n\n{"topic":"b","payload":"x\\ny"}\r\n{"topic":"c","payload":null}'
    async with opened(dsn) as api:
        headers = {"Content-Type": "application/x-ndjson"}
        answer = await api.done("POST", EVENTS, content=lines, headers=headers)
        assert len(answer["ids"]) == 3
        assert [row[:2] for row in published(dsn)] == [("a", "1"), ("b", '"x\\ny"'), ("c", "null")]
        assert await api.refused("POST", EVENTS, content=b"\n", headers=headers) == (
            422,
            "invalid_argument",
        )


async def test_it_is_all_or_nothing(dsn: str) -> None:
    async with opened(dsn) as api:
        events = [{"topic": "a", "payload": 1}, {"topic": "", "payload": 2}]
        assert (await api.refused("POST", EVENTS, json={"events": events}))[0] == 422
        bad = b'{"events": [{"topic": "a", "payload": 1}, {"topic": "b", "payload": "\xff"}]}'
        headers = {"Content-Type": "application/json"}
        assert (await api.refused("POST", EVENTS, content=bad, headers=headers))[0] == 422
        assert published(dsn) == []


async def test_a_dedup_key_that_is_taken_answers_the_id_of_the_first(dsn: str) -> None:
    async with opened(dsn) as api:
        event = {"topic": "a", "payload": 1, "dedup_key": "once"}
        (first,) = (await api.done("POST", EVENTS, json=event))["ids"]
        assert (await api.done("POST", EVENTS, json=event))["ids"] == [first]
        several = [{"topic": "b", "payload": 2}, event, {**event, "dedup_key": "twice"}]
        ids = (await api.done("POST", EVENTS, json={"events": [*several, several[2]]}))["ids"]
        assert ids[1] == first
        assert ids[2] == ids[3]
        assert len(set(ids)) == 3
        assert [row[0] for row in published(dsn)] == ["a", "b", "a"]


async def test_a_delayed_one_waits_among_others(dsn: str) -> None:
    async with opened(dsn) as api:
        events = [{"topic": "a", "payload": 1, "delay": "PT1H"}, {"topic": "b", "payload": 2, "delay": 0}]
        ids = (await api.done("POST", EVENTS, json={"events": events}))["ids"]
        assert [row[0] for row in published(dsn)] == ["b"]
    with psycopg.connect(dsn) as connection:
        assert str(connection.execute("select id from pgmb.delayed").fetchall()[0][0]) == ids[0]


async def test_a_gzipped_body_is_read_and_a_bomb_is_not(dsn: str) -> None:
    async with opened(dsn, Limits(body=10_000)) as api:
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        body = gzip.compress(b'{"topic":"a","payload":1}')
        assert await api.done("POST", EVENTS, content=body, headers=headers)
        bomb = gzip.compress(b'{"topic":"a","payload":"' + b"x" * 1_000_000 + b'"}')
        assert len(bomb) < 10_000
        assert await api.refused("POST", EVENTS, content=bomb, headers=headers) == (413, "too_large")
        assert (await api.refused("POST", EVENTS, content=body[:-3], headers=headers))[0] == 422
        headers["Content-Encoding"] = "br"
        assert (await api.refused("POST", EVENTS, content=body, headers=headers))[0] == 415


async def test_more_events_or_bytes_than_a_request_may_have_are_refused(dsn: str) -> None:
    async with opened(dsn, Limits(body=2000, events=3)) as api:
        events = [{"topic": "a", "payload": n} for n in range(4)]
        assert await api.refused("POST", EVENTS, json={"events": events}) == (413, "too_many_events")
        large = {"topic": "a", "payload": "x" * 3000}
        assert await api.refused("POST", EVENTS, json=large) == (413, "too_large")
        assert published(dsn) == []


async def test_an_unknown_stream_is_not_found(dsn: str) -> None:
    async with opened(dsn) as api:
        for events in ([{"topic": "a", "payload": 1}], [{"topic": "a", "payload": 1}] * 2):
            given = {"events": events}
            assert await api.refused("POST", "/v1/streams/none/events", json=given) == (404, "not_found")


NO_EVENTS = [
    b"",
    b"null",
    b"[]",
    b"{}",
    b'{"events": []}',
    b'{"topic": 1, "payload": 1}',
    b'{"topic": "a"}',
    b'{"topic": "a", "payload": 1, "other": 2}',
    b'{"topic": "a\\u0000", "payload": 1}',
    b'{"topic": "\\ud800", "payload": 1}',
    b'{"topic": "\xff", "payload": 1}',
    b'{"topic": "a", "payload": "\xff"}',
    b'{"topic": "a", "payload": 1, "delay": -1}',
    b'{"topic": "a", "payload": 1, "delay": "-PT1S"}',
    b'{"topic": "a", "payload": 1, "delay": 1e300}',
    b'{"topic": "a", "payload": 1, "delay": "P99999999D"}',
    b'{"topic": "a", "payload": 1, "id": "x"}',
    b'{"topic": "a", "payload": 1, "headers": []}',
    b'{"topic": "a", "payload": 1, "key": "\\u0000"}',
    b'{"topic": "a", "payload": 1, "dedup_key": ""}',
    b'{"topic": "a", "payload": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b'{"topic": "a", "payload": 1, "headers": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
    b'\xff\xfe{"topic": "a", "payload": 1}',
    b'{"topic": "a", "payload": 1} x',
]


async def test_what_is_no_event_is_refused(dsn: str) -> None:
    headers = {"Content-Type": "application/json"}
    async with opened(dsn) as api:
        for body in NO_EVENTS:
            refused = await api.refused("POST", EVENTS, content=body, headers=headers)
            assert refused == (422, "invalid_argument"), body[:60]
        assert published(dsn) == []


async def test_another_content_type_is_refused(dsn: str) -> None:
    async with opened(dsn) as api:
        for named in ("text/plain", "application/xml", "multipart/form-data", ""):
            answer = await api.refused("POST", EVENTS, content=b"{}", headers={"Content-Type": named})
            assert answer == (415, "unsupported_media_type")
