"""The Dispatcher against a real database and a server that answers as it is told."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest

import pgmb
from harness.receiver import Exchange, Receiver
from harness.states import add_deliveries, deliveries_waiting, leases_in_flight, make_due
from pgmb.services import serve
from pgmb.services.dispatcher import Dispatcher
from pgmb.webhooks.request import Endpoint, WebhookEvent
from tests.webhooks.stepped import SteppedDispatcher

LOOPBACK = ("127.0.0.0/8",)


@asynccontextmanager
async def dispatching(dsn: str, **options: Any) -> AsyncIterator[Dispatcher]:
    """A dispatcher at work."""
    stop = asyncio.Event()
    role = Dispatcher(LOOPBACK, **options)
    async with await pgmb.aconnect(dsn, max_size=2) as broker:
        task = asyncio.create_task(serve(broker, [role], stop))
        try:
            yield role
        finally:
            stop.set()
            await asyncio.wait_for(task, 60)


def value(db: psycopg.Connection[Any], statement: str, *parameters: Any) -> Any:
    ((only,),) = db.execute(statement, parameters).fetchall()
    return only


async def test_a_worker_gets_what_its_queue_holds(dsn: str, db: psycopg.Connection[Any]) -> None:
    async with Receiver() as receiver:
        worker = value(db, "select pgmb.worker('w', %s, null)", receiver.url + "/process")
        db.execute("select pgmb.create('orders', 'order.*', 3, %s)", [worker])
        db.execute("select pgmb.send(gen_random_uuid(), 'order.created', '{\"n\": 1}')")
        db.execute("select pgmb.publish('order.paid', to_json(n)) from generate_series(2, 100) n")
        async with dispatching(dsn):
            await receiver.until(lambda: len(receiver.requests) >= 100)
        assert max(len(request.body) for request in receiver.requests) == 8
        assert {request.path for request in receiver.requests} == {"/process"}
        assert len({request.headers["webhook-id"] for request in receiver.requests}) == 100
    assert value(db, "select pgmb.queue_depth('orders')") == 0
    assert value(db, "select delivered from pgmb.endpoints where name = 'w'") == 100
    assert value(db, "select last_heartbeat is null from pgmb.workers") is True


async def test_webhooks_that_share_a_queue_get_what_they_asked_for(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    async with Receiver() as receiver:
        for n in range(5):
            db.execute(
                "select pgmb.create_endpoint(%s, %s, '{t.#}', equals => %s)",
                [f"e{n}", f"{receiver.url}/{n}", json.dumps({"payload": {"n": n}})],
            )
        db.execute("select pgmb.create_endpoint('all', %s, '{t.#}')", [receiver.url + "/all"])
        db.execute(
            "select pgmb.publish('t.x', json_build_object('n', n % 10)) from generate_series(0, 199) n"
        )
        async with dispatching(dsn):
            await receiver.until(lambda: len(receiver.requests) >= 300)
            await receiver.until(lambda: value(db, "select pgmb.queue_depth('webhooks')") == 0)
    paths = Counter(request.path for request in receiver.requests)
    assert paths == {"/all": 200, **{f"/{n}": 20 for n in range(5)}}
    for request in receiver.requests:
        if request.path != "/all":
            assert json.loads(request.body)["n"] == int(request.path[1:])


async def test_what_fails_waits_and_comes_again_under_the_same_id(
    dsn: str, db: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pgmb")
    tries: dict[str, int] = defaultdict(int)

    def answer(exchange: Exchange) -> int:
        request = exchange.request
        tries[request.path] += 1
        return 200 if tries[request.path] == 3 or request.path == "/well" else 500

    async with Receiver(answer) as receiver:
        schedule = ["10 ms", "10 ms", "10 ms"]
        for name in ("bad", "well"):
            db.execute(
                "select pgmb.create_endpoint(%s, %s, '{t}', retry_after => %s::interval[])",
                [name, f"{receiver.url}/{name}", schedule],
            )
        db.execute("select pgmb.publish('t', '1')")
        async with dispatching(dsn):
            await receiver.until(lambda: len(receiver.requests) >= 4)
            await receiver.until(lambda: deliveries_waiting(db) == 0)
            recovered = "select delivered = 1 and error is null from pgmb.endpoints where name = 'bad'"
            await receiver.until(lambda: value(db, recovered))
    ids = {request.headers["webhook-id"] for request in receiver.requests}
    assert len(ids) == 1
    assert Counter(request.path for request in receiver.requests) == {"/bad": 3, "/well": 1}
    attempts = db.execute("select attempt, status, error from pgmb.attempt order by id").fetchall()
    assert attempts == [(1, 500, "http_500"), (2, 500, "http_500")]
    assert [record.getMessage() for record in caplog.records if "endpoint" in record.getMessage()] == [
        f"endpoint bad: event {ids.pop()} failed at attempt 1: http_500",
        "endpoint bad: requests succeed again",
    ]


async def test_after_the_last_failure_it_is_a_dead_letter(dsn: str, db: psycopg.Connection[Any]) -> None:
    async with Receiver(lambda _: 500) as receiver:
        db.execute(
            "select pgmb.create_endpoint('e', %s, '{t}', retry_after => '{1 ms,1 ms}')", [receiver.url]
        )
        db.execute("select pgmb.publish('t', '1')")
        async with dispatching(dsn):
            await receiver.until(lambda: value(db, "select count(*) from pgmb.dead") == 1)
        assert len(receiver.requests) == 3
        dead = db.execute("select attempt, error, endpoint is not null from pgmb.dead").fetchall()
        assert dead == [(3, "http_500", True)]
        receiver.answer = lambda _: 200
        db.execute("select pgmb.redrive('webhooks')")
        async with dispatching(dsn):
            await receiver.until(lambda: len(receiver.requests) == 4)


async def test_gone_disables(dsn: str, db: psycopg.Connection[Any]) -> None:
    async with Receiver(lambda _: 410) as receiver:
        db.execute("select pgmb.create_endpoint('e', %s, '{t}')", [receiver.url])
        db.execute("select pgmb.publish('t', '1')")
        async with dispatching(dsn):
            await receiver.until(lambda: value(db, "select state from pgmb.endpoint") == "disabled")
            db.execute("select pgmb.publish('t', '2')")
            await receiver.until(lambda: value(db, "select pgmb.queue_depth('webhooks')") == 0)
        assert len(receiver.requests) == 1
    assert value(db, "select reason from pgmb.endpoint") == "410 Gone"
    assert value(db, "select count(*) from pgmb.dead") == 1
    assert (
        value(db, "select payload->>'name' from pgmb.log_main where topic = 'pgmb.endpoint.disabled'") == "e"
    )


async def test_an_endpoint_that_fails_is_tripped_probed_and_mended(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    async with Receiver(lambda _: 500) as receiver:
        db.execute("select pgmb.create_endpoint('e', %s, '{t}')", [receiver.url])
        db.execute("select pgmb.publish('t', to_json(n)) from generate_series(1, 50) n")
        async with dispatching(dsn):
            await receiver.until(lambda: value(db, "select state from pgmb.endpoint") == "tripped")
            await receiver.until(lambda: deliveries_waiting(db, leased=False) == 50)
            tried = len(receiver.requests)
            assert tried <= 5 + 16
            receiver.answer = lambda _: 200
            await asyncio.to_thread(db.execute, "update pgmb.endpoint set probe_at = clock_timestamp()")
            await asyncio.to_thread(make_due, db)
            await receiver.until(lambda: deliveries_waiting(db) == 0)
            assert value(db, "select state from pgmb.endpoint") == "active"
        assert len(receiver.requests) == tried + 50


async def test_trips_recoveries_and_the_end_of_an_endpoint_are_logged(
    dsn: str, db: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pgmb.webhooks")
    answers = {"/trips": 500, "/gone": 410}

    async with SteppedDispatcher(dsn, db, lambda exchange: answers[exchange.request.path]) as stepped:
        stepped.endpoint("trips")
        stepped.publish(5)
        await stepped.play()
        assert "endpoint trips: tripped: requests fail: http_500" in caplog.messages
        answers["/trips"] = 200
        stepped.advance(3600)
        await stepped.play()
        assert "endpoint trips: active: a request succeeded" in caplog.messages
        stepped.endpoint("gone")
        stepped.publish()
        await stepped.play()
        assert "endpoint gone: disabled: it answered 410 Gone" in caplog.messages
        db.execute(
            "select pgmb.disable_endpoint(id, 'failed for days') from pgmb.endpoint where name = 'trips'"
        )
        await stepped.play()
        assert "endpoint trips: disabled" in caplog.messages
    assert len([message for message in caplog.messages if "disabled" in message]) == 2


async def test_keys_keep_their_order(dsn: str, db: psycopg.Connection[Any]) -> None:
    failed: set[bytes] = set()

    def answer(exchange: Exchange) -> int:
        request = exchange.request
        if int(request.body) % 7 == 0 and request.body not in failed:
            failed.add(request.body)
            return 500
        return 200

    async with Receiver(answer) as receiver:
        db.execute(
            "select pgmb.create_endpoint('e', %s, '{t}', ordered => true, retry_after => '{1 ms,1 ms}')",
            [receiver.url],
        )
        db.execute("select pgmb.publish('t', to_json(n), key => (n % 5)::text) from generate_series(1, 60) n")
        async with dispatching(dsn):
            await receiver.until(lambda: len(receiver.requests) == 60 + len(failed) and len(failed) == 8)
    seen: dict[int, list[int]] = defaultdict(list)
    for request in receiver.requests:
        number = int(request.body)
        if number not in seen[number % 5]:
            seen[number % 5].append(number)
    assert all(numbers == sorted(numbers) for numbers in seen.values())
    assert sum(map(len, seen.values())) == 60


async def test_a_batch_is_one_request_and_comes_again_as_it_was(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    bodies: list[bytes] = []

    def answer(exchange: Exchange) -> int:
        request = exchange.request
        bodies.append(request.body)
        return 500 if bodies.count(request.body) == 1 else 200

    async with Receiver(answer) as receiver:
        db.execute(
            "select pgmb.create_endpoint('e', %s, '{t}', batch => 10, retry_after => '{1 ms,1 ms}')",
            [receiver.url],
        )
        db.execute("select pgmb.publish('t', to_json(n)) from generate_series(1, 25) n")
        async with dispatching(dsn):
            await receiver.until(lambda: len(bodies) == 6)
    assert set(Counter(bodies).values()) == {2}, Counter(bodies)
    assert sorted(n for body in set(bodies) for n in json.loads(body)) == list(range(1, 26))


async def test_a_serialiser_decides_body_and_content_type_and_fails_its_events_alone(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    def serialiser(endpoint: Endpoint, events: Sequence[WebhookEvent]) -> tuple[bytes, str]:
        (event,) = events
        if int(event.payload) <= 12:
            raise ValueError("no form for this")
        return f"{endpoint.name}:{event.payload}".encode(), "text/plain"

    async with Receiver() as receiver:
        db.execute(
            "select pgmb.create_endpoint('e', %s, '{t}', max_in_flight => 1, retry_after => '{1 h}')",
            [receiver.url],
        )
        db.execute("select pgmb.publish('t', to_json(n)) from generate_series(1, 20) n")
        async with dispatching(dsn, serialiser=serialiser):
            await receiver.until(lambda: len(receiver.requests) == 8)
            await receiver.until(lambda: deliveries_waiting(db, leased=False) == 12)
        assert sorted(request.body for request in receiver.requests) == [b"e:%d" % n for n in range(13, 21)]
        assert {request.headers["content-type"] for request in receiver.requests} == {"text/plain"}
    assert value(db, "select state from pgmb.endpoint") == "active"
    assert value(db, "select failed from pgmb.endpoint_activity") == 0


@pytest.mark.parametrize("most", [1, 3])
async def test_no_more_than_so_many_at_a_time(dsn: str, db: psycopg.Connection[Any], most: int) -> None:
    async def answer(_: Exchange) -> int:
        await asyncio.sleep(0.01)
        return 200

    async with Receiver(answer) as receiver:
        db.execute("select pgmb.create_endpoint('e', %s, max_in_flight => %s)", [receiver.url, most])
        db.execute("select pgmb.publish('t', to_json(n)) from generate_series(1, 40) n")
        async with dispatching(dsn):
            await receiver.until(lambda: len(receiver.requests) >= 40)
        assert receiver.most_under_way == most


@pytest.mark.parametrize(("others", "shared"), [(3_000, True), (25_000, False)], ids=["shared", "own queue"])
async def test_events_for_no_endpoint_are_passed_without_a_pause(
    dsn: str, db: psycopg.Connection[Any], others: int, shared: bool
) -> None:
    """The dispatcher's clock stands still: a pause would never end."""
    async with SteppedDispatcher(dsn, db) as stepped:
        if shared:
            stepped.endpoint()
        else:
            worker = value(db, "select pgmb.worker('w', %s, null)", stepped.receiver.url)
            db.execute("select pgmb.create('q', 't', 3, %s)", [worker])
        await stepped.play()
        db.execute(
            "select pgmb.publish_many('other', array(select to_json(n) from generate_series(1, %s) n))",
            [others],
        )
        stepped.publish()
        stepped.now += 2
        for _ in range(60):
            await stepped.turn()
            if stepped.receiver.requests:
                break
        await stepped.receiver.until(lambda: len(stepped.receiver.requests) == 1)


async def test_erased_events_are_settled_without_a_request(dsn: str, db: psycopg.Connection[Any]) -> None:
    """Those of a queue that several share, of an endpoint's own queue, and one that waits for its retry."""
    async with Receiver() as receiver:
        db.execute("select pgmb.create_endpoint('shared', %s, '{t}')", [receiver.url])
        worker = value(db, "select pgmb.worker('w', %s, null)", receiver.url)
        db.execute("select pgmb.create('own', 't', 3, %s)", [worker])
        for key in ("gone", "kept", "gone"):
            db.execute("select pgmb.publish('t', to_json(%s::text), %s)", [key, key])
        db.execute(
            "update pgmb.log_main set key = null, payload = 'null', headers = '{\"pgmb-erased\":\"x\"}'"
            " where key = 'gone'"
        )
        add_deliveries(db, endpoint="shared", attempt=1, payload="null", headers='{"pgmb-erased":"x"}')
        depth = "select pgmb.queue_depth('webhooks') + pgmb.queue_depth('own')"

        def left() -> int:
            return int(value(db, depth)) + deliveries_waiting(db) + leases_in_flight(db)

        async with dispatching(dsn):
            await receiver.until(lambda: len(receiver.requests) >= 2 and left() == 0)
        assert [request.body for request in receiver.requests] == [b'"kept"'] * 2
    assert value(db, "select count(*) from pgmb.dead") == 0
