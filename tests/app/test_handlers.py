"""Handlers get what they ask for, and what they raise decides what becomes of an event."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypedDict, cast
from unittest.mock import Mock

import msgspec
import pydantic
import pytest

import pgmb
from harness.waiting import until
from pgmb.app.handler import Handler
from pgmb.app.outcome import Unfit
from pgmb.types import Source
from tests.app.stage import settled, working


@dataclass
class Order:
    number: int
    total: float = 0.0


class Paid(msgspec.Struct):
    number: int


class Sent(pydantic.BaseModel):
    number: int
    to: str


class Address(TypedDict):
    city: str


async def dead(broker: pgmb.AsyncBroker, queue: str) -> list[tuple[int, str | None]]:
    return [(letter.attempt, letter.error) for letter in await broker.dead_letters(queue)]


@pytest.mark.parametrize(
    ("annotation", "payload", "expected"),
    [
        (Order, {"number": 1, "total": 2.5}, Order(1, 2.5)),
        (Paid, {"number": 1}, Paid(1)),
        (Sent, {"number": 1, "to": "x"}, Sent(number=1, to="x")),
        (Address, {"city": "Rome"}, {"city": "Rome"}),
        (dict, {"a": [1]}, {"a": [1]}),
        (dict[str, int], {"a": 1}, {"a": 1}),
        (dict[str, object], {"a": [1]}, {"a": [1]}),
        (list[Order], [{"number": 1}], [Order(1)]),
        (list[Sent], [{"number": 1, "to": "x"}], [Sent(number=1, to="x")]),
        (Sent | None, None, None),
        (str, "a", "a"),
        (int, 7, 7),
        (Annotated[int, msgspec.Meta(ge=0)], 7, 7),
        (Any, [1, None], [1, None]),
        (object, {"b": 1.5}, {"b": 1.5}),
        (msgspec.Raw, {"a": 1}, msgspec.Raw(b'{"a":1}')),
    ],
)
async def test_the_annotation_types_the_payload(
    annotation: Any, payload: Any, expected: Any, dsn: str
) -> None:
    app, seen = pgmb.App(dsn), list[Any]()

    async def plain(given):
        seen.append(given)

    async def delivered(given):
        seen.append(given.payload)

    plain.__annotations__["given"] = annotation
    delivered.__annotations__["given"] = pgmb.Delivery[annotation]
    app.on("a", queue="plain")(plain)
    app.on("a", queue="delivered")(delivered)
    async with working(app) as broker:
        await broker.publish("a", payload)
        await until(lambda: len(seen) == 2)
    assert seen == [expected, expected]


async def test_handlers_without_annotation_get_what_json_says(dsn: str) -> None:
    app, seen = pgmb.App(dsn), list[Any]()

    @app.on("a")
    async def untyped(payload):
        seen.append(payload)

    async with working(app) as broker:
        await broker.publish("a", {"n": [1, 2]})
        await until(lambda: bool(seen))
    assert seen == [{"n": [1, 2]}]


async def test_a_delivery_carries_everything(dsn: str) -> None:
    app, seen = pgmb.App(dsn), list[pgmb.Delivery[Order]]()

    @app.on("order.created", queue="billing")
    async def charge(event: pgmb.Delivery[Order]) -> None:
        seen.append(event)
        await event.extend(60)

    async with working(app) as broker:
        given = await broker.publish("order.created", {"number": 3}, key="k", headers={"h": 1})
        await until(lambda: bool(seen))
        (event,) = seen
        assert event.payload == Order(3)
        assert event.payload is event.payload
        assert (event.topic, event.key, event.headers, event.id) == ("order.created", "k", {"h": 1}, given)
        assert (event.attempt, event.stream, event.queue, event.raw) == (
            1,
            "main",
            "billing",
            b'{"number":3}',
        )
        assert event.seq == event.event.seq
        assert event.published_at.tzinfo is not None
        assert "order.created" in repr(event)


async def test_a_payload_that_does_not_fit_is_a_dead_letter_at_once(dsn: str) -> None:
    app, seen = pgmb.App(dsn), list[Any]()

    @app.on("a", queue="plain")
    async def plain(order: Order) -> None:
        seen.append(order)

    @app.on("a", queue="delivered")
    def delivered(order: pgmb.Delivery[Order]) -> None:
        seen.append(order.payload)

    @app.on("a", queue="validated")
    async def validated(sent: Sent) -> None:
        seen.append(sent)

    async with working(app) as broker:
        await broker.publish("a", {"number": "seven"})
        await broker.publish("a", {"number": 8, "to": "x"})
        for queue in ("plain", "delivered", "validated"):
            await until(partial(settled, broker, queue))
        fault = "payload does not fit Order: Expected `int`, got `str` - at `$.number`"
        assert await dead(broker, "plain") == [(1, fault)]
        assert await dead(broker, "delivered") == [(1, fault)]
        ((attempt, error),) = await dead(broker, "validated")
        assert attempt == 1
        assert error is not None
        assert "valid integer" in error
        assert "`$.number`" in error
        assert "Field required - at `$.to`" in error
    assert sorted(map(repr, seen)) == sorted(map(repr, [Order(8), Order(8), Sent(number=8, to="x")]))


async def test_sync_handlers_run_in_threads_side_by_side(dsn: str) -> None:
    app, main = pgmb.App(dsn), threading.get_ident()
    together = threading.Barrier(3)
    seen: list[int] = []

    @app.on("a", concurrency=3)
    def blocking(number: int) -> None:
        together.wait(30)
        assert threading.get_ident() != main
        seen.append(number)

    async with working(app) as broker:
        await broker.publish_many("a", range(6))
        await until(lambda: len(seen) == 6)


async def test_every_matching_handler_of_a_queue_is_called_in_order(dsn: str) -> None:
    app, seen = pgmb.App(dsn), list[str]()

    @app.on("order.*", queue="q")
    async def first(payload: dict) -> None:
        seen.append("first")

    @app.on("order.cancelled", "order.lost", queue="q")
    def second(payload: pgmb.Delivery[Order]) -> None:
        seen.append(f"second {payload.payload.number}")

    @app.on("order.#", queue="q")
    async def third(payload: Any) -> None:
        seen.append("third")

    assert app.queues["q"].patterns == ["order.*", "order.cancelled", "order.lost", "order.#"]
    async with working(app, concurrency=1) as broker:
        await broker.publish("order.cancelled", {"number": 1})
        await broker.publish("order", {"number": 2})
        await broker.publish("order.made", {"number": 3})
        await broker.publish("other", {"number": 4})
        await until(lambda: settled(broker, "q"))
    assert seen == ["first", "second 1", "third", "third", "first", "third"]


async def test_if_one_of_several_handlers_raises_the_event_fails_as_a_whole(dsn: str) -> None:
    app, seen = pgmb.App(dsn), list[str]()

    @app.on("a", queue="q", retry=0.01)
    async def first(payload: Any) -> None:
        seen.append("first")

    @app.on("a", queue="q", retry=lambda attempt: 0.0)
    async def second(event: pgmb.Delivery) -> None:
        seen.append("second")
        if event.attempt < 3:
            raise ValueError("not yet")

    async with working(app) as broker:
        await broker.publish("a", 1)
        await until(lambda: len(seen) == 6)
        await until(lambda: settled(broker, "q"))
    assert seen == ["first", "second"] * 3


async def test_an_exception_is_retried_by_the_handlers_backoff_then_dead(dsn: str) -> None:
    app, attempts = pgmb.App(dsn), list[int]()

    def backoff(attempt: int) -> float:
        attempts.append(attempt)
        return 0.0

    @app.on("a", queue="q", retry=backoff, max_attempts=3)
    async def failing(payload: Any) -> None:
        raise ValueError("x" * 5000 + "\0")

    async with working(app) as broker:
        await broker.publish("a", 1)
        await until(lambda: settled(broker, "q"))
        ((attempt, error),) = await dead(broker, "q")
    assert (attempt, attempts) == (3, [1, 2, 3])
    assert error is not None
    assert error.startswith("ValueError: xxx")
    assert len(error) == 2000


async def test_without_a_backoff_the_queues_own_serves(dsn: str) -> None:
    app, attempts = pgmb.App(dsn), list[int]()
    app.queue("q", backoff_base=0.01, backoff_factor=1, max_attempts=2)

    @app.on("a", queue="q")
    async def failing(event: pgmb.Delivery) -> None:
        attempts.append(event.attempt)
        raise KeyError("k")

    async with working(app) as broker:
        await broker.publish("a", 1)
        await until(lambda: settled(broker, "q"))
        assert await dead(broker, "q") == [(2, "KeyError: 'k'")]
    assert attempts == [1, 2]


async def test_a_backoff_that_fails_is_logged_and_the_queues_own_serves(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = pgmb.App(dsn)
    app.queue("q", backoff_base=0.01, max_attempts=2)

    @app.on("a", queue="q", retry=lambda attempt: 1 / 0)
    async def failing(payload: Any) -> None:
        raise ValueError

    async with working(app) as broker:
        await broker.publish("a", 1)
        await until(lambda: settled(broker, "q"))
        assert await dead(broker, "q") == [(2, "ValueError")]
    assert "backoff failed" in caplog.text


async def test_retry_and_reject_say_what_becomes_of_an_event(dsn: str) -> None:
    app, attempts = pgmb.App(dsn), list[int]()

    @app.on("later", queue="later")
    async def later(event: pgmb.Delivery) -> None:
        attempts.append(event.attempt)
        if event.attempt == 1:
            raise pgmb.Retry(after=0, reason="not ready")

    @app.on("never", queue="never")
    def never(payload: int) -> None:
        raise pgmb.Reject(f"no use for {payload}")

    async with working(app) as broker:
        await broker.publish("later", 1)
        await broker.publish("never", 2)
        await until(lambda: len(attempts) == 2)
        await until(lambda: settled(broker, "later"))
        await until(lambda: settled(broker, "never"))
        assert await dead(broker, "never") == [(1, "no use for 2")]
        assert await dead(broker, "later") == []
    assert attempts == [1, 2]


async def test_a_handler_that_hangs_is_broken_off_and_the_others_go_on(dsn: str) -> None:
    app, seen = pgmb.App(dsn), list[int]()

    @app.on("a", queue="q", timeout=0.5, retry=0, max_attempts=2, concurrency=2)
    async def slow(number: int) -> None:
        if number == 13:
            await asyncio.sleep(3600)
        seen.append(number)

    async with working(app) as broker:
        await broker.publish_many("a", range(30))
        await until(partial(settled, broker, "q"))
        assert await dead(broker, "q") == [(2, "TimeoutError: not done within 0.5 s")]
    assert sorted(seen) == [number for number in range(30) if number != 13]


async def test_a_late_thread_keeps_its_place_and_its_key_until_it_ends(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    app, running, most, seen = pgmb.App(dsn), 0, 0, list[int]()
    let_go = threading.Event()
    app.queue("q", ordered=True)

    @app.on("a", queue="q", timeout=0.1, retry=0, max_attempts=2, concurrency=3)
    def stuck(number: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if number == 13:
            let_go.wait(60)
            time.sleep(0.15)
        else:
            seen.append(number)
        running -= 1

    async with working(app) as broker:
        await broker.publish("a", 13, key="late")
        await until(lambda: "keeps its place" in caplog.text)
        await broker.publish_many([pgmb.NewEvent("a", number, f"k{number}") for number in range(10)])
        await until(lambda: len(seen) == 10)
        assert running == 1, "the late one, which is not called again beside itself"
        let_go.set()
        await until(partial(settled, broker, "q"))
        assert await dead(broker, "q") == [(2, "TimeoutError: not done within 0.1 s")]
    assert most <= 3


async def test_a_timeout_of_the_handlers_own_is_its_own(dsn: str) -> None:
    app = pgmb.App(dsn)

    @app.on("a", queue="q", timeout=30, max_attempts=1)
    async def impatient(payload: Any) -> None:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(3600)

    async with working(app) as broker:
        await broker.publish("a", 1)
        await until(lambda: settled(broker, "q"))
        assert await dead(broker, "q") == [(1, "TimeoutError")]


async def test_a_handler_that_cancels_or_exits_fails_alone(dsn: str) -> None:
    app, seen = pgmb.App(dsn), list[str]()

    @app.on("a", queue="q", max_attempts=1)
    async def odd(what: str) -> None:
        seen.append(what)
        if what == "cancel":
            raise asyncio.CancelledError
        if what == "exit":
            raise SystemExit(3)

    async with working(app) as broker:
        await broker.publish_many("a", ["cancel", "exit", "fine"])
        await until(lambda: settled(broker, "q"))
        assert {error for _, error in await dead(broker, "q")} == {"CancelledError", "SystemExit: 3"}
    assert sorted(seen) == ["cancel", "exit", "fine"]


async def test_middleware_wraps_every_delivery_first_is_outermost(dsn: str) -> None:
    app, seen = pgmb.App(dsn), list[Any]()

    @app.middleware
    async def outer(delivery: Any, call_next: Callable[[Any], Awaitable[None]]) -> None:
        seen.append("outer")
        try:
            await call_next(delivery)
        except ValueError:
            seen.append("caught")

    @app.middleware
    async def inner(delivery: Any, call_next: Callable[[Any], Awaitable[None]]) -> None:
        seen.append(("inner", type(delivery).__name__))
        await call_next(delivery)

    @app.on("a", queue="q")
    async def failing(order: Order) -> None:
        seen.append(order)
        raise ValueError

    @app.on("b", batch=5)
    def many(orders: list[Order]) -> None:
        seen.append(orders)

    async with working(app) as broker:
        await broker.publish("a", {"number": 1})
        await until(lambda: settled(broker, "q"))
        assert seen == ["outer", ("inner", "Delivery"), Order(1), "caught"]
        seen.clear()
        await broker.publish("b", {"number": 2})
        await until(lambda: len(seen) == 3)
    assert seen == ["outer", ("inner", "list"), [Order(2)]]


async def test_functions_stay_what_they_are() -> None:
    app = pgmb.App("")

    @app.on("a", queue="q")
    async def double(number: int) -> int:
        return 2 * number

    assert await double(4) == 8
    assert app.queues["q"].handlers[0].function is double


@pytest.mark.parametrize(
    "function", [lambda: None, lambda a, b: None, lambda *, a: None, lambda a, *, b: None, 5]
)
def test_a_handler_with_impossible_parameters_is_refused(function: Any) -> None:
    with pytest.raises(TypeError):
        Handler(function, ["a"])


class Custom:
    pass


async def takes_custom(given: Custom) -> None: ...
async def takes_customs(given: dict[str, list[Custom]]) -> None: ...
async def takes_missing(given: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821
async def takes_one(given: Order) -> None: ...
async def yields(given: Order) -> Any:
    yield given


@pytest.mark.parametrize(
    ("function", "options", "told"),
    [
        (takes_custom, {}, "takes_custom: payloads cannot become Custom"),
        (takes_customs, {}, "payloads cannot become Custom"),
        (takes_missing, {}, "the annotation 'Missing' cannot be resolved"),
        (takes_one, {"batch": 5}, "with batch= a handler takes a list"),
        (yields, {}, "must not yield"),
    ],
)
def test_an_annotation_that_no_payload_can_fit_is_refused(function: Any, options: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        Handler(function, ["a"], **options)


@pytest.mark.parametrize("annotation", [pgmb.Delivery, pgmb.Delivery[Any], pgmb.Delivery[object]])
def test_a_delivery_of_anything_is_decoded_on_access(annotation: Any) -> None:
    async def handle(event: Any) -> None: ...

    handle.__annotations__["event"] = annotation
    given = pgmb.Event(1, None, "a", None, b"not JSON", None, 0, 1, Source("main", 0))
    delivery = Handler(handle, ["#"]).prepare(given, Mock())
    with pytest.raises(Unfit):
        _ = delivery.payload


def test_annotations_may_name_local_types_that_are_passed() -> None:
    class Local(msgspec.Struct):
        number: int

    async def handle(given: Local) -> None: ...

    async def handle_several(given: list[Local]) -> None: ...

    app = pgmb.App()
    app.on("a", queue="single", localns=locals())(handle)
    app.group("group").handler("set", localns=locals())(handle_several)
    for queue in ("single", "group/set"):
        (handler,) = app.queues[queue].handlers
        assert handler.decode(b'{"number": 1}') == Local(1)
    with pytest.raises(TypeError, match="localns"):
        app.on("a", queue="single")(handle)


@pytest.mark.parametrize(
    ("patterns", "options"),
    [
        (["a*"], {}),
        ([], {}),
        (["a"], {"timeout": 0}),
        (["a"], {"batch": 0}),
        (["a"], {"retry": -1}),
    ],
)
def test_options_that_cannot_be_right_are_refused(patterns: list[str], options: Any) -> None:
    with pytest.raises(pgmb.InvalidArgument):
        Handler(takes_one, patterns, **options)


async def test_partials_callables_and_methods_are_handlers(dsn: str) -> None:
    app, seen = pgmb.App(dsn), list[Any]()

    class Service:
        async def __call__(self, order: Order) -> None:
            seen.append(order)

        def method(self, order: Order) -> None:
            seen.append(order)

    async def three(name: str, order: Order) -> None:
        seen.append(order)

    app.on("a", queue="callable")(Service())
    app.on("a", queue="method")(Service().method)
    app.on("a", queue="partial")(partial(three, "x"))
    async with working(app) as broker:
        await broker.publish("a", {"number": 1})
        await until(lambda: len(seen) == 3)
    assert seen == [Order(1)] * 3


async def test_a_topic_that_no_handler_matches_waits_for_newer_processes_without_an_attempt(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    app, newer = pgmb.App(dsn), pgmb.App(dsn)
    app.queue("q", max_attempts=1)
    seen: list[str] = []

    @app.on("a", queue="q")
    async def old(payload: Any) -> None:
        seen.append("old")

    @newer.on("a", "b", queue="q")
    async def new(event: pgmb.Delivery) -> None:
        seen.append(f"new {event.topic} {event.attempt}")

    async with working(app) as broker:
        await broker.bind("q", ["a", "b"])
        await broker.publish("b", 1)
        await until(lambda: "no handler of queue 'q' matches the topic 'b'" in caplog.text)
    async with working(newer) as broker:
        await until(lambda: settled(broker, "q"))
    assert seen == ["new b 1"]


async def test_an_event_that_no_worker_handles_is_buried_at_last(dsn: str) -> None:
    app = pgmb.App(dsn, unhandled_for=1.5)
    app.queue("q", max_attempts=1)
    app.on("a", queue="q")(lambda payload: None)

    async with working(app) as broker:
        await broker.bind("q", ["#"])
        await broker.publish("b", 1)
        await until(lambda: broker.dead_letters("q"))
        (letter,) = await broker.dead_letters("q")
    assert letter.error == "no handler of queue 'q' matches the topic 'b'"
    assert letter.attempt == 1
    with pytest.raises(pgmb.InvalidArgument, match="unhandled_for must be at least 0, got -1"):
        pgmb.App(dsn, unhandled_for=-1)


async def test_a_payload_that_does_not_fit_waits_while_a_worker_runs_other_code(dsn: str) -> None:
    old, newer = pgmb.App(dsn, name="shop"), pgmb.App(dsn, name="shop")
    seen: list[int] = []

    def declared(app: pgmb.App, payload: type) -> None:
        async def take(number: payload) -> None:  # type: ignore[valid-type]
            seen.append(cast("Any", number))

        take.__annotations__["number"] = payload
        app.on("a", queue="q", concurrency=1)(take)

    declared(old, str)
    declared(newer, int)
    async with working(old) as broker:
        async with working(newer):
            await broker.publish_many("a", range(20))
            await until(lambda: settled(broker, "q"))
            assert sorted(seen) == list(range(20))
            assert await broker.dead_letters("q") == []
        # The newer worker may only be restarting: its code is remembered for a while.
        await broker.publish("a", 20)
        await until(lambda: _retried(broker))
        assert await broker.dead_letters("q") == []
        async with broker.connection() as conn:
            await conn.execute(
                "update pgmb.recent_code c set declared_at = c.declared_at - interval '1 hour'"
                " where not exists (select from pgmb.declaration d where d.code = c.code)"
            )
        await until(lambda: broker.dead_letters("q"))
        (letter,) = await broker.dead_letters("q")
    assert letter.error == "payload does not fit str: Expected `str`, got `int`"
    assert (letter.event.payload, letter.attempt, sorted(seen)) == (20, 1, list(range(20)))


async def _retried(broker: pgmb.AsyncBroker) -> bool:
    (status,) = await broker.queue_status()
    return bool(status.retries)


async def test_in_an_ordered_queue_a_dead_letter_does_not_take_those_behind_along(dsn: str) -> None:
    """The one that failed for the last time was leased together with those behind it."""
    app = pgmb.App(dsn)
    app.queue("q", ordered=True, shards=1, max_attempts=2, backoff_base=0.01)
    seen: list[int] = []

    @app.on("a", queue="q")
    async def take(number: int) -> None:
        if number % 5 == 0:
            raise ValueError(number)
        seen.append(number)

    @app.on("b", queue="q")
    async def fits(text: str) -> None: ...

    async with working(app) as broker:
        async with broker.connection() as conn, conn.transaction():
            for number in range(20):
                await broker.publish("b" if number == 7 else "a", number, key="k", conn=conn)
        await until(lambda: settled(broker, "q"))
        letters = await broker.dead_letters("q")
    assert seen == [number for number in range(20) if number % 5 and number != 7]
    assert sorted(letter.event.payload for letter in letters) == [0, 5, 7, 10, 15]


async def test_a_failure_is_one_line_with_the_traceback_and_success_is_silent(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = pgmb.App(dsn)

    @app.on("a", queue="q", max_attempts=1)
    async def sometimes(number: int) -> None:
        if number == 3:
            raise ValueError("three")

    caplog.set_level(logging.DEBUG, logger="pgmb.app")
    async with working(app) as broker:
        caplog.clear()
        await broker.publish_many("a", range(20))
        await until(lambda: settled(broker, "q"))
        records = [one for one in caplog.records if one.name == "pgmb.app" and "working on" not in one.msg]
    (record,) = records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert "sometimes failed: ValueError: three" in record.getMessage()
    assert "attempt 1, the last" in record.getMessage()
