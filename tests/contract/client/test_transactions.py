"""conn= joins the caller's transaction: both commit or neither does."""

from __future__ import annotations

import pytest

from pgmb import NewEvent
from tests.contract.client.adapters import Client


@pytest.mark.parametrize("number", [1, 5, 5000])
async def test_events_are_seen_once_the_transaction_commits(client: Client, number: int) -> None:
    await client.create_queue("q")
    async with client.transaction() as conn:
        await client.publish_many("a", range(number), conn=conn)
        await client.publish("b", "last", conn=conn)
        assert (await client.receive("q")).events == []
    assert (await client.receive("q", 10_000)).payloads == [*range(number), "last"]


@pytest.mark.parametrize("number", [1, 5000])
async def test_events_of_a_transaction_that_rolled_back_are_never_seen(client: Client, number: int) -> None:
    await client.create_queue("q")
    async with client.transaction(commit=False) as conn:
        await client.publish("a", 1, conn=conn)
        await client.publish_many([NewEvent("b", 2, key="k")] * number, conn=conn)
    assert (await client.receive("q")).events == []


async def test_settling_is_undone_with_the_transaction(client: Client) -> None:
    await client.create_queue("q")
    await client.publish_many("a", [1, 2, 3])
    lease = await client.receive("q")
    async with client.transaction(commit=False) as conn:
        await client.ack(lease.id, lease.seqs[:1], conn=conn)
        await client.bury(lease.id, lease.seqs[1:2], conn=conn)
        await client.retry(lease.id, lease.seqs[2:], conn=conn)
    assert await client.dead_letters("q") == []
    async with client.transaction() as conn:
        assert await client.ack(lease.id, conn=conn) == 3
    assert await client.ack(lease.id) == 0


async def test_a_transaction_receives_what_it_published_after_its_commit(client: Client) -> None:
    await client.create_queue("q")
    async with client.transaction() as conn:
        await client.publish("a", 1, conn=conn)
        assert (await client.receive("q", conn=conn)).payloads == []
    assert (await client.receive("q")).payloads == [1]


async def test_a_queue_made_in_a_transaction_is_gone_with_it(client: Client) -> None:
    async with client.transaction(commit=False) as conn:
        assert await client.create_queue("q", conn=conn) is True
    assert await client.drop_queue("q") is False
