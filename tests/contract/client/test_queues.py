"""Queues: patterns, pausing, moving."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

import pgmb
from pgmb.errors import Conflict, HistoryGone, InvalidArgument
from tests.contract.client.adapters import Client


async def test_a_queue_is_created_once(client: Client) -> None:
    assert await client.create_queue("q", ["a.*"]) is True
    assert await client.create_queue("q", ["a.*"]) is False
    with pytest.raises(Conflict):
        await client.create_queue("q", ["b.*"])
    assert await client.drop_queue("q") is True
    assert await client.drop_queue("q") is False


async def test_a_queue_gets_what_matches(client: Client) -> None:
    await client.create_queue("q", ["order.*", "user.#"])
    for topic in ("order", "order.made", "order.made.late", "user", "user.a.b", "x"):
        await client.publish(topic, topic)
    assert (await client.receive("q")).payloads == ["order.made", "user", "user.a.b"]


async def test_new_patterns_hold_from_the_position_on(client: Client) -> None:
    await client.create_queue("q", ["a"])
    await client.publish("a", 1)
    held = await client.receive("q")
    await client.bind("q", ["b"])
    await client.publish_many("a", [2])
    await client.publish_many("b", [3])
    assert (await client.receive("q")).payloads == [3]
    assert await client.ack(held.id) == 1


async def test_a_paused_queue_delivers_nothing_until_it_is_resumed(client: Client) -> None:
    await client.create_queue("q")
    await client.publish("a", 1)
    await client.pause("q", "maintenance")
    assert (await client.receive("q")).events == []
    await client.resume("q")
    assert (await client.receive("q")).payloads == [1]


async def test_what_comes_next_is_seen_without_a_lease(client: Client) -> None:
    await client.create_queue("q", ["a"], filter='$.payload > "a"')
    for payload in ("a", "b", "c"):
        await client.publish("a", payload, key="k")
    found = await client.next_events("q", max=1)
    (first,) = found.events
    assert (first.payload, first.bytes, first.key, first.attempt, first.due_at) == ('"b"', 3, "k", 1, None)
    assert (found.more, found.looked > 0) == (True, True)
    lease = await client.receive("q", max=1)
    assert (lease.payloads, lease.events[0].id) == (["b"], first.id)


def test_a_costly_filter_is_asked_under_a_timeout(broker: pgmb.Broker) -> None:
    broker.create_queue("q", filter='$.payload like_regex "^b+$"')
    for payload in ("a", "b"):
        broker.publish("a", payload)
    assert [event.payload for event in broker.next_events("q").events] == ['"b"']


async def test_altering_leaves_what_is_not_named(client: Client) -> None:
    await client.create_queue("q", max_attempts=5)
    await client.alter_queue("q", max_attempts=1)
    await client.publish("a", 1)
    lease = await client.receive("q")
    await client.retry(lease.id, after=0)
    assert len(await client.dead_letters("q")) == 1


async def test_a_queue_can_be_moved_back_and_emptied(client: Client) -> None:
    start = await client.position()
    await client.create_queue("q")
    await client.publish_many("a", [1, 2])
    lease = await client.receive("q")
    await client.ack(lease.id)
    await client.seek("q", to=start)
    assert (await client.receive("q", 1)).payloads == [1]
    await client.seek("q", to=await client.earliest())
    assert (await client.receive("q")).payloads == [1, 2]
    await client.seek("q", to=start)
    await client.purge("q")
    assert (await client.receive("q")).events == []


async def test_a_queue_can_start_in_the_past(client: Client) -> None:
    await client.publish("a", 1)
    await client.create_queue("q", starting=await client.earliest())
    assert (await client.receive("q")).payloads == [1]


async def test_between_positions_lie_the_same_events_always(client: Client) -> None:
    await client.publish("a", 0)
    first = await client.position()
    await client.publish_many("a", range(1, 6), headers={"h": 1})
    second = await client.position()
    await client.publish("a", 6)
    page = await client.between("main", after=first, upto=second, max=3)
    rest = await client.between("main", after=first, upto=second, after_seq=page[-1].seq)
    assert [event.payload for event in page + rest] == [1, 2, 3, 4, 5]
    assert page[0].headers == {"h": 1}


async def test_ticks_name_positions(client: Client) -> None:
    await client.publish("a", 1)
    tick = await client.tick()
    assert tick is not None
    assert await client.tick() is None
    named = await client.position_of("main", tick)
    assert await client.position_at("main", at=datetime.now(UTC) + timedelta(hours=1)) == named
    assert await client.position_at("main", at=datetime(2001, 1, 1, tzinfo=UTC)) == await client.earliest()
    with pytest.raises(HistoryGone):
        await client.position_of("main", tick + 1000)


async def test_readers_outside_are_remembered_and_forgotten(client: Client) -> None:
    first = await client.position()
    await client.confirm("main", "lake", at=first)
    await client.publish("a", 1)
    await client.confirm("main", "lake", at=await client.position(), expected=first)
    await client.publish("a", 2)
    with pytest.raises(Conflict, match="another one of that name"):
        await client.confirm("main", "lake", at=await client.position(), expected=first)
    assert await client.forget("main", "lake") is True
    assert await client.forget("main", "lake") is False


async def test_streams_are_made_altered_rotated_and_dropped(client: Client) -> None:
    await client.create_stream("s", rotate_events=10, keep_for=60, archive=True)
    await client.create_stream("s")
    await client.alter_stream("s", keep_for=timedelta(days=2), archive=False)
    await client.create_queue("q", stream="s")
    await client.publish("a", 1, stream="s")
    assert await client.rotate("s") == 1
    await client.publish("a", 2, stream="s")
    assert (await client.receive("q")).payloads == [1, 2]
    with pytest.raises(Conflict):
        await client.drop_stream("s")
    await client.drop_queue("q")
    await client.drop_stream("s")


@pytest.mark.parametrize("patterns", [[], ["a*"], ["#x"]], ids=repr)
async def test_what_is_no_pattern_is_refused(client: Client, patterns: list[str]) -> None:
    with pytest.raises(InvalidArgument):
        await client.create_queue("q", patterns)
