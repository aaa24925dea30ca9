"""Backoff by a function of the attempt: of a handler, of a queue, and whatever it returns."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import psycopg
import pytest

import pgmb
from harness.states import retries
from pgmb.app.handler import Backoff, Handler
from pgmb.types import Event, Source

TEN_YEARS = 10 * 365 * 86_400.0


def an_event(attempt: int) -> Event:
    return Event(1, None, "a", None, b"1", None, 0, attempt, Source("main", 0))


def after(retry: Backoff, attempt: int = 1, error: Exception | None = None) -> float | None:
    handler = Handler(lambda payload: None, ["a"], retry=retry)
    return handler.failure(an_event(attempt), error or ValueError()).after


@pytest.mark.parametrize(
    ("retry", "expected"),
    [
        (None, None),
        (0, 0.0),
        (timedelta(milliseconds=5), 0.005),
        (lambda attempt: attempt * 2, 6.0),
        (lambda attempt: timedelta(seconds=attempt), 3.0),
        (lambda attempt: -1, 0.0),
        (lambda attempt: None, None),
        (lambda attempt: math.inf, TEN_YEARS),
        (lambda attempt: timedelta.max, TEN_YEARS),
        (lambda attempt: 2**300, TEN_YEARS),
    ],
)
def test_the_time_to_wait(retry: Any, expected: float | None) -> None:
    assert after(retry, 3) == expected


@pytest.mark.parametrize(
    "retry",
    [
        lambda attempt: 1 / 0,
        lambda attempt: "soon",
        lambda attempt: math.nan,
        lambda attempt: timedelta(milliseconds=2**100),
        lambda attempt: 2.0**5000,
    ],
)
def test_a_curve_that_fails_leaves_it_to_the_queue(retry: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert after(retry) is None
    assert "its backoff failed at attempt 1" in caplog.text


@pytest.mark.parametrize("wrong", [math.nan, "soon"])
def test_a_retry_after_nonsense_leaves_it_to_the_queue(wrong: Any) -> None:
    assert after(5, error=pgmb.Retry(after=wrong)) is None


@pytest.mark.parametrize("wrong", [-1, math.nan])
def test_times_that_cannot_be_waited_for_are_refused(wrong: float) -> None:
    with pytest.raises(pgmb.InvalidArgument, match="retry delays must be"):
        pgmb.App("").on("a", queue="q", retry=wrong)(lambda payload: None)
    with pytest.raises(pgmb.InvalidArgument, match="retry delays must be"):
        pgmb.App("").queue("q", retry=wrong)


def test_a_queue_lends_its_curve_to_handlers_without_one() -> None:
    app = pgmb.App("")
    app.on("a", queue="q")(lambda payload: None)
    app.queue("q", retry=7)
    app.on("b", queue="q")(lambda payload: None)
    app.on("c", queue="q", retry=8)(lambda payload: None)
    assert [handler.backoff for handler in app.queues["q"].handlers] == [7, 7, 8]
    app.queue("q", retry=7)
    with pytest.raises(pgmb.InvalidArgument, match="retry is 7 already, not 9"):
        app.queue("q", retry=9)


def test_an_endless_wait_is_settled_all_the_same(dsn: str, db: psycopg.Connection[Any]) -> None:
    app = pgmb.App(dsn)
    app.queue("q", retry=lambda attempt: timedelta.max)

    @app.on("a", queue="q")
    def handle(payload: int) -> None:
        raise ValueError

    app.handle("q")
    db.execute("select pgmb.publish('a', '1')")
    assert app.handle("q") == 1
    (waiting,) = retries(db)
    assert waiting.due_in is not None
    assert waiting.due_in > timedelta(days=9 * 365).total_seconds()
