"""A response judges a message or its receiver. What is true of the receiver stands in its row."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import psycopg
import pytest

from harness.answers import answering
from harness.receiver import Exchange
from tests.contract.endpoints import create, publish, receive, settle, value
from tests.webhooks.stepped import SteppedDispatcher

pytestmark = pytest.mark.once()

KINDS = ["shared", "ordered", "batches", "worker"]


def numbers(body: bytes) -> list[int]:
    """The payloads of a request."""
    read = json.loads(body)
    return read if isinstance(read, list) else [read]


def prepare(stepped: SteppedDispatcher, kind: str) -> None:
    """An endpoint e whose retries are hours away."""
    hours = ["10 h"] * 9
    if kind == "shared":
        stepped.endpoint(max_in_flight=1, retry_after=hours)
    elif kind == "ordered":
        stepped.endpoint(max_in_flight=1, retry_after=hours, ordered=True)
    elif kind == "batches":
        stepped.endpoint(max_in_flight=1, retry_after=hours, batch=2)
    else:
        url = stepped.receiver.url + "/e"
        stepped.db.execute("select pgmb.create('q', 't', 20, pgmb.worker('e', %s, null))", [url])
        stepped.db.execute("select pgmb.alter_queue('q', backoff_base => '10 h', backoff_max => '10 h')")
        stepped.db.execute("update pgmb.endpoint set max_in_flight = 1, changed_at = clock_timestamp()")


def state(stepped: SteppedDispatcher) -> str:
    return str(stepped.value("select state from pgmb.endpoints where name = 'e'"))


@pytest.mark.parametrize("kind", ["shared", "ordered", "worker"])
@pytest.mark.parametrize("status", [400, 422])
async def test_refused_messages_do_not_delay_others(
    dsn: str, db: psycopg.Connection[Any], kind: str, status: int
) -> None:
    def answer(exchange: Exchange) -> int:
        return status if numbers(exchange.request.body)[0] <= 10 else 204

    async with SteppedDispatcher(dsn, db, answer) as stepped:
        prepare(stepped, kind)
        stepped.publish(40)
        assert await stepped.play() == 40
        stepped.advance(3)
        await stepped.play()
        assert state(stepped) == "active"
        assert stepped.value("select failing_since from pgmb.endpoints") is None
        assert stepped.value("select failed from pgmb.endpoints") == 10


@pytest.mark.parametrize("status", [401, 403, 404, 408, 500])
async def test_failures_of_the_receiver_trip_it(dsn: str, db: psycopg.Connection[Any], status: int) -> None:
    async with SteppedDispatcher(dsn, db, lambda _: status) as stepped:
        prepare(stepped, "shared")
        stepped.publish(20)
        assert await stepped.play() == 5
        assert state(stepped) == "tripped"


async def test_one_event_that_fails_again_and_again_trips_nothing(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    async with SteppedDispatcher(dsn, db, lambda _: 500) as stepped:
        stepped.endpoint(retry_after=["0 s"] * 12)
        stepped.publish()
        assert await stepped.play() == 13
        assert state(stepped) == "active"


async def test_410_is_about_the_message_where_a_worker_answers_it(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    def answer(exchange: Exchange) -> int:
        return 410 if numbers(exchange.request.body)[0] % 2 else 204

    async with SteppedDispatcher(dsn, db, answer) as stepped:
        prepare(stepped, "worker")
        stepped.publish(40)
        assert await stepped.play() == 40
        assert state(stepped) == "active"
        assert stepped.value("select count(*) from pgmb.log_main where topic <> 't'") == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_a_probe_takes_an_event_that_has_not_failed(
    dsn: str, db: psycopg.Connection[Any], kind: str
) -> None:
    """Events that crash their receiver trip it. They are not what shows that it works for the others."""

    def answer(exchange: Exchange) -> int:
        return 500 if numbers(exchange.request.body)[0] <= 10 else 204

    async with SteppedDispatcher(dsn, db, answer) as stepped:
        prepare(stepped, kind)
        stepped.publish(10)
        assert await stepped.play() == 5
        assert state(stepped) == "tripped"
        db.execute("select pgmb.publish('t', to_json(n), 'k' || n) from generate_series(11, 14) n")
        for _ in range(20):
            # Five events of the ten have not failed yet, and are older. A key that was given back rests.
            stepped.advance(301)
            await stepped.play()
            if state(stepped) == "active":
                break
        assert state(stepped) == "active"
        delivered = {n for r in stepped.receiver.requests for n in numbers(r.body) if n > 10}
        assert delivered == {11, 12, 13, 14}


@pytest.mark.parametrize("unread", [False, True], ids=["all failed", "unread events"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_recovered_endpoint_is_active_after_one_probe(
    dsn: str, db: psycopg.Connection[Any], kind: str, unread: bool
) -> None:
    """Whatever waits and whenever it is due: a queue whose only endpoint is tripped is not read otherwise."""
    async with SteppedDispatcher(dsn, db, lambda _: 500) as stepped:
        prepare(stepped, kind)
        stepped.publish(10 if kind == "batches" else 5)
        assert await stepped.play() == 5
        assert state(stepped) == "tripped"
        stepped.receiver.answer = lambda _: 204
        if unread:
            stepped.publish(3)
        stepped.advance(11)
        assert await stepped.play() >= 1
        assert state(stepped) == "active"
        if unread:
            assert len(stepped.receiver.requests) >= 5 + (2 if kind == "batches" else 3)


async def test_a_throttled_endpoint_is_shown_and_waits_an_hour_at_most(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    answer = partial(answering, status=429, headers=("Retry-After: 86400",))
    async with SteppedDispatcher(dsn, db, answer) as stepped:
        stepped.endpoint(max_in_flight=1)
        stepped.publish(3)
        assert await stepped.play() == 1
        told = "select state, reason, probe_at - clock_timestamp() <= '1 hour' from pgmb.endpoints"
        assert db.execute(told).fetchall() == [("throttled", "http_429: it asked for 86400 s", True)]
        stepped.receiver.answer = lambda _: 204
        stepped.advance(3600)
        assert await stepped.play() == 2
        assert state(stepped) == "active"


async def test_a_probe_that_is_throttled_waits_as_long_as_it_was_told(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    answer = partial(answering, status=503, headers=("Retry-After: 100",))
    async with SteppedDispatcher(dsn, db, answer) as stepped:
        stepped.endpoint(max_in_flight=1)
        stepped.publish(30)
        await stepped.play()
        for _ in range(7):
            stepped.advance(90)
            assert await stepped.play() == 0
            stepped.advance(11)
            assert await stepped.play() == 1
        assert state(stepped) == "throttled"


async def test_another_dispatcher_does_not_post_to_a_throttled_endpoint(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    answer = partial(answering, status=429, headers=("Retry-After: 600",))
    async with SteppedDispatcher(dsn, db, answer) as first:
        first.endpoint(max_in_flight=1)
        first.publish(3)
        assert await first.play() == 1
    async with SteppedDispatcher(dsn, db) as second:
        db.execute("update pgmb.endpoint set url = %s", [second.receiver.url])
        assert await second.play() == 0
        second.advance(601)
        assert await second.play() == 3


def by_resume(stepped: SteppedDispatcher) -> None:
    stepped.db.execute("select pgmb.set_endpoint_state('e', 'active')")


def by_redrive(stepped: SteppedDispatcher) -> None:
    stepped.db.execute("select pgmb.redrive_failed('e')")


def by_another_url(stepped: SteppedDispatcher) -> None:
    stepped.db.execute("select pgmb.alter_endpoint('e', url => %s)", [stepped.receiver.url + "/new"])


def by_creating_it_with_another_url(stepped: SteppedDispatcher) -> None:
    stepped.db.execute(
        "select pgmb.create_endpoint('e', %s, '{t}', max_in_flight => 1)", [stepped.receiver.url + "/new"]
    )


@pytest.mark.parametrize("status", [429, 500], ids=["throttled", "tripped"])
@pytest.mark.parametrize(
    "end",
    [by_resume, by_redrive, by_another_url, by_creating_it_with_another_url],
    ids=lambda end: end.__name__,
)
async def test_an_operator_ends_throttling_and_tripping(
    dsn: str, db: psycopg.Connection[Any], status: int, end: Any
) -> None:
    answer = partial(answering, status=status, headers=("Retry-After: 80000",))
    async with SteppedDispatcher(dsn, db, answer) as stepped:
        stepped.endpoint(max_in_flight=1, retry_after=["10 h"])
        stepped.publish(20)
        tried = await stepped.play()
        assert state(stepped) == ("throttled" if status == 429 else "tripped")
        stepped.receiver.answer = lambda _: 204
        end(stepped)
        assert await stepped.play() >= 20 - tried
        assert state(stepped) == "active"


def test_an_answer_about_a_message_ends_a_failure_and_begins_none(db: psycopg.Connection[Any]) -> None:
    hook = create(db, "hook")
    heartbeat = (
        "select pgmb.heartbeat(gen_random_uuid(), 'host', 1, array[%s]::uuid[], '{0}', '{1}', '{no}',"
        " refused => array[%s]::bigint[])"
    )
    since = "select failing_since is not null from pgmb.endpoints"
    for refusals, failing in ((1, False), (0, True), (1, False)):
        db.execute(heartbeat, [hook, refusals])
        assert value(db, since) is failing
    assert value(db, "select failed from pgmb.endpoints") == 3


def test_no_answer_disables_a_worker(db: psycopg.Connection[Any]) -> None:
    worker = value(db, "select pgmb.worker('w', 'http://localhost/', null)")
    db.execute("select pgmb.create('q', 'a', 1, %s)", [worker])
    db.execute("select pgmb.disable_endpoint(%s, '410 Gone')", [worker])
    db.execute(
        "update pgmb.endpoint_activity set failing_since = now() - interval '1 year', failed_at = now()"
    )
    db.execute(
        "select pgmb.heartbeat(gen_random_uuid(), 'host', 1, array[%s]::uuid[], '{0}', '{1}', '{no}',"
        " refused => '{0}')",
        [worker],
    )
    assert value(db, "select state from pgmb.endpoints") == "active"


def test_a_claimed_probe_is_the_event_with_the_fewest_attempts(db: psycopg.Connection[Any]) -> None:
    hook = create(db, "hook")
    publish(db, 1, 2, 3)
    got = receive(db)
    after, failed = "1 hour", {1: True, 2: True, 3: False}
    failures = [(got.seqs(n)[0], hook, after, "no", tried, False) for n, tried in failed.items()]
    settle(db, got.lease, None, failures)
    probe = "select payload::int from pgmb.claim_probe(%s, %s)"
    assert value(db, probe, hook, True) == 3
    assert db.execute(probe, [hook, True]).fetchall() == []
    assert value(db, probe, hook, False) == 1
    assert value(db, probe, hook, False) == 2
    assert db.execute(probe, [hook, False]).fetchall() == []
