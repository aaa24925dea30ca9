"""What is published comes back, to the letter and in order."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

import pgmb
from pgmb import NewEvent
from pgmb.errors import StreamNotFound
from tests.contract.client.adapters import Client


async def test_an_event_comes_back_with_all_that_was_given(client: Client) -> None:
    await client.create_queue("q")
    given = uuid4()
    assert await client.publish("a.b", {"n": 1}, key="k", headers={"h": "é"}, id=given) == given
    (event,) = (await client.receive("q")).events
    assert event[1:] == (given, "a.b", "k", '{"n":1}', {"h": "é"}, 1)


async def test_an_id_is_made_where_none_is_given_and_is_the_one_delivered(client: Client) -> None:
    await client.create_queue("q")
    made = await client.publish("a", 1)
    assert isinstance(made, UUID)
    assert made.version == 7
    assert (await client.receive("q")).events[0].id == made


def test_the_id_is_that_of_the_stream_whatever_becomes_of_its_segments(dsn: str) -> None:
    """The client derives it from a salt that it remembers, by segment."""
    with pgmb.connect(dsn) as broker:
        for _ in range(2):
            broker.create_stream("a.b-c")
            broker.create_queue("q", stream="a.b-c")
            first = broker.publish("t", 1, stream="a.b-c")
            broker.rotate("a.b-c")
            with broker.connection() as connection, connection.transaction():
                second = broker.publish("t", 2, stream="a.b-c", conn=connection)
            assert [event.id for event in broker.receive("q", 10)] == [first, second]
            broker.drop_queue("q")
            broker.drop_stream("a.b-c")
        for name in ("a.b-c", "100%", "%s", 'a"b', ""):
            with pytest.raises(StreamNotFound, match=re.escape(f"stream '{name}' does not exist")):
                broker.publish("t", 1, stream=name)


@pytest.mark.parametrize(
    "payload",
    [
        None,
        False,
        0,
        1.5,
        "",
        [],
        {},
        "\0",
        {"a\0b": "\0"},
        "Zoë 🐘 日本",
        '"\\\n\t\r\b',
        [[1], {"x": [None]}],
    ],
    ids=repr,
)
async def test_any_json_comes_back_to_the_letter(client: Client, payload: Any) -> None:
    await client.create_queue("q")
    await client.publish("a", payload)
    assert await client.publish_many("a", [payload, payload]) == 2
    assert await client.publish_many([NewEvent("a", payload, key="k")]) == 1
    assert (await client.receive("q")).payloads == [payload] * 4


async def test_a_large_payload_comes_back(client: Client) -> None:
    await client.create_queue("q")
    payload = {"text": "0123456789abcdef" * 300_000}
    await client.publish("a", payload)
    assert (await client.receive("q")).payloads == [payload]


async def test_many_of_one_topic_come_in_their_order_with_their_headers(client: Client) -> None:
    await client.create_queue("q")
    assert await client.publish_many("a.b", range(700), headers={"v": 2}) == 700
    received = await client.receive("q", 1000)
    assert received.payloads == list(range(700))
    assert {event.topic for event in received.events} == {"a.b"}
    assert all(event.headers == {"v": 2} for event in received.events)


async def test_many_events_keep_what_each_has(client: Client) -> None:
    await client.create_queue("q")
    given = uuid4()
    events = [
        NewEvent("a", 1),
        NewEvent("b", 2, key="k"),
        NewEvent("c", 3, headers={"x": 1}),
        NewEvent("d", 4, id=given),
        NewEvent("é", None, key="", headers={"y": "\0"}),
    ]
    assert await client.publish_many(events) == 5
    got = (await client.receive("q")).events
    assert [(e.topic, e.payload, e.key, e.headers) for e in got] == [
        (event.topic, event.payload, event.key, event.headers) for event in events
    ]
    assert got[3].id == given


async def test_nothing_is_published_from_nothing(client: Client) -> None:
    await client.create_queue("q")
    assert await client.publish_many("a", []) == 0
    assert await client.publish_many([]) == 0
    assert (await client.receive("q")).events == []


async def test_an_event_with_a_delay_comes_when_it_is_due(client: Client) -> None:
    await client.create_queue("q")
    await client.publish("late", 1, delay=3600)
    await client.publish("past", 2, delay=timedelta(seconds=-1))
    await client.publish("later", 3, at=datetime.now(UTC) + timedelta(days=400))
    assert (await client.receive("q")).payloads == [2]


async def test_a_delayed_event_can_be_taken_back_once(client: Client) -> None:
    waiting = await client.publish("late", 1, delay=3600)
    assert await client.cancel(waiting) is True
    assert await client.cancel(waiting) is False
    assert await client.cancel(uuid4()) is False


async def test_streams_are_apart(client: Client) -> None:
    await client.create_stream("other")
    await client.create_queue("q", stream="other")
    await client.publish("a", "main")
    await client.publish("a", "other", stream="other")
    await client.publish_many("a", ["others"], stream="other")
    assert (await client.receive("q")).payloads == ["other", "others"]
