"""The Dispatcher where something is in its way: states, keys, dropped things, a database that goes away.

It runs in the test's own loop: a statement that may have to wait for its locks runs in a thread.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any
from uuid import UUID

import psycopg
import pytest
import standardwebhooks

from harness.damage import publish_damaged
from harness.receiver import Exchange, Receiver
from harness.states import deliveries_waiting, queue_names
from pgmb import schema
from pgmb.webhooks.secrets import SealingKey, generate_key, generate_secret
from tests.conftest import FreshServer
from tests.webhooks.test_dispatch import dispatching, value


def seal(db: psycopg.Connection[Any], name: str, key: str) -> str:
    secret = generate_secret()
    endpoint: UUID = value(db, "select id from pgmb.endpoint where name = %s", name)
    db.execute(
        "select pgmb.add_endpoint_secret(%s, %s)", [name, SealingKey.parse(key).seal(secret, endpoint)]
    )
    return secret


async def test_requests_are_signed_with_all_live_secrets(
    dsn: str, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = generate_key()
    monkeypatch.setenv("PGMB_SECRET_KEY", key)
    async with Receiver() as receiver:
        db.execute("select pgmb.create_endpoint('e', %s, '{t}')", [receiver.url])
        secrets = [seal(db, "e", key), seal(db, "e", key)]
        db.execute("select pgmb.publish('t', '{\"a\": 1}')")
        async with dispatching(dsn):
            await receiver.until(lambda: len(receiver.requests) == 1)
    (request,) = receiver.requests
    for secret in secrets:
        assert standardwebhooks.Webhook(secret).verify(request.body, request.headers) == {"a": 1}


async def test_nothing_is_posted_unsigned_for_want_of_the_key(
    dsn: str, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PGMB_SECRET_KEY", raising=False)
    async with Receiver() as receiver:
        db.execute("select pgmb.create_endpoint('sealed', %s, '{t}')", [receiver.url + "/sealed"])
        db.execute("select pgmb.create_endpoint('plain', %s, '{t}')", [receiver.url + "/plain"])
        seal(db, "sealed", generate_key())
        db.execute("select pgmb.publish('t', '1')")
        async with dispatching(dsn):
            await receiver.until(lambda: len(receiver.requests) == 1)
            await receiver.until(lambda: deliveries_waiting(db) == 1)
    assert [request.path for request in receiver.requests] == ["/plain"]


async def test_what_a_paused_endpoint_misses_waits_for_it(dsn: str, db: psycopg.Connection[Any]) -> None:
    async with Receiver() as receiver:
        db.execute("select pgmb.create_endpoint('e', %s, '{t}')", [receiver.url + "/e"])
        db.execute("select pgmb.create_endpoint('f', %s, '{t}')", [receiver.url + "/f"])
        db.execute("select pgmb.set_endpoint_state('e', 'paused')")
        async with dispatching(dsn):
            db.execute("select pgmb.publish('t', to_json(n)) from generate_series(1, 30) n")
            await receiver.until(lambda: deliveries_waiting(db) == 30)
            assert {request.path for request in receiver.requests} == {"/f"}
            await asyncio.to_thread(db.execute, "select pgmb.set_endpoint_state('e', 'active')")
            await receiver.until(lambda: len(receiver.requests) == 60)
            await receiver.until(lambda: deliveries_waiting(db) == 0)


async def test_an_endpoint_and_a_queue_that_are_dropped_trouble_nobody(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    held = asyncio.Event()

    async def answer(exchange: Exchange) -> int:
        request = exchange.request
        if request.path == "/gone":
            await held.wait()
        return 200

    async with Receiver(answer) as receiver:
        db.execute(
            "select pgmb.create_endpoint('gone', %s, '{t}', max_in_flight => 1)", [receiver.url + "/gone"]
        )
        db.execute("select pgmb.create_endpoint('stays', %s, '{t}')", [receiver.url + "/stays"])
        db.execute("select pgmb.create_endpoint('own', %s, '{t}', ordered => true)", [receiver.url + "/own"])
        async with dispatching(dsn):
            db.execute("select pgmb.publish('t', to_json(n)) from generate_series(1, 10) n")
            await receiver.until(lambda: len(receiver.requests) >= 21)
            await asyncio.to_thread(db.execute, "select pgmb.drop_endpoint('gone')")
            await asyncio.to_thread(db.execute, "select pgmb.drop_endpoint('own')")
            held.set()
            db.execute("select pgmb.publish('t', to_json(n)) from generate_series(11, 20) n")
            await receiver.until(lambda: sum(request.path == "/stays" for request in receiver.requests) >= 20)
            await receiver.until(lambda: value(db, "select pgmb.queue_depth('webhooks')") == 0)


async def test_a_filter_that_raises_pauses_its_own_endpoint_alone(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    async with Receiver() as receiver:
        db.execute(
            "select pgmb.create_endpoint('bad', %s, '{t}', condition => $$1 / (e.payload->>'n')::int > 0$$)",
            [receiver.url + "/bad"],
        )
        db.execute("select pgmb.create_endpoint('good', %s, '{t}')", [receiver.url + "/good"])
        async with dispatching(dsn):
            db.execute("select pgmb.publish('t', json_build_object('n', n)) from generate_series(0, 5) n")
            await receiver.until(lambda: sum(got.path == "/good" for got in receiver.requests) == 6)
    assert "division by zero" in value(
        db, "select paused_reason from pgmb.subscriptions where paused_at is not null"
    )


@pytest.mark.crash
async def test_a_database_that_restarts_costs_no_event(fresh_server: FreshServer) -> None:
    server = fresh_server()
    dsn = server.dsn()
    schema.install(dsn)
    async with Receiver() as receiver:
        with psycopg.connect(dsn, autocommit=True) as db:
            db.execute("select pgmb.create_endpoint('e', %s, '{t}')", [receiver.url])
            db.execute("select pgmb.publish('t', to_json(n)) from generate_series(1, 300) n")
        async with dispatching(dsn, lease_for=2.0):
            await receiver.until(lambda: len(receiver.requests) >= 20)
            await asyncio.to_thread(server.restart, "immediate")
            with psycopg.connect(dsn, autocommit=True) as db:
                db.execute("select pgmb.publish('t', to_json(n)) from generate_series(301, 600) n")
            await receiver.until(
                lambda: len({int(json.loads(got.body)) for got in receiver.requests}) == 600, 120
            )
    ids = {got.body: got.headers["webhook-id"] for got in receiver.requests}
    assert all(ids[got.body] == got.headers["webhook-id"] for got in receiver.requests)


@pytest.mark.new_database
async def test_an_unreadable_event_delays_neither_its_queue_nor_others(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    async with Receiver() as receiver:
        db.execute("select pgmb.create_stream('other')")
        db.execute("select pgmb.create_endpoint('e', %s, '{t}')", [receiver.url + "/e"])
        db.execute("select pgmb.create_endpoint('f', %s, '{t}', stream => 'other')", [receiver.url + "/f"])
        for queue in queue_names(db):
            db.execute("select pgmb.alter_queue(%s, max_attempts => 2)", [queue])
        publish_damaged(db, topic="t")
        db.execute("select pgmb.publish('t', to_json(n)) from generate_series(1, 20) n")
        db.execute("select pgmb.publish('t', to_json(n), stream => 'other') from generate_series(1, 20) n")
        async with dispatching(dsn):
            await receiver.until(lambda: len({(r.path, r.body) for r in receiver.requests}) == 40)
            await receiver.until(lambda: value(db, "select count(*) from pgmb.dead") == 1)
    assert "pgmb_unreadable" in value(db, "select payload::text from pgmb.dead")
