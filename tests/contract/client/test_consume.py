"""consume(): leases one after another, in a loop of one's own."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import psycopg
import pytest

import pgmb

LONG = 60.0


@pytest.mark.parametrize("listen", [True, False])
def test_leases_come_one_after_another_and_none_is_empty(broker: pgmb.Broker, listen: bool) -> None:
    broker.create_queue("q")
    broker.publish_many("a", range(25))
    got: list[Any] = []
    with broker.consume("q", max=10, listen=listen) as leases:
        for lease in leases:
            assert lease
            got += [event.payload for event in lease]
            lease.ack()
            if len(got) == 25:
                break
    assert got == list(range(25))


@pytest.mark.parametrize("listen", [True, False])
async def test_it_waits_for_what_comes_and_ends_when_closed(dsn: str, listen: bool) -> None:
    async with await pgmb.aconnect(dsn) as broker:
        await broker.create_queue("q")
        leases = broker.consume("q", listen=listen)
        async with asyncio.timeout(LONG):
            for n in range(3):
                waiting = asyncio.ensure_future(anext(leases))
                await asyncio.sleep(0.05)
                await broker.publish("a", n)
                lease = await waiting
                assert [event.payload for event in lease] == [n]
                await lease.ack()
            waiting = asyncio.ensure_future(anext(leases))
            await asyncio.sleep(0.05)
            leases.close()
            with pytest.raises(StopAsyncIteration):
                await waiting


def test_closing_from_another_thread_ends_the_loop(broker: pgmb.Broker) -> None:
    broker.create_queue("q")
    leases = broker.consume("q")
    thread = threading.Thread(target=lambda: [lease.ack() for lease in leases])
    thread.start()
    time.sleep(0.05)
    leases.close()
    thread.join(LONG)
    assert not thread.is_alive()


def test_a_retry_is_delivered_again(broker: pgmb.Broker) -> None:
    broker.create_queue("q")
    broker.publish("a", 1)
    attempts: list[int] = []
    for lease in broker.consume("q"):
        attempts.append(lease.events[0].attempt)
        if len(attempts) == 2:
            lease.ack()
            break
        lease.retry(after=0.5)
    assert attempts == [1, 2]


def test_what_cannot_be_consumed(broker: pgmb.Broker) -> None:
    with pytest.raises(pgmb.NotFound):
        next(broker.consume("nothing"))
    with pytest.raises(pgmb.InvalidArgument):
        broker.consume("q", max=0)


def test_a_consumer_needs_no_more_than_grant_consume(
    dsn: str, broker: pgmb.Broker, db: psycopg.Connection[Any]
) -> None:
    broker.create_queue("q")
    db.execute("create role plain_consumer login")
    try:
        db.execute("select pgmb.grant_consume('q', 'plain_consumer')")
        with pgmb.connect(dsn, user="plain_consumer") as consumer:
            leases = consumer.consume("q")
            broker.publish("a", 1)
            lease = next(leases)
            lease.ack()
            threading.Timer(0.3, broker.publish, ("a", 2)).start()
            assert [event.payload for event in next(leases)] == [2]
            assert not consumer.listener().ticking
    finally:
        db.execute("drop owned by plain_consumer")
        db.execute("drop role plain_consumer")
