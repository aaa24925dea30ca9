"""What failed together comes again together: the same set, by itself, however much else is due.

Through SQL and both clients: `client` is each of them in turn.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import psycopg

import pgmb
from harness.states import age_waiting, expire
from tests.contract.client.adapters import Client, Received


async def everything(client: Client) -> list[Received]:
    """Leases until there is none, each left as it is."""
    found: list[Received] = []
    while (lease := await client.receive("q", 1000)).events:
        found.append(lease)
    return found


async def test_a_set_comes_again_as_it_was(client: Client) -> None:
    await client.create_queue("q", ["a"])
    for number in range(10):
        await client.publish("a", number)
    lease = await client.receive("q", 10)
    assert await client.retry(lease.id, lease.seqs[2:5], after=0, together=True) == 3
    assert await client.retry(lease.id, lease.seqs[7:8], after=0) == 1
    assert await client.retry(lease.id, lease.seqs[:2], after=0, together=True) == 2
    assert await client.retry(lease.id, lease.seqs[8:], after=0) == 2
    await client.ack(lease.id)
    again = await everything(client)
    assert sorted(one.payloads for one in again) == [[0, 1], [2, 3, 4], [7, 8, 9]]
    assert {event.attempt for one in again for event in one.events} == {2}


async def test_a_set_may_fail_again_whole_or_in_parts(client: Client) -> None:
    await client.create_queue("q", ["a"])
    for number in range(6):
        await client.publish("a", number)
    lease = await client.receive("q", 6)
    await client.retry(lease.id, after=0, error="first", together=True)
    lease = await client.receive("q", 100)
    assert lease.payloads == [0, 1, 2, 3, 4, 5]
    await client.retry(lease.id, lease.seqs[:3], after=0, error="left", together=True)
    await client.retry(lease.id, lease.seqs[3:5], after=0, error="right", together=True)
    await client.ack(lease.id, lease.seqs[5:])
    assert sorted(one.payloads for one in await everything(client)) == [[0, 1, 2], [3, 4]]


async def test_a_set_given_back_stays_one(client: Client) -> None:
    await client.create_queue("q", ["a"])
    for number in range(4):
        await client.publish("a", number)
    lease = await client.receive("q", 2)
    await client.retry(lease.id, after=0, together=True)
    lease = await client.receive("q", 100)
    await client.release(lease.id)
    leases = await everything(client)
    assert [one.payloads for one in leases] == [[0, 1], [2, 3]]
    assert leases[0].events[0].attempt == 2


async def test_a_set_is_spent_as_a_whole(client: Client) -> None:
    await client.create_queue("q", ["a"], max_attempts=2)
    for number in range(3):
        await client.publish("a", number)
    for error in ("once", "twice"):
        lease = await client.receive("q", 100)
        assert lease.payloads == [0, 1, 2]
        await client.retry(lease.id, after=0, error=error, together=True)
    assert await everything(client) == []
    assert [(dead.payload, dead.error) for dead in await client.dead_letters("q")] == [
        (number, "twice") for number in range(3)
    ]


def test_a_set_whose_holder_vanished_comes_again_as_it_was(dsn: str, db: psycopg.Connection[Any]) -> None:
    with pgmb.connect(dsn) as broker:
        broker.create_queue("q", ["a"], lease_for=60)
        broker.publish_many("a", range(5))
        broker.receive("q", 5).retry(after=0, together=True)
        held = broker.receive("q", 100)
        assert len(held) == 5
        broker.publish_many("a", range(5, 8))
        broker.receive("q", 3).retry(after=0)
        assert held.id is not None
        expire(db, held.id)
        sets = [[event.payload for event in broker.receive("q", 100)] for _ in range(2)]
        assert sorted(sets) == [[0, 1, 2, 3, 4], [5, 6, 7]]


def test_many_sets_due_at_the_same_moment_among_many_receivers(dsn: str, db: psycopg.Connection[Any]) -> None:
    with pgmb.connect(dsn) as broker:
        broker.create_queue("q", ["a"])
        broker.publish_many("a", range(600))
        sets: list[list[int]] = []
        rng = random.Random(4)
        while lease := broker.receive("q", rng.randint(1, 40)):
            lease.retry(after=3600, together=True)
            sets.append([event.payload for event in lease])
        age_waiting(db, "2 hours")
        found: list[list[int]] = []
        lock = threading.Lock()

        def work() -> None:
            while lease := broker.receive("q", 50):
                with lock:
                    found.append([event.payload for event in lease])
                lease.ack()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(sets) > 20
    assert sorted(found) == sets
