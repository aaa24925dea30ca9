"""Readers with a filter or a condition get every event that passes, once, whenever they come and go."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from starlette.requests import Request

from harness.serving import serving
from pgmb.server import sse
from pgmb.server.application import Application, Context
from pgmb.server.limits import Limits
from pgmb.server.sse import Subscription
from pgmb.server.sse import app as sse_app
from pgmb.server.sse.history import StreamLog
from tests.server.hosting import served
from tests.server.sse.client import EVENTS, Client, publish

BURST = "select pgmb.publish('t', to_json(n)) from generate_series(%s::int, %s::int) n"


def over(least: int) -> str:
    """A filter that every event of these tests passes."""
    return f"$.payload > -{least}"


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Filters take at least so long for a page."""
    passing = StreamLog.passing

    def by(seconds: float) -> None:
        async def delayed(log: StreamLog, *given: Any, **named: Any) -> set[int]:
            await asyncio.sleep(seconds)
            return await passing(log, *given, **named)

        monkeypatch.setattr(StreamLog, "passing", delayed)

    return by


async def test_a_client_that_resumes_while_a_page_is_filtered_misses_nothing(
    dsn: str, key: str, db: psycopg.Connection[Any], slow: Callable[[float], None]
) -> None:
    slow(0.3)
    async with (
        served(Application(dsn, parts=[sse.routes])) as port,
        Client(port, EVENTS, key=key, filter=over(1)) as stays,
    ):
        await stays.until(lambda: stays.last_id != "")
        begun = stays.last_id
        db.execute(BURST, [1, 20])
        # The page is read, and its first filter is being asked.
        await asyncio.sleep(0.15)
        async with (
            Client(port, EVENTS, key=key, filter=over(2), last_event_id=begun) as resumes,
            Client(port, EVENTS, key=key, filter=over(3), last_event_id=begun) as also,
        ):
            publish(db, 21)
            for client in (stays, resumes, also):
                assert await client.numbers(21) == list(range(1, 22))


async def test_a_client_that_is_cut_during_a_burst_resumes_with_the_rest(
    dsn: str, key: str, db: psycopg.Connection[Any], slow: Callable[[float], None]
) -> None:
    slow(0.1)
    async with (
        served(Application(dsn, parts=[sse.routes])) as port,
        Client(port, EVENTS, key=key, filter=over(2)) as stays,
    ):
        async with Client(port, EVENTS, key=key, filter=over(1)) as client:
            await client.until(lambda: client.last_id != "")
            db.execute(BURST, [1, 5000])
            await client.numbers(50)
        seen, last = client.messages, client.last_id
        await asyncio.sleep(0.2)
        async with Client(port, EVENTS, key=key, filter=over(1), last_event_id=last) as client:
            await client.numbers(5000 - len(seen))
        assert seen + client.messages == list(range(1, 5001))
        assert await stays.numbers(5000) == seen + client.messages


async def test_a_client_that_resumes_at_the_newest_id_during_a_burst_stops_nobody(
    dsn: str, key: str, db: psycopg.Connection[Any]
) -> None:
    with serving(dsn, "http") as process:
        async with Client(process.port, EVENTS, key=key, filter=over(1)) as stays:
            await stays.until(lambda: stays.last_id != "")
            for turn in range(2):
                first = turn * 4000 + 1
                async with Client(process.port, EVENTS, key=key) as other:
                    await other.until(lambda: other.last_id != "")
                    newest = other.last_id
                await asyncio.to_thread(db.execute, BURST, [first, first + 3999])
                await asyncio.to_thread(db.execute, "select pgmb.tick()")
                async with Client(
                    process.port, EVENTS, key=key, filter=over(turn + 2), last_event_id=newest
                ) as resumes:
                    assert await resumes.numbers(4000) == list(range(first, first + 4000))
                await stays.numbers(first + 3999)
            assert stays.messages == list(range(1, 8001))


async def test_a_filter_that_no_client_has_any_more_is_asked_no_more(
    dsn: str, key: str, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse_app, "HEARTBEAT_EVERY", 0.2)
    tails = "pgmb filter main"

    def running() -> int:
        return sum(task.get_name() == tails for task in asyncio.all_tasks())

    async with served(Application(dsn, parts=[sse.routes])) as port, Client(port, EVENTS, key=key) as stays:
        for number in range(3):
            async with Client(port, EVENTS, key=key, filter=over(number)) as client:
                await client.until(lambda: client.last_id != "")
        assert running() > 0
        async with asyncio.timeout(10):
            while running():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        publish(db, 1)
        assert await stays.numbers(1) == [1]


async def test_filters_without_clients_make_room_for_others(
    dsn: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse_app, "_MOST_FILTERS", 2)
    async with (
        served(Application(dsn, parts=[sse.routes])) as port,
        Client(port, EVENTS, key=key, filter=over(1)) as stays,
    ):
        await stays.until(lambda: stays.last_id != "")
        for number in range(2, 5):
            async with Client(port, EVENTS, key=key, filter=over(number)) as client:
                await client.until(lambda: client.last_id != "")
                async with Client(port, EVENTS, key=key, filter=over(9)) as refused:
                    await asyncio.wait_for(refused.ended.wait(), 10)
                    assert refused.last_id == ""


async def test_a_filter_that_falls_behind_the_memory_ends_and_its_clients_resume(
    dsn: str,
    key: str,
    db: psycopg.Connection[Any],
    slow: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pgmb.server.sse.history.Batches.__init__.__defaults__", (10, 1 << 20))
    async with served(Application(dsn, parts=[sse.routes])) as port:
        async with (
            Client(port, EVENTS, key=key) as plain,
            Client(port, EVENTS, key=key, filter=over(1)) as client,
        ):
            await client.until(lambda: client.last_id != "")
            slow(0.5)
            for number in range(1, 41):
                publish(db, number)
                await plain.numbers(number)
            await asyncio.wait_for(client.ended.wait(), 20)
        slow(0.0)
        seen, last = client.messages, client.last_id
        assert len(seen) < 40
        async with Client(port, EVENTS, key=key, filter=over(1), last_event_id=last) as client:
            await client.numbers(40 - len(seen))
        assert seen + client.messages == list(range(1, 41))


def own(dsn: str, condition: str, params: dict[str, Any] | None = None) -> Application:
    """An application that lets its clients read what passes an SQL condition."""

    def subscription(request: Request) -> Subscription:
        return Subscription(condition=condition, params=params)

    return sse.create_sse_app(dsn, authorize=lambda _: True, subscription=subscription)


async def test_an_application_filters_by_an_sql_condition(
    dsn: str, key: str, db: psycopg.Connection[Any]
) -> None:
    app = own(dsn, "(e.payload #>> '{}')::int % (s.params ->> 'by')::int = 0", {"by": 3})
    async with served(app) as port:
        async with Client(port, "/") as client:
            await client.until(lambda: client.last_id != "")
            publish(db, *range(1, 11))
            assert await client.numbers(3) == [3, 6, 9]
            db.execute("select pgmb.maintain()")
        publish(db, *range(11, 16))
        async with Client(port, "/", last_event_id=client.got[0].id) as back:
            assert await back.numbers(4) == [6, 9, 12, 15]
    async with (
        served(Application(dsn, parts=[sse.routes])) as port,
        Client(port, EVENTS, key=key, condition="true") as refused,
    ):
        assert refused.status == 422, "a key that may read may not write SQL"


async def test_a_condition_that_is_invalid_or_raises_is_refused(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    async with served(own(dsn, "(select true)")) as port, Client(port, "/") as client:
        assert client.status == 422
    async with served(own(dsn, "(e.payload #>> '{}')::int > 0")) as port:
        async with Client(port, "/") as client:
            await client.until(lambda: client.last_id != "")
            db.execute("""select pgmb.publish('t', '"three"')""")
            await asyncio.wait_for(client.ended.wait(), 10)
        async with Client(port, "/", last_event_id=client.last_id) as again:
            assert again.status == 422


@pytest.fixture
def idle_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that take nothing are disconnected soon."""
    monkeypatch.setattr("pgmb.server.sse.connection.STALLED_SECONDS", 0.5, raising=False)
    monkeypatch.setattr(sse_app, "HEARTBEAT_EVERY", 0.25)


def memory() -> int:
    """Of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("resuming", [False, True], ids=["that stay", "that resume"])
@pytest.mark.usefixtures("idle_clients")
async def test_clients_that_read_nothing_share_a_large_event_and_are_disconnected(
    dsn: str, key: str, db: psycopg.Connection[Any], resuming: bool
) -> None:
    made: list[Context] = []

    def also(context: Context) -> list[Any]:
        made.append(context)
        return []

    size, clients = 8 << 20, 16
    large = "select pgmb.publish('t', to_json(repeat('x', %s)))"
    async with served(Application(dsn, parts=[sse.routes, also], limits=Limits())) as port:
        counts = made[0].counts
        async with Client(port, EVENTS, key=key) as client:
            await client.until(lambda: client.last_id != "")
        if resuming:
            await asyncio.to_thread(db.execute, large, [size])
        most = before = memory()
        writers: list[asyncio.StreamWriter] = []
        for _ in range(clients):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            head = [f"GET {EVENTS} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {key}"]
            if resuming:
                head.append(f"Last-Event-ID: {client.last_id}")
            writer.write("\r\n".join([*head, "", ""]).encode())
            writers.append(writer)
        async with asyncio.timeout(20):
            while not resuming and counts.sse_clients < clients:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            if not resuming:
                await asyncio.to_thread(db.execute, large, [size])
            while counts.sse_dropped < clients:
                most = max(most, memory())
                await asyncio.sleep(0.02)
        assert most - before < clients * size / 2, "they share the event"
        assert counts.sse_clients == 0
        for writer in writers:
            writer.close()
