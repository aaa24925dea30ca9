"""What is the user's runs apart: each event in a task and a context of its own, and no error ends more."""

from __future__ import annotations

import asyncio
import decimal
import logging
import threading
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import psycopg
import pydantic
import pytest

import pgmb
from harness.waiting import until
from pgmb.testing import adrain
from tests.app.stage import settled, working

tenant: ContextVar[str] = ContextVar("tenant", default="nobody")

Run = Callable[[pgmb.App], Awaitable[None]]


async def by_worker(app: pgmb.App) -> None:
    async with working(app) as broker:
        await until(partial(settled, broker, "q"))


async def by_hand(app: pgmb.App) -> None:
    while await app.ahandle("q", 100):
        pass
    await app.aclose()


async def by_drain(app: pgmb.App) -> None:
    await adrain(app)


every_engine = pytest.mark.parametrize("run", [by_worker, by_hand, by_drain])
both_forms = pytest.mark.parametrize("asynchronous", [True, False], ids=["coroutine", "thread"])


class _MuteError(Exception):
    """Its message raises."""

    def __str__(self) -> str:
        raise SystemExit(3)

    __repr__ = __str__


RAISED: list[BaseException] = [
    _MuteError(),
    KeyboardInterrupt(),
    SystemExit(1),
    GeneratorExit(),
    asyncio.CancelledError(),
    StopIteration(),
    pgmb.Retry(after=float("nan")),
]


async def published(app: pgmb.App, payloads: Any) -> None:
    async with await pgmb.aconnect(app.dsn) as broker:
        await app.abroker()
        await broker.publish_many("a", payloads)
        await app.aclose()


async def outcomes(dsn: str) -> tuple[int, list[str]]:
    async with await pgmb.aconnect(dsn) as broker:
        assert await settled(broker, "q")
        letters = await broker.dead_letters("q")
        return len(letters), [letter.error or "" for letter in letters]


@every_engine
@both_forms
async def test_no_error_of_a_handler_ends_more_than_its_event(dsn: str, run: Run, asynchronous: bool) -> None:
    app, seen = pgmb.App(dsn), list[int]()

    def handle(number: int) -> None:
        if number < len(RAISED):
            raise RAISED[number]
        seen.append(number)

    async def ahandle(number: int) -> None:
        if number % 2:
            await asyncio.sleep(0)
        handle(number)

    app.on("a", queue="q", concurrency=2, max_attempts=1)(ahandle if asynchronous else handle)
    await published(app, range(40))
    await run(app)
    assert sorted(seen) == list(range(len(RAISED), 40))
    count, errors = await outcomes(dsn)
    assert count == len(RAISED)
    assert sum("its message raised SystemExit" in error for error in errors) == 1


class _UnloggableError(Exception):
    def __getattribute__(self, name: str) -> Any:
        if name in ("__cause__", "__traceback__"):
            raise SystemExit
        return super().__getattribute__(name)


class _FailingHandler(logging.Handler):
    """As a client of a log service may be: `logging` catches nothing of what it raises."""

    def emit(self, record: logging.LogRecord) -> None:
        raise ConnectionError


@every_engine
async def test_a_log_that_fails_ends_nothing(dsn: str, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    app, seen, failing = pgmb.App(dsn), list[int](), _FailingHandler()

    @app.on("a", queue="q", max_attempts=1)
    async def handle(number: int) -> None:
        if number % 2:
            raise _UnloggableError if number % 4 == 1 else ValueError
        seen.append(number)

    await published(app, range(20))
    logging.getLogger("pgmb.app").addHandler(failing)
    try:
        await run(app)
    finally:
        logging.getLogger("pgmb.app").removeHandler(failing)
    assert seen == list(range(0, 20, 2))
    assert (await outcomes(dsn))[0] == 10
    assert "ConnectionError while logging to pgmb.app" in capsys.readouterr().err


class _Raising(pydantic.BaseModel):
    n: int

    @pydantic.field_validator("n")
    @classmethod
    def check(cls, value: int) -> int:
        if value == 3:
            raise KeyboardInterrupt
        return value


@every_engine
@pytest.mark.parametrize("batch", [None, 5])
async def test_no_error_of_a_validator_ends_more_than_its_event(
    dsn: str, run: Run, batch: int | None
) -> None:
    app, seen = pgmb.App(dsn), list[int]()

    async def single(payload: _Raising) -> None:
        seen.append(payload.n)

    async def many(payloads: list[_Raising]) -> None:
        seen.extend(one.n for one in payloads)

    if batch is None:
        app.on("a", queue="q", max_attempts=1)(single)
    else:
        app.on("a", queue="q", max_attempts=1, batch=batch)(many)
    await published(app, [{"n": n} for n in range(10)])
    await run(app)
    assert sorted(seen) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert (await outcomes(dsn))[0] == 1


@every_engine
async def test_no_error_of_a_backoff_or_of_middleware_ends_more_than_its_event(dsn: str, run: Run) -> None:
    app, seen = pgmb.App(dsn), list[int]()

    def backoff(attempt: int) -> float:
        raise KeyboardInterrupt

    @app.middleware
    async def exiting(delivery: Any, call_next: Any) -> None:
        if delivery.payload == 1:
            raise SystemExit
        await call_next(delivery)

    @app.on("a", queue="q", max_attempts=1, retry=backoff)
    async def handle(number: int) -> None:
        if number == 2:
            raise ValueError
        seen.append(number)

    await published(app, range(6))
    await run(app)
    assert sorted(seen) == [0, 3, 4, 5]
    assert (await outcomes(dsn))[0] == 2


@every_engine
async def test_no_error_of_split_by_ends_more_than_its_set(dsn: str, run: Run) -> None:
    app, seen = pgmb.App(dsn), list[int]()

    def split_by(events: list[pgmb.Event]) -> list[list[pgmb.Event]]:
        if any(event.payload == 1 for event in events):
            raise SystemExit
        return [events]

    async def handle(events: list[pgmb.Event]) -> None:
        seen.extend(event.payload for event in events)

    app.group("g").handler("h", ["a"], max=2, split_by=split_by, retry_after=[])(handle)
    app.queues["q"] = app.queues.pop("g/h")
    app.queues["q"].name = "q"
    await published(app, range(6))
    await run(app)
    assert sorted(seen) == [2, 3, 4, 5]
    assert (await outcomes(dsn))[0] == 2


@every_engine
@both_forms
async def test_events_share_no_context(dsn: str, run: Run, asynchronous: bool) -> None:
    app, seen = pgmb.App(dsn), list[tuple[str, int]]()

    def handle(number: int) -> None:
        seen.append((tenant.get(), decimal.getcontext().prec))
        tenant.set(f"tenant {number}")
        decimal.setcontext(decimal.Context(prec=5))

    async def ahandle(number: int) -> None:
        handle(number)
        if number % 2:
            await asyncio.sleep(0.001)
        assert tenant.get() == f"tenant {number}"

    app.on("a", queue="q", concurrency=2)(ahandle if asynchronous else handle)
    await published(app, range(30))
    token = tenant.set("of the worker's start")
    await run(app)
    tenant.reset(token)
    assert set(seen) == {("of the worker's start", decimal.getcontext().prec)}
    assert len(seen) == 30


@every_engine
@pytest.mark.parametrize("queue", [{}, {"ordered": True}])
async def test_each_event_has_a_task_of_its_own(dsn: str, run: Run, queue: dict[str, Any]) -> None:
    """Whoever keeps a task, as a registry of sessions by task does, never sees it with another event."""
    app, tasks, called_back = pgmb.App(dsn), dict[Any, int](), list[int]()
    app.queue("q", **queue)

    @app.on("a", queue="q", concurrency=2)
    async def handle(number: int) -> None:
        task = asyncio.current_task()
        assert task is not None
        if number % 3 == 1:
            await asyncio.sleep(0)
            assert asyncio.current_task() is task
        if number % 3 == 2:
            task.add_done_callback(lambda _: called_back.append(number))
        else:
            assert task not in tasks, "the task of another event"
            tasks[task] = number
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(0 if number % 2 else 0.001))

    await published(app, range(30))
    await run(app)
    assert sorted(tasks.values()) == [number for number in range(30) if number % 3 != 2]
    assert sorted(called_back) == [number for number in range(30) if number % 3 == 2]
    assert (await outcomes(dsn))[0] == 0


@every_engine
@pytest.mark.parametrize("waits", [False, True])
async def test_a_task_left_cancelled_takes_no_worker_with_it(dsn: str, run: Run, waits: bool) -> None:
    app, seen = pgmb.App(dsn), list[int]()

    @app.on("a", queue="q", concurrency=1, max_attempts=1)
    async def handle(number: int) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        if waits:
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                seen.append(number)
        else:
            seen.append(number)

    await published(app, range(10))
    await run(app)
    assert sorted(seen) == list(range(10))


async def test_a_worker_that_is_cancelled_by_others_goes_on(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    app, seen = pgmb.App(dsn), list[int]()

    @app.on("a", queue="q", concurrency=1)
    async def handle(number: int) -> None:
        seen.append(number)

    async with working(app) as broker:
        await broker.publish("a", 1)
        await until(partial(settled, broker, "q"))
        for task in asyncio.all_tasks():
            if task.get_name().startswith(("pgmb q ", "pgmb handler")):
                task.cancel()
        await broker.publish("a", 2)
        await until(lambda: seen == [1, 2])
    assert "a worker ended unexpectedly" in caplog.text


class _Priced(pydantic.BaseModel):
    cents: int


async def test_plain_functions_answer_as_many_at_once_as_concurrency_says(dsn: str) -> None:
    app = pgmb.App(dsn)
    barrier = threading.Barrier(12)

    @app.answer("price", queue="q", concurrency=12, timeout=20)
    def price(item: int) -> _Priced:
        barrier.wait(20)
        return _Priced(cents=item)

    async with working(app):
        answers = await asyncio.gather(*(app.request("price", n) for n in range(12)))
        assert answers == [{"cents": n} for n in range(12)]
    await app.aclose()


async def test_an_answer_that_cannot_be_read_fails_its_request_alone(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    app, asked = pgmb.App(dsn), asyncio.Queue[pgmb.Event]()

    @app.on("strange", queue="strange")
    async def strange(delivery: pgmb.Delivery) -> None:
        await asked.put(delivery.event)

    @app.answer("price", queue="q")
    async def price(item: int) -> int:
        return item

    def reply(event: pgmb.Event, text: str) -> None:
        to = event.headers["pgmb-request"]
        db.execute(
            "select pgmb.publish(%s, %s::json, stream => 'replies')",
            [to["topic"], text.replace("ID", to["id"])],
        )

    async with working(app):
        waiting = [asyncio.create_task(app.request("strange", n, timeout=30)) for n in range(3)]
        # Requests are published at once: they come in any order.
        events = sorted([await asked.get() for _ in range(3)], key=lambda event: int(event.payload))
        reply(events[0], '{"request": "ID", "result": 1e400}')
        reply(events[1], '{"request": "ID", "result": "\\ud800"}')
        reply(events[2], '{"nothing": "that pgmb writes"}')
        for one in waiting[:2]:
            with pytest.raises(pgmb.RequestFailed, match="cannot be decoded"):
                await one
        assert await app.request("price", 7, timeout=30) == 7
        waiting[2].cancel()
    await app.aclose()


class _Aliased(pydantic.BaseModel):
    cents: int = pydantic.Field(alias="priceInCents")


async def test_a_model_with_aliases_is_read_as_it_was_published(dsn: str) -> None:
    app, seen = pgmb.App(dsn), list[_Aliased]()

    @app.on("a", queue="q", max_attempts=1)
    async def handle(payload: _Aliased) -> None:
        seen.append(payload)

    await published(app, [_Aliased(priceInCents=3)])
    await by_hand(app)
    assert seen == [_Aliased(priceInCents=3)]
