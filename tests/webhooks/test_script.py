"""Schedules, Retry-After, 410 and the breaker, before a server that follows a script, by a fake clock."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import psycopg
import pytest
from aiohttp import web

from pgmb.webhooks.outcomes import DEFAULT_SCHEDULE
from tests.webhooks.stage import Stage

pytestmark = pytest.mark.once()


async def test_retries_come_at_the_times_of_the_schedule(dsn: str, db: psycopg.Connection[Any]) -> None:
    async with Stage(dsn, db, lambda _: 500) as stage:
        stage.endpoint()
        # Failures that are not the endpoint's alone keep its breaker closed.
        stage.publish()
        assert await stage.play() == 2
        for wait in DEFAULT_SCHEDULE[1:]:
            (seconds,) = stage.waits()
            # Some of it has really passed by now.
            assert 0.8 * wait - 10.0 <= seconds <= 1.2 * wait + 0.01
            stage.advance(0.75 * wait)
            if wait > 5.0:
                assert await stage.play() == 0
            stage.advance(0.5 * wait)
            stage.db.execute("update pgmb.endpoint set state = 'active', changed_at = clock_timestamp()")
            assert await stage.play() == 1
        assert stage.waits() == []
        assert stage.value("select attempt from pgmb.dead") == 11
        assert len({request.headers["webhook-id"] for request in stage.receiver.got}) == 1
        numbers = [int(request.headers["pgmb-attempt"]) for request in stage.receiver.got]
        assert numbers == list(range(1, 12))


async def test_waits_are_spread(dsn: str, db: psycopg.Connection[Any]) -> None:
    async with Stage(dsn, db, lambda _: 500) as stage:
        stage.endpoint(retry_after=["1000 s"], max_in_flight=50)
        stage.publish(40)
        await stage.play()
        # Those that were tried; the others found it tripped.
        waits = [seconds for seconds in stage.waits() if seconds > 100]
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
    async with Stage(
        dsn, db, lambda _: web.Response(status=status, headers={"Retry-After": header})
    ) as stage:
        stage.endpoint(retry_after=["5 s", "5 s"])
        stage.publish()
        assert await stage.play() == 1
        (seconds,) = stage.waits()
        assert least <= seconds <= most


async def test_an_endpoint_that_asks_for_time_gets_it(dsn: str, db: psycopg.Connection[Any]) -> None:
    async with Stage(dsn, db, lambda _: web.Response(status=429, headers={"Retry-After": "60"})) as stage:
        stage.endpoint(max_in_flight=1)
        stage.publish(3)
        assert await stage.play() == 1
        stage.publish()
        assert await stage.play() == 0
        stage.receiver.answer = lambda _: 200
        stage.advance(61)
        assert await stage.play() == 4
        assert stage.waits() == []


async def test_the_breaker_opens_tries_once_and_waits_longer(dsn: str, db: psycopg.Connection[Any]) -> None:
    async with Stage(dsn, db, lambda _: 500) as stage:
        stage.endpoint(max_in_flight=1, retry_after=["1 s"] * 50)
        stage.publish(20)
        assert await stage.play() == 5
        assert stage.value("select state from pgmb.endpoint") == "tripped"
        for wait in (10, 20, 40, 80, 160, 300, 300):
            probe = "select extract(epoch from probe_at - clock_timestamp())::float8 from pgmb.endpoint"
            assert wait / 2 < stage.value(probe) <= wait
            stage.advance(wait / 2 - 2)
            assert await stage.play() == 0
            stage.advance(wait / 2 + 2)
            assert await stage.play() == 1
        stage.receiver.answer = lambda _: 200
        stage.advance(301)
        assert await stage.play() == 20
        assert stage.value("select state from pgmb.endpoint") == "active"
        assert stage.waits() == []


async def test_some_failures_among_many_do_not_trip(dsn: str, db: psycopg.Connection[Any]) -> None:
    asked = 0

    def answer(_: Any) -> int:
        nonlocal asked
        asked += 1
        return 500 if asked % 3 == 0 else 200

    async with Stage(dsn, db, answer) as stage:
        stage.endpoint(max_in_flight=1, retry_after=["1 h"] * 9)
        stage.publish(30)
        assert await stage.play() == 30
        assert stage.value("select state from pgmb.endpoint") == "active"
        assert len(stage.waits()) == 10


async def test_five_days_of_failure_disable(dsn: str, db: psycopg.Connection[Any]) -> None:
    async with Stage(dsn, db, lambda _: 500) as stage:
        stage.endpoint(retry_after=["1 day"] * 9)
        stage.publish()
        await stage.play()
        stage.advance(10)
        await stage.play()
        for _ in range(5):
            assert stage.value("select state from pgmb.endpoint") == "active"
            stage.advance(1.21 * 86_400)
            await stage.play()
            stage.advance(10)
            await stage.play()
        assert stage.value("select state from pgmb.endpoint") == "disabled"
        assert stage.value("select reason from pgmb.endpoint").startswith("failed since")
        assert stage.value("select count(*) from pgmb.log_main where topic = 'pgmb.endpoint.disabled'") == 1


async def test_a_redirect_is_a_failure_and_not_followed(dsn: str, db: psycopg.Connection[Any]) -> None:
    async with Stage(dsn, db) as stage:
        url = stage.receiver.url
        stage.receiver.answer = lambda _: web.Response(status=307, headers={"Location": url + "/canary"})
        stage.endpoint()
        stage.publish()
        await stage.play()
        assert {request.path for request in stage.receiver.got} == {"/e"}
        assert stage.value("select distinct error from pgmb.attempt") == "redirect"


async def test_what_came_back_is_kept_if_asked(dsn: str, db: psycopg.Connection[Any]) -> None:
    async with Stage(dsn, db, lambda _: web.Response(status=400, text="no\x00pe" + "x" * 5000)) as stage:
        stage.endpoint(keep_response=True, log="all", retry_after=["1 h"])
        stage.publish()
        await stage.play()
        response = stage.value("select response from pgmb.attempt")
        assert response.startswith("no\ufffdpe")
        assert len(response.encode()) <= 1024


async def test_a_timeout_is_a_failure(dsn: str, db: psycopg.Connection[Any]) -> None:
    release = asyncio.Event()

    async def answer(_: Any) -> int:
        await release.wait()
        return 200

    async with Stage(dsn, db, answer) as stage:
        stage.endpoint(timeout="0.2 s", retry_after=["1 h"])
        stage.publish()
        assert await stage.play() == 1
        assert stage.value("select error from pgmb.attempt") == "timeout"
        release.set()


async def test_a_trip_a_recovery_and_a_410_are_logged(
    dsn: str, db: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pgmb.webhooks")
    status = 500
    async with Stage(dsn, db, lambda _: status) as stage:
        stage.endpoint()
        stage.publish(5)
        await stage.play()
        assert caplog.messages == ["endpoint e: tripped: requests fail: http_500"]
        status = 204
        stage.advance(600)
        await stage.play()
        assert caplog.messages[1:] == ["endpoint e: active: a request succeeded"]
        status = 410
        stage.publish()
        await stage.play()
    assert caplog.messages[2:] == ["endpoint e: disabled: it answered 410 Gone"]


async def test_what_waits_for_an_endpoint_is_counted(dsn: str, db: psycopg.Connection[Any]) -> None:
    """By the row that it has: failed, or given back because the endpoint is not open."""
    async with Stage(dsn, db, lambda _: 500) as stage:
        stage.endpoint()
        stage.publish(20)
        await stage.play()
        db.execute("update pgmb.delivery set published_at = published_at - interval '1 hour' where seq = 7")
        assert stage.value("select waiting from pgmb.endpoints") == 20
        assert stage.value("select at_least from pgmb.endpoints") == []
        assert 3600 <= stage.value("select extract(epoch from oldest_age) from pgmb.endpoints") < 7200
        db.execute(
            "insert into pgmb.delivery (queue, endpoint, due_at, attempt, seq, event_id, topic, payload,"
            "  published_at) select queue, endpoint, due_at, 1, n, event_id, topic, payload, published_at"
            " from (select * from pgmb.delivery limit 1) d, generate_series(1, 9990) n"
        )
        assert stage.value("select (waiting, at_least)::text from pgmb.endpoints") == "(10000,{waiting})"


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
