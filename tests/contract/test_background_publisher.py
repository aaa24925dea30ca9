"""The background publisher: batches, order, bounds, and nothing lost or hidden when something fails."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import psycopg
import pytest

import pgmb
from harness.waiting import PATIENCE, until
from pgmb.errors import InvalidArgument, PublisherClosed, PublisherFull, PublishFailed, StreamNotFound

BAD = msgspec.Raw(b"{oops")


async def settled(result: Any) -> Any:
    """What a call gave, awaited where it is asynchronous."""
    return await result if inspect.isawaitable(result) else result


@pytest.fixture(params=["sync", "async"])
async def broker(request: pytest.FixtureRequest, dsn: str) -> AsyncGenerator[Any]:
    """A broker of either kind, with a queue of everything."""
    opened: Any = pgmb.connect(dsn) if request.param == "sync" else await pgmb.aconnect(dsn)
    await settled(opened.create_queue("q"))
    yield opened
    await settled(opened.close())


def logged(db: psycopg.Connection[Any]) -> list[Any]:
    return [row[0] for row in db.execute("select payload from pgmb.log_main order by seq")]


async def enqueue_all(publisher: Any, payloads: Any, **options: Any) -> None:
    for payload in payloads:
        await settled(publisher.enqueue("a", payload, **options))


async def test_a_publisher_in_a_hurry_takes_large_batches(broker: Any, db: psycopg.Connection[Any]) -> None:
    """A process that ends has seconds for all that is pending."""
    publisher = broker.publisher(flush_every=3600, max_batch=2)
    with db.transaction():
        db.execute("lock table pgmb.log_main in exclusive mode")
        await enqueue_all(publisher, range(1000))
        publisher.hurry()
        if inspect.iscoroutinefunction(publisher.close):
            closing = asyncio.create_task(publisher.close())
        else:
            closing = asyncio.create_task(asyncio.to_thread(publisher.close))
        await until(lambda: publisher._held._flush_to == 1000)
    await closing
    assert logged(db) == list(range(1000))
    ((transactions,),) = db.execute("select count(distinct xid) from pgmb.log_main")
    assert transactions <= 2


# -- batches -------------------------------------------------------------------------------------------------


async def test_what_is_enqueued_is_published_as_it_was(broker: Any) -> None:
    await settled(broker.create_stream("other"))
    await settled(broker.create_queue("there", stream="other"))
    publisher = broker.publisher()
    payload = {"n": 1}
    given = await settled(publisher.enqueue("order.paid", payload, key="k", headers={"h": 1}))
    payload["n"] = 2
    await settled(publisher.enqueue("order.paid", None, stream="other"))
    await settled(publisher.close())
    (event,) = await settled(broker.receive("q"))
    assert (event.id, event.topic, event.key, event.headers) == (given, "order.paid", "k", {"h": 1})
    assert event.payload == {"n": 1}, "as it was when it was enqueued"
    (event,) = await settled(broker.receive("there"))
    assert event.payload is None


@pytest.mark.parametrize("max_batch", [1, 7, 500, 5000])
async def test_order_and_number_are_kept(broker: Any, db: psycopg.Connection[Any], max_batch: int) -> None:
    publisher = broker.publisher(max_batch=max_batch, max_pending=100_000)
    total = 300 if max_batch == 1 else 6000
    await enqueue_all(publisher, range(total))
    await settled(publisher.flush(PATIENCE))
    assert logged(db) == list(range(total)), "committed when flush returns"
    assert publisher.pending == 0
    await settled(publisher.close())


async def test_a_full_batch_does_not_wait(broker: Any, db: psycopg.Connection[Any]) -> None:
    publisher = broker.publisher(flush_every=3600, max_batch=10)
    await enqueue_all(publisher, range(10))
    await until(lambda: logged(db) == list(range(10)))
    await enqueue_all(publisher, range(10, 15))
    await settled(publisher.close())
    assert logged(db) == list(range(15))


async def test_a_few_events_wait_for_the_interval_only(broker: Any, db: psycopg.Connection[Any]) -> None:
    publisher = broker.publisher(flush_every=0.01, max_batch=1_000_000)
    await enqueue_all(publisher, range(3))
    await until(lambda: logged(db) == [0, 1, 2])
    await enqueue_all(publisher, range(3, 5))
    await until(lambda: logged(db) == [0, 1, 2, 3, 4])
    await settled(publisher.close())


async def test_events_share_transactions(broker: Any, db: psycopg.Connection[Any]) -> None:
    publisher = broker.publisher(flush_every=3600, max_batch=100)
    await enqueue_all(publisher, range(1000))
    await settled(publisher.close())
    assert db.execute("select count(distinct xid) from pgmb.log_main").fetchone() == (10,)


async def test_a_dedup_key_holds(broker: Any, db: psycopg.Connection[Any]) -> None:
    publisher = broker.publisher()
    for payload in (1, 2):
        await settled(publisher.enqueue("a", payload, dedup_key="same"))
    await settled(publisher.enqueue("a", 3, dedup_key="other"))
    await settled(publisher.flush())
    await settled(publisher.enqueue("a", 4, dedup_key="same"))
    await settled(publisher.close())
    assert logged(db) == [1, 3]


async def test_nothing_enqueued_is_nothing_done(broker: Any) -> None:
    publisher = broker.publisher()
    await settled(publisher.flush())
    await settled(publisher.close())
    await settled(publisher.close())
    with pytest.raises(PublisherClosed):
        await settled(publisher.enqueue("a", 1))


# -- what the server rejects ---------------------------------------------------------------------------------


async def test_what_cannot_be_sent_raises_in_the_caller(broker: Any, db: psycopg.Connection[Any]) -> None:
    publisher = broker.publisher()
    nonsense: list[tuple[Any, Any, dict[str, Any], type[Exception]]] = [
        ("a", object(), {}, TypeError),
        ("a", 1, {"headers": object()}, TypeError),
        (5, 1, {}, InvalidArgument),
        (None, 1, {}, InvalidArgument),
        ("a", 1, {"key": 5}, InvalidArgument),
        ("\ud800", 1, {}, UnicodeEncodeError),
    ]
    for topic, payload, options, kind in nonsense:
        with pytest.raises(kind):
            await settled(publisher.enqueue(topic, payload, **options))
    await settled(publisher.enqueue("a", "fine"))
    await settled(publisher.close())
    assert logged(db) == ["fine"]


async def test_a_rejected_event_does_not_hold_up_the_others(
    broker: Any, db: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "pgmb")
    publisher = broker.publisher(flush_every=3600, max_batch=200)
    payloads: list[Any] = list(range(1000))
    for place in (3, 500, 501, 999):
        payloads[place] = BAD
    await enqueue_all(publisher, payloads)
    for _ in range(2):
        with pytest.raises(PublishFailed, match="4 events were not published") as caught:
            await settled(publisher.flush(PATIENCE))
        assert [event.payload for event in caught.value.events] == [BAD] * 4
        assert isinstance(caught.value.__cause__, psycopg.errors.InvalidTextRepresentation)
        assert publisher.pending == 4
    assert logged(db) == [payload for payload in payloads if payload is not BAD]
    assert [item.stream for item in publisher.failed] == ["main"] * 4
    gone = await settled(publisher.discard_failed())
    assert [bytes(item.event.payload) for item in gone] == [b"{oops"] * 4
    await enqueue_all(publisher, ["after"])
    await settled(publisher.close())
    assert logged(db)[-1] == "after"


async def test_events_of_a_missing_stream_are_kept_until_it_is_there(
    broker: Any, db: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "pgmb")
    publisher = broker.publisher()
    await enqueue_all(publisher, range(50), stream="late")
    await enqueue_all(publisher, range(50))
    with pytest.raises(PublishFailed) as caught:
        await settled(publisher.flush(PATIENCE))
    assert isinstance(caught.value.__cause__, StreamNotFound)
    assert len(caught.value.events) == 50
    assert logged(db) == list(range(50))
    await settled(broker.create_stream("late"))
    await settled(publisher.flush(PATIENCE))
    rows = db.execute("select payload from pgmb.log_late order by seq").fetchall()
    assert [row[0] for row in rows] == list(range(50))
    await settled(publisher.close())


async def test_the_end_raises_what_failed(broker: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "pgmb")
    publisher = broker.publisher()
    await settled(publisher.enqueue("a", BAD))
    with pytest.raises(PublishFailed):
        await settled(publisher.close())
    with pytest.raises(PublisherClosed):
        await settled(publisher.enqueue("a", 1))
    assert [item.event.payload for item in publisher.failed] == [BAD]


async def leave_by_an_error(broker: Any, payload: Any) -> None:
    if isinstance(broker, pgmb.Broker):
        with broker.publisher(flush_every=3600) as publisher:
            publisher.enqueue("a", payload)
            raise KeyError("the caller's own")
    async with broker.publisher(flush_every=3600) as publisher:
        await publisher.enqueue("a", payload)
        raise KeyError("the caller's own")


async def test_an_exception_inside_with_still_flushes(broker: Any, db: psycopg.Connection[Any]) -> None:
    with pytest.raises(KeyError):
        await leave_by_an_error(broker, 1)
    assert logged(db) == [1]


async def test_a_failing_flush_does_not_hide_the_callers_exception(
    broker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyError) as caught:
        await leave_by_an_error(broker, BAD)
    assert "1 events were not published" in caught.value.__notes__[0]
    assert "1 events were not published" in caplog.text


# -- bounds --------------------------------------------------------------------------------------------------


async def test_enqueue_holds_back_when_there_is_no_room(broker: Any, db: psycopg.Connection[Any]) -> None:
    publisher = broker.publisher(flush_every=0, max_batch=5, max_pending=10)
    with db.transaction():
        db.execute("lock table pgmb.log_main in access exclusive mode")
        await enqueue_all(publisher, range(10))
        with pytest.raises(PublisherFull):
            await settled(publisher.enqueue("a", "too much", block=False))
        with pytest.raises(PublisherFull, match="10 events"):
            await settled(publisher.enqueue("a", "too much", timeout=0.05))
        assert publisher.pending == 10
        with pytest.raises(PublishFailed, match="in time") as caught:
            await settled(publisher.flush(0.05))
        assert len(caught.value.events) == 10
    await settled(publisher.enqueue("a", 10))
    await settled(publisher.close())
    assert logged(db) == list(range(11))


async def test_a_blocked_enqueue_goes_on_as_soon_as_there_is_room(
    broker: Any, db: psycopg.Connection[Any]
) -> None:
    publisher = broker.publisher(flush_every=0, max_batch=5, max_pending=10)
    with db.transaction():
        db.execute("lock table pgmb.log_main in access exclusive mode")
        await enqueue_all(publisher, range(10))
        if isinstance(broker, pgmb.Broker):
            waiting: Any = asyncio.create_task(asyncio.to_thread(publisher.enqueue, "a", 10))
        else:
            waiting = asyncio.create_task(publisher.enqueue("a", 10))
        await asyncio.wait([waiting], timeout=0.05)
        assert not waiting.done()
    await asyncio.wait_for(waiting, PATIENCE)
    await settled(publisher.close())
    assert logged(db) == list(range(11))


async def test_room_that_only_rejected_events_take_is_an_error_not_a_wait(
    broker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "pgmb")
    publisher = broker.publisher(max_pending=3)
    await enqueue_all(publisher, [BAD] * 3)
    with pytest.raises(PublishFailed):
        await settled(publisher.flush())
    with pytest.raises(PublisherFull) as caught:
        await settled(publisher.enqueue("a", 1))
    assert "discard_failed" in (caught.value.hint or "")
    assert len(await settled(publisher.discard_failed())) == 3
    await settled(publisher.enqueue("a", 1))
    await settled(publisher.close())


@pytest.mark.parametrize("wrong", [{"max_batch": 0}, {"max_pending": 0}, {"flush_every": -1}])
async def test_bounds_that_cannot_be_are_refused(broker: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        broker.publisher(**wrong)


# -- several at once -----------------------------------------------------------------------------------------


def test_many_threads_enqueue_and_flush(dsn: str, db: psycopg.Connection[Any]) -> None:
    errors: list[BaseException] = []
    with pgmb.connect(dsn) as broker, broker.publisher(max_batch=50, max_pending=100) as publisher:

        def work(name: int) -> None:
            try:
                for n in range(250):
                    publisher.enqueue("a", [name, n])
                    if n % 100 == 99:
                        publisher.flush(PATIENCE)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    assert errors == []
    found = logged(db)
    assert len(found) == 2000
    for name in range(8):
        assert [n for who, n in found if who == name] == list(range(250))


async def test_many_tasks_enqueue_and_flush(dsn: str, db: psycopg.Connection[Any]) -> None:
    async with (
        await pgmb.aconnect(dsn) as broker,
        broker.publisher(max_batch=50, max_pending=100) as publisher,
    ):

        async def work(name: int) -> None:
            for n in range(100):
                await publisher.enqueue("a", [name, n])
            await publisher.flush(PATIENCE)

        await asyncio.gather(*(work(name) for name in range(8)))
    found = logged(db)
    for name in range(8):
        assert [n for who, n in found if who == name] == list(range(100))


async def test_a_cancelled_flush_leaves_the_publisher_whole(dsn: str, db: psycopg.Connection[Any]) -> None:
    async with await pgmb.aconnect(dsn) as broker, broker.publisher(flush_every=0) as publisher:
        with db.transaction():
            db.execute("lock table pgmb.log_main in access exclusive mode")
            await publisher.enqueue("a", 1)
            flushing = asyncio.create_task(publisher.flush())
            await asyncio.wait([flushing], timeout=0.05)
            flushing.cancel()
            await asyncio.wait([flushing])
            assert flushing.cancelled()
        await publisher.enqueue("a", 2)
        await publisher.flush(PATIENCE)
    assert logged(db) == [1, 2]
