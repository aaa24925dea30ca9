"""What is published or settled inside another library's transaction is part of it."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from pgmb import NewEvent
from pgmb._core import batch
from tests.contract.outbox.libraries import Library, rolled_back, settled


async def payloads(library: Library) -> list[Any]:
    lease = await settled(library.broker.receive("q", 100_000))
    return [event.payload for event in lease]


@pytest.fixture(autouse=True)
async def queue(library: Library, db: psycopg.Connection[Any]) -> None:
    db.execute("create table orders (id int primary key)")
    await settled(library.broker.create_queue("q"))


def orders(db: psycopg.Connection[Any]) -> list[int]:
    return [row[0] for row in db.execute("select id from orders order by id")]


async def test_a_commit_delivers(library: Library, db: psycopg.Connection[Any]) -> None:
    async with library.transaction() as conn:
        given = await settled(library.broker.publish("order.paid", {"n": 1}, key="k", conn=conn))
        await library.execute(conn, "insert into orders values (1)")
        assert await payloads(library) == []
    (event,) = (await settled(library.broker.receive("q"))).events
    assert (event.id, event.key, event.payload) == (given, "k", {"n": 1})
    assert orders(db) == [1]


async def test_a_publish_alone_is_a_transaction_that_commits(library: Library) -> None:
    async with library.transaction() as conn:
        await settled(library.broker.publish("a", 1, conn=conn))
    assert await payloads(library) == [1]


@pytest.mark.parametrize("first", ["publish", "write"])
async def test_a_rollback_does_not_deliver(library: Library, db: psycopg.Connection[Any], first: str) -> None:
    async with rolled_back(library.transaction()) as conn:
        if first == "write":
            await library.execute(conn, "insert into orders values (1)")
        await settled(library.broker.publish("a", 1, conn=conn))
        if first == "publish":
            await library.execute(conn, "insert into orders values (1)")
    assert await payloads(library) == []
    assert orders(db) == []


async def test_a_rolled_back_savepoint_takes_its_events_along(
    library: Library, db: psycopg.Connection[Any]
) -> None:
    async with library.transaction() as conn:
        await settled(library.broker.publish("a", "before", conn=conn))
        async with rolled_back(library.savepoint(conn)):
            await settled(library.broker.publish("a", "inside", conn=conn))
            await library.execute(conn, "insert into orders values (1)")
        async with library.savepoint(conn):
            await settled(library.broker.publish("a", "kept", conn=conn))
            await library.execute(conn, "insert into orders values (2)")
    assert await payloads(library) == ["before", "kept"]
    assert orders(db) == [2]


async def test_a_savepoint_before_anything_else(library: Library) -> None:
    async with library.transaction() as conn:
        async with rolled_back(library.savepoint(conn)):
            await settled(library.broker.publish("a", "inside", conn=conn))
        await settled(library.broker.publish("a", "after", conn=conn))
    assert await payloads(library) == ["after"]


async def test_an_ack_and_the_writes_it_stands_for_are_one(
    library: Library, db: psycopg.Connection[Any]
) -> None:
    await settled(library.broker.publish_many("a", [1, 2]))
    lease = await settled(library.broker.receive("q"))
    async with rolled_back(library.transaction()) as conn:
        await library.execute(conn, "insert into orders values (1)")
        assert await settled(lease.ack(conn=conn)) == 2
    assert orders(db) == []
    async with library.transaction() as conn:
        await library.execute(conn, "insert into orders values (1)")
        assert await settled(lease.ack(conn=conn)) == 2
    assert orders(db) == [1]
    assert await settled(lease.ack()) == 0


@pytest.mark.parametrize("number", [3, batch.BLOCK_EVENTS + 500])
async def test_many_events_by_arrays_and_by_copy(library: Library, number: int) -> None:
    async with rolled_back(library.transaction()) as conn:
        await settled(library.broker.publish_many("a", range(number), conn=conn))
    async with library.transaction() as conn:
        events = (NewEvent("a", n, key=str(n)) for n in range(number))
        assert await settled(library.broker.publish_many(events, conn=conn)) == number
    assert await payloads(library) == list(range(number))


async def test_other_calls_join_as_well(library: Library) -> None:
    await settled(library.broker.publish("a", 1))
    async with rolled_back(library.transaction()) as conn:
        await settled(library.broker.create_stream("s", conn=conn))
        await settled(library.broker.publish("a", 2, stream="s", conn=conn))
        lease = await settled(library.broker.receive("q", conn=conn))
        assert [event.payload for event in lease] == [1]
        await settled(lease.bury(conn=conn))
        assert len(await settled(library.broker.dead_letters("q", conn=conn))) == 1
    streams = await settled(library.broker.stream_status())
    assert [status.stream for status in streams] == ["main"]
    assert await payloads(library) == [1]


async def test_the_librarys_own_statements_read_as_before(library: Library) -> None:
    """The broker's way of reading stays the broker's."""
    async with library.transaction() as conn:
        await settled(library.broker.publish("a", 1, conn=conn))
        await library.execute(conn, "select now(), '{}'::json, gen_random_uuid()")
        await settled(library.broker.publish("a", 2, conn=conn))
    assert await payloads(library) == [1, 2]


async def test_an_error_of_the_brokers_leaves_a_transaction_that_can_roll_back(library: Library) -> None:
    from pgmb.errors import StreamNotFound

    with pytest.raises(StreamNotFound):
        async with library.transaction() as conn:
            await settled(library.broker.publish("a", 1, stream="nowhere", conn=conn))
    async with library.transaction() as conn:
        with pytest.raises(StreamNotFound):
            async with library.savepoint(conn):
                await settled(library.broker.publish("a", 1, stream="nowhere", conn=conn))
        await settled(library.broker.publish("a", 2, conn=conn))
    assert await payloads(library) == [2]
