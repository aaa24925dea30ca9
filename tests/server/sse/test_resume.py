"""Whoever comes back with an id misses nothing and gets nothing twice, wherever it comes to."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import psycopg
import pytest

from pgmb.server import sse
from pgmb.server.application import Application
from pgmb.server.limits import Limits
from pgmb.server.sse import tail as sse_tail
from pgmb.server.sse.history import Batches, Page, Tick
from pgmb.server.sse.replay import Replay
from pgmb.server.sse.tail import StreamTail, Tail
from tests.server.hosting import served
from tests.server.sse.client import EVENTS, Client, make_key, publish


async def test_whoever_comes_back_misses_nothing(port: int, key: str, db: psycopg.Connection[Any]) -> None:
    async with Client(port, EVENTS, key=key) as client:
        await client.until(lambda: client.last_id != "")
        first = client.last_id
        publish(db, 1, 2, 3)
        await client.numbers(3)
        ids = [got.id for got in client.got]
    publish(db, 4, 5)
    for given, missed in [(first, [1, 2, 3, 4, 5]), (ids[0], [2, 3, 4, 5]), (ids[2], [4, 5])]:
        async with Client(port, EVENTS, key=key, headers={"Last-Event-ID": given}) as client:
            assert await client.numbers(len(missed)) == missed
    async with Client(port, EVENTS, key=key, last_event_id=ids[1]) as client:
        assert await client.numbers(3) == [3, 4, 5]


async def test_another_process_goes_on_where_the_first_was(
    dsn: str, key: str, db: psycopg.Connection[Any]
) -> None:
    numbers = iter(range(1, 10_000))
    seen: list[int] = []
    last = ""
    async with (
        served(Application(dsn, parts=[sse.routes])) as one,
        served(Application(dsn, parts=[sse.routes])) as two,
    ):
        for turn in range(8):
            async with Client((one, two)[turn % 2], EVENTS, key=key, last_event_id=last or None) as client:
                await client.until(lambda: client.last_id != "" or bool(client.got))
                before = len(seen)
                publish(db, *(next(numbers) for _ in range(20)))
                await client.numbers(7 if turn < 7 else 160 - before)
                # It leaves in the middle of a batch, or at its end.
                seen.extend(client.messages)
                last = client.got[-1].id
    assert seen == list(range(1, 161))


async def test_what_is_too_old_is_said(dsn: str, key: str, db: psycopg.Connection[Any]) -> None:
    async with served(Application(dsn, parts=[sse.routes], limits=Limits(replay_events=50))) as port:
        async with Client(port, EVENTS, key=key) as client:
            await client.until(lambda: client.last_id != "")
            begun = client.last_id
        epoch = begun.split("-")[0]
        publish(db, *range(100))
        odd = {
            "nonsense": "unknown",
            f"{epoch}-1-1-0": "unknown",
            f"{int(epoch, 16) + 1:x}-1-1-0-0": "epoch",
            f"{epoch}-fffffff-fffffff-0-0": "history_gone",
            f"{begun.rpartition('-')[0]}-0": "lost",
            "earliest": "too_many",
        }
        for given, reason in odd.items():
            async with Client(port, EVENTS, key=key, last_event_id=given) as client:
                await client.until(lambda: bool(client.got))
                assert (client.got[0].event, client.got[0].json) == ("reset", {"reason": reason})
                publish(db, 1000)
                await client.until(lambda: client.messages[-1:] == [1000])
                assert client.got[0].id != given


async def test_a_slow_reader_may_catch_up_with_more_events_than_it_may_be_behind(
    dsn: str, key: str, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse_tail, "Batches", partial(Batches, most=1))
    read_page, numbers = Replay._page, iter(range(1000))
    begin, tails = StreamTail._begin, list[Tail]()
    pages = 0

    def noted(tail: StreamTail, tick: Tick) -> None:
        tails.append(tail)
        begin(tail, tick)

    async def published_meanwhile(replay: Replay, after: Tick, upto: Tick, seq: int) -> Page:
        nonlocal pages
        pages += 1
        page = await read_page(replay, after, upto, seq)
        # Two batches each time: memory holds the second alone, so that the reader cannot join.
        for _ in range(2 if pages <= 3 else 0):
            await batch(tails[-1])
        return page

    async def batch(tail: Tail) -> None:
        publish(db, *(next(numbers) for _ in range(20)))
        db.execute("select pgmb.tick()")
        ((ticked,),) = db.execute("select tick from pgmb.newest_tick('main')").fetchall()
        async with asyncio.timeout(30):
            while tail.at.number < ticked:
                await tail.advanced()

    monkeypatch.setattr(Replay, "_page", published_meanwhile)
    monkeypatch.setattr(StreamTail, "_begin", noted)
    async with served(Application(dsn, parts=[sse.routes])) as port, Client(port, EVENTS, key=key) as client:
        await client.until(lambda: client.last_id != "")
    publish(db, *(next(numbers) for _ in range(40)))
    async with (
        served(Application(dsn, parts=[sse.routes], limits=Limits(replay_events=50))) as port,
        Client(port, EVENTS, key=key, last_event_id=client.last_id) as client,
    ):
        await client.until(lambda: len(client.got) >= 160 or any(got.event == "reset" for got in client.got))
        assert client.messages == list(range(160))


async def test_a_stream_that_was_created_again_is_a_reset(dsn: str, db: psycopg.Connection[Any]) -> None:
    """For a reader that comes back, and for one that stayed."""
    db.execute("select pgmb.create_stream('s')")
    key = make_key(db, "read:s")
    path = EVENTS.replace("main", "s")
    async with served(Application(dsn, parts=[sse.routes])) as port:
        async with Client(port, path, key=key) as client:
            await client.until(lambda: client.last_id != "")
            publish(db, 1, 2, stream="s")
            await client.numbers(2)
            begun = client.last_id
            db.execute("select pgmb.drop_stream('s')")
            db.execute("select pgmb.create_stream('s')")
            publish(db, *range(10), stream="s")
            db.execute("select pgmb.tick('s')")
            await client.until(lambda: client.got[-1].event == "reset")
            assert client.got[-1].json == {"reason": "lost"}
        async with Client(port, path, key=key, last_event_id=begun) as client:
            await client.until(lambda: bool(client.got))
            assert client.got[0].event == "reset"


async def test_history_that_retention_dropped_is_a_reset(
    dsn: str, key: str, db: psycopg.Connection[Any]
) -> None:
    async with served(Application(dsn, parts=[sse.routes])) as port, Client(port, EVENTS, key=key) as client:
        await client.until(lambda: client.last_id != "")
        begun = client.last_id
        publish(db, 1)
        await client.numbers(1)
    db.execute("select pgmb.rotate()")
    db.execute("select pgmb.seal()")
    publish(db, 2)
    db.execute("select pgmb.tick()")
    db.execute("select pgmb.alter_stream('main', keep_for => '0 s')")
    db.execute("select pgmb.drop_segments()")
    assert db.execute("select from pgmb.segment where dropped_at is not null").fetchall()
    async with (
        served(Application(dsn, parts=[sse.routes])) as port,
        Client(port, EVENTS, key=key, last_event_id=begun) as client,
    ):
        await client.until(lambda: bool(client.got))
        assert client.got[0].event == "reset"


async def test_a_rotation_in_between_changes_nothing(
    port: int, key: str, db: psycopg.Connection[Any]
) -> None:
    async with Client(port, EVENTS, key=key) as client:
        await client.until(lambda: client.last_id != "")
        begun = client.last_id
        publish(db, 1, 2)
        await client.numbers(2)
        db.execute("select pgmb.rotate('main')")
        publish(db, 3, 4)
        assert await client.numbers(4) == [1, 2, 3, 4]
        ids = [got.id for got in client.got]
    for given, rest in [(begun, [1, 2, 3, 4]), (ids[0], [2, 3, 4]), (ids[2], [4])]:
        async with (
            served(Application(db.info.dsn, parts=[sse.routes])) as other,
            Client(other, EVENTS, key=key, last_event_id=given) as client,
        ):
            assert await client.numbers(len(rest)) == rest


async def test_a_client_that_stops_is_dropped_and_comes_back(
    dsn: str, key: str, db: psycopg.Connection[Any]
) -> None:
    app = Application(dsn, parts=[sse.routes], limits=Limits(pending_events=50))
    async with served(app) as port:
        async with Client(port, EVENTS, key=key) as client:
            await client.until(lambda: client.last_id != "")
            # It reads no more; what the kernel and the transport take is soon full.
            client._task.cancel()
            await asyncio.wait([client._task])
            context = app._context
            assert context is not None
            number = 0
            async with asyncio.timeout(60):
                while context.counts.sse_dropped == 0:
                    await asyncio.to_thread(
                        db.execute,
                        "select pgmb.publish('t', json_build_object('n', n, 'x', repeat('x', 20000)))"
                        " from generate_series(%s::int, %s::int) n",
                        [number, number + 99],
                    )
                    number += 100
                    await asyncio.sleep(0.05)
            assert context.counts.sse_clients == 0
        # On a busy machine it is dropped again, as long as the server reads what was published.
        seen: list[int] = []
        last_id = client.last_id
        async with asyncio.timeout(60):
            while len(seen) < number:
                async with Client(port, EVENTS, key=key, last_event_id=last_id) as back:
                    await back.until(lambda: back.ended.is_set() or len(seen) + len(back.got) >= number)  # noqa: B023
                    seen += [got.json["payload"]["n"] for got in back.got]
                    last_id = back.last_id or last_id
        assert seen == list(range(number))
