"""Schedules, Retry-After, 410 and the breaker, before a server that follows a script, by a fake clock."""

from __future__ import annotations

import asyncio
import logging
import re
from functools import partial
from typing import Any

import psycopg
import pytest

from harness.answers import answering, redirecting
from harness.states import add_deliveries, age_waiting_events
from pgmb.webhooks.outcomes import DEFAULT_SCHEDULE
from tests.webhooks.stepped import SteppedDispatcher

pytestmark = pytest.mark.once()


async def test_retries_come_at_the_times_of_the_schedule(dsn: str, db: psycopg.Connection[Any]) -> None:
    async with SteppedDispatcher(dsn, db, lambda _: 500) as stepped:
        stepped.endpoint()
        # Failures that are not the endpoint's alone keep its breaker closed.
        stepped.publish()
        assert await stepped.play() == 2
        for wait in DEFAULT_SCHEDULE[1:]:
            (seconds,) = stepped.waits()
            # Some of it has really passed by now.
            assert 0.8 * wait - 10.0 <= seconds <= 1.2 * wait + 0.01
            stepped.advance(0.75 * wait)
            if wait > 5.0:
                assert await stepped.play() == 0
            stepped.advance(0.5 * wait)
            stepped.db.execute("update pgmb.endpoint set state = 'active', changed_at = clock_timestamp()")
            assert await stepped.play() == 1
        assert stepped.waits() == []
        assert stepped.value("select attempt from pgmb.dead") == 11
        assert len({request.headers["webhook-id"] for request in stepped.receiver.requests}) == 1
        numbers = [int(request.headers["pgmb-attempt"]) for request in stepped.receiver.requests]
        assert numbers == list(range(1, 12))


async def test_waits_are_spread(dsn: str, db: psycopg.Connection[Any]) -> None:
    async with SteppedDispatcher(dsn, db, lambda _: 500) as stepped:
        stepped.endpoint(retry_after=["1000 s"], max_in_flight=50)
        stepped.publish(40)
        await stepped.play()
        # Those that were tried; the others found it tripped.
        waits = [seconds for seconds in stepped.waits() if seconds > 100]
        assert len(waits) >= 5
        assert 700 <= min(waits) < max(waits) <= 1200.1
        assert max(waits) - min(waits) > 20


@pytest.mark.parametrize(
    ("status", "header", "least", "most"),
    [
        (429, "120", 90, 120.1),
        (503, "120", 90, 120.1),
        (502, "60", 30, 60.1),
        (504, "999999999", 86_300, 86_400.1),
        (429, "Thu, 01 Jan 1970 00:00:00 GMT", -60, 6.1),
        (429, "nonsense", -60, 6.1),
        (500, "120", -60, 6.1),
    ],
)
async def test_retry_after_is_honoured_within_bounds(
    dsn: str, db: psycopg.Connection[Any], status: int, header: str, least: float, most: float
) -> None:
    async with SteppedDispatcher(
        dsn, db, partial(answering, status=status, headers=(f"Retry-After: {header}",))
    ) as stepped:
        stepped.endpoint(retry_after=["5 s", "5 s"])
        stepped.publish()
        assert await stepped.play() == 1
        (seconds,) = stepped.waits()
        assert least <= seconds <= most


async def test_an_endpoint_that_asks_for_time_gets_it(dsn: str, db: psycopg.Connection[Any]) -> None:
    async with SteppedDispatcher(
        dsn, db, partial(answering, status=429, headers=("Retry-After: 60",))
    ) as stepped:
        stepped.endpoint(max_in_flight=1)
        stepped.publish(3)
        assert await stepped.play() == 1
        stepped.publish()
        assert await stepped.play() == 0
        stepped.receiver.answer = lambda _: 200
        stepped.advance(61)
        assert await stepped.play() == 4
        assert stepped.waits() == []


async def test_the_breaker_opens_tries_once_and_waits_longer(dsn: str, db: psycopg.Connection[Any]) -> None:
    async with SteppedDispatcher(dsn, db, lambda _: 500) as stepped:
        stepped.endpoint(max_in_flight=1, retry_after=["1 s"] * 50)
        stepped.publish(20)
        assert await stepped.play() == 5
        assert stepped.value("select state from pgmb.endpoint") == "tripped"
        for wait in (10, 20, 40, 80, 160, 300, 300):
            probe = "select extract(epoch from probe_at - clock_timestamp())::float8 from pgmb.endpoint"
            assert wait / 2 < stepped.value(probe) <= wait
            stepped.advance(wait / 2 - 2)
            assert await stepped.play() == 0
            stepped.advance(wait / 2 + 2)
            assert await stepped.play() == 1
        stepped.receiver.answer = lambda _: 200
        stepped.advance(301)
        assert await stepped.play() == 20
        assert stepped.value("select state from pgmb.endpoint") == "active"
        assert stepped.waits() == []


async def test_some_failures_among_many_do_not_trip(dsn: str, db: psycopg.Connection[Any]) -> None:
    asked = 0

    def answer(_: Any) -> int:
        nonlocal asked
        asked += 1
        return 500 if asked % 3 == 0 else 200

    async with SteppedDispatcher(dsn, db, answer) as stepped:
        stepped.endpoint(max_in_flight=1, retry_after=["1 h"] * 9)
        stepped.publish(30)
        assert await stepped.play() == 30
        assert stepped.value("select state from pgmb.endpoint") == "active"
        assert len(stepped.waits()) == 10


async def test_five_days_of_failure_disable(dsn: str, db: psycopg.Connection[Any]) -> None:
    async with SteppedDispatcher(dsn, db, lambda _: 500) as stepped:
        stepped.endpoint(retry_after=["1 day"] * 9)
        stepped.publish()
        await stepped.play()
        stepped.advance(10)
        await stepped.play()
        for _ in range(5):
            assert stepped.value("select state from pgmb.endpoint") == "active"
            stepped.advance(1.21 * 86_400)
            await stepped.play()
            stepped.advance(10)
            await stepped.play()
        assert stepped.value("select state from pgmb.endpoint") == "disabled"
        assert stepped.value("select reason from pgmb.endpoint").startswith("failed since")
        assert stepped.value("select count(*) from pgmb.log_main where topic = 'pgmb.endpoint.disabled'") == 1


async def test_a_redirect_is_a_failure_and_not_followed(dsn: str, db: psycopg.Connection[Any]) -> None:
    async with SteppedDispatcher(dsn, db) as stepped:
        url = stepped.receiver.url
        stepped.receiver.answer = partial(redirecting, to=url + "/canary")
        stepped.endpoint()
        stepped.publish()
        await stepped.play()
        assert {request.path for request in stepped.receiver.requests} == {"/e"}
        assert stepped.value("select distinct error from pgmb.attempt") == "redirect"


async def test_what_came_back_is_kept_if_asked(dsn: str, db: psycopg.Connection[Any]) -> None:
    async with SteppedDispatcher(
        dsn, db, partial(answering, status=400, body=b"no\x00pe" + b"x" * 5000)
    ) as stepped:
        stepped.endpoint(keep_response=True, log="all", retry_after=["1 h"])
        stepped.publish()
        await stepped.play()
        response = stepped.value("select response from pgmb.attempt")
        assert response.startswith("no\ufffdpe")
        assert len(response.encode()) <= 1024


async def test_a_timeout_is_a_failure(dsn: str, db: psycopg.Connection[Any]) -> None:
    release = asyncio.Event()

    async def answer(_: Any) -> int:
        await release.wait()
        return 200

    async with SteppedDispatcher(dsn, db, answer) as stepped:
        stepped.endpoint(timeout="0.2 s", retry_after=["1 h"])
        stepped.publish()
        assert await stepped.play() == 1
        assert stepped.value("select error from pgmb.attempt") == "timeout"
        release.set()


async def test_a_trip_a_recovery_and_a_410_are_logged(
    dsn: str, db: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pgmb.webhooks")
    status = 500
    async with SteppedDispatcher(dsn, db, lambda _: status) as stepped:
        stepped.endpoint()
        stepped.publish(5)
        await stepped.play()
        first, *rest = caplog.messages
        assert re.fullmatch("endpoint e: event .* failed at attempt 1: http_500", first)
        assert rest == ["endpoint e: tripped: requests fail: http_500"]
        status = 204
        stepped.advance(600)
        await stepped.play()
        assert caplog.messages[2:] == [
            "endpoint e: requests succeed again",
            "endpoint e: active: a request succeeded",
        ]
        status = 410
        stepped.publish()
        await stepped.play()
    assert caplog.messages[4] == "endpoint e: disabled: it answered 410 Gone"


async def test_what_waits_for_an_endpoint_is_counted(dsn: str, db: psycopg.Connection[Any]) -> None:
    """By the row that it has: failed, or given back because the endpoint is not open."""
    async with SteppedDispatcher(dsn, db, lambda _: 500) as stepped:
        stepped.endpoint()
        stepped.publish(20)
        await stepped.play()
        age_waiting_events(db, "1 hour", seq=7)
        assert stepped.value("select waiting from pgmb.endpoints") == 20
        assert stepped.value("select at_least from pgmb.endpoints") == []
        assert 3600 <= stepped.value("select extract(epoch from oldest_age) from pgmb.endpoints") < 7200
        add_deliveries(db, 9990, attempt=1)
        assert stepped.value("select (waiting, at_least)::text from pgmb.endpoints") == "(10000,{waiting})"


def test_an_endpoint_with_a_queue_of_its_own_has_all_that_waits_there(db: psycopg.Connection[Any]) -> None:
    worker = db.execute("select pgmb.worker('w', 'https://worker.example/', null)").fetchone()
    assert worker is not None
    db.execute("select pgmb.create('q', 't', 3, %s)", [worker[0]])
    db.execute("select pgmb.publish(t, '1') from unnest('{t,other,t,t}'::text[]) t")
    waiting = "select waiting, oldest_age is not null, at_least from pgmb.endpoints"
    assert db.execute(waiting).fetchall() == [(3, True, [])]
    given = db.execute("select lease, seq from pgmb.receive_deliveries('q')").fetchall()
    assert db.execute(waiting).fetchall() == [(3, False, [])], "under way"
    db.execute("select pgmb.ack(%s, %s::bigint[])", [given[0][0], [given[0][1]]])
    db.execute("select pgmb.retry(%s)", [given[0][0]])
    assert db.execute(waiting).fetchall() == [(2, True, [])]
