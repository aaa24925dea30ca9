"""Leases: what is settled does not come again, what is not does."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from pgmb.errors import LeaseLost
from tests.contract.client.adapters import Client


async def filled(client: Client, number: int = 3, **options: Any) -> None:
    await client.create_queue("q", **options)
    await client.publish_many("a", range(number))


async def test_an_acked_lease_does_not_come_again(client: Client) -> None:
    await filled(client)
    lease = await client.receive("q")
    assert await client.ack(lease.id) == 3
    assert await client.ack(lease.id) == 0
    assert (await client.receive("q")).events == []


async def test_receive_takes_at_most_so_many_and_goes_on(client: Client) -> None:
    await filled(client, 5)
    assert [(await client.receive("q", 2)).payloads for _ in range(4)] == [[0, 1], [2, 3], [4], []]


async def test_ack_and_the_next_receive_share_one_call(client: Client) -> None:
    await filled(client, 4)
    first = await client.receive("q", 2)
    second = await client.receive("q", 2, ack=first.id)
    assert second.payloads == [2, 3]
    assert await client.ack(first.id) == 0
    assert (await client.receive("q", 2, ack=second.id)).events == []


async def test_a_part_of_a_lease_is_settled_alone(client: Client) -> None:
    await filled(client)
    lease = await client.receive("q")
    assert await client.ack(lease.id, lease.seqs[:1]) == 1
    assert await client.ack(lease.id, lease.seqs[:1]) == 0
    assert await client.ack(lease.id, []) == 0
    assert await client.retry(lease.id, after=0) == 2
    again = await client.receive("q")
    assert again.payloads == [1, 2]
    assert [event.attempt for event in again.events] == [2, 2]


async def test_a_retry_waits_for_its_time(client: Client) -> None:
    await filled(client, 1)
    lease = await client.receive("q")
    assert await client.retry(lease.id, after=timedelta(hours=1), error="busy") == 1
    assert (await client.receive("q")).events == []


async def test_attempts_end_in_the_dead_letters_with_the_last_error(client: Client) -> None:
    await filled(client, 1, max_attempts=2)
    for error in ("first", "second"):
        lease = await client.receive("q")
        assert await client.retry(lease.id, after=0, error=error) == 1
    assert (await client.receive("q")).events == []
    (dead,) = await client.dead_letters("q")
    assert dead[1:] == ("second", 2, 0)


async def test_buried_events_come_back_when_redriven(client: Client) -> None:
    await filled(client)
    lease = await client.receive("q")
    assert await client.bury(lease.id, lease.seqs[:2], error="no such customer") == 2
    assert await client.ack(lease.id) > 0
    dead = await client.dead_letters("q", topic="a", error="no such%")
    assert [(one.error, one.payload) for one in dead] == [("no such customer", 0), ("no such customer", 1)]
    assert await client.dead_letters("q", topic="b") == []
    assert await client.dead_letters("q", after=dead[0].id, max=1) == dead[1:]
    assert await client.redrive("q", [dead[0].id]) == 1
    again = await client.receive("q")
    assert (again.payloads, again.events[0].attempt) == ([0], 1)
    assert await client.drop_dead("q") == 1
    assert await client.dead_letters("q") == []


async def test_an_expired_lease_comes_again_and_its_holder_is_told(
    client: Client, db: psycopg.Connection[Any]
) -> None:
    await filled(client)
    lease = await client.receive("q", lease_for=0.001)
    again = await _once_more(client)
    assert again.payloads == [0, 1, 2]
    assert {event.attempt for event in again.events} == {2}
    for settle in (client.ack, client.retry, client.bury, client.extend):
        with pytest.raises(LeaseLost) as lost:
            await settle(lease.id)
        assert lost.value.hint
    assert await client.ack(again.id) == 3


async def test_an_extended_lease_stays(client: Client) -> None:
    await filled(client)
    lease = await client.receive("q", lease_for=5)
    until = await client.extend(lease.id, 3600)
    assert until > datetime.now(UTC) + timedelta(minutes=50)
    assert (await client.receive("q")).events == []
    assert await client.ack(lease.id) == 3


async def _once_more(client: Client) -> Any:
    # The sweep for expired leases looks at most every 50 ms.
    for _ in range(10_000):
        received = await client.receive("q")
        if received.events:
            return received
    raise AssertionError("the expired lease did not come again")
