"""Who may call worker, create and send, and who may read the views: one attempt after another."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg import sql

from tests.contract.cast import Cast
from tests.contract.test_privileges import refused, rows

SEND = "select pgmb.send(gen_random_uuid(), 'order.created', '{}')"
EVERY_SEND = [
    SEND,
    "select pgmb.send(gen_random_uuid(), 'order.created', '{}', '{}'::jsonb)",
    "select pgmb.send(gen_random_uuid(), 'order.created', '{}', '{}'::text)",
    "select pgmb.send(gen_random_uuid(), 'order.created', '{}', 600)",
    "select pgmb.send(gen_random_uuid(), 'order.created', '{}', now() + interval '1 hour')",
    "select pgmb.send(gen_random_uuid(), 'order.created', '{}', '{}', 600)",
    "select pgmb.send(gen_random_uuid(), 'order.created', '{}', '{}', now() + interval '1 hour')",
]
ADMINISTER = [
    "select pgmb.worker('mine', 'http://localhost/', 1)",
    "select pgmb.create('mine', 'order.*', 5, gen_random_uuid())",
    "select pgmb.create('mine', 'order.*', gen_random_uuid(), 5)",
    "select * from pgmb.workers",
    "select * from pgmb.queues",
    "select * from pgmb.messages",
    "select count(*) from pgmb.messages",
    "select pgmb.drop_queue('order_queue')",
]
WATCH = [
    "select * from pgmb.order_queue",
    "select count(*) from pgmb.order_queue where acknoledge = false",
    "select * from pgmb.order_queue_queue",
    "select * from pgmb.order_dead_letter_queue",
    "select * from pgmb.order_queue_dead_letter_queue",
    "select * from pgmb.pending_messages('order_queue')",
]
INSIDE = [
    "select * from pgmb.endpoint",
    "select * from pgmb.queue_view",
    "select pgmb_internal.create_queue_views(q) from pgmb.queue q",
    "select pgmb_internal.create_queue_views(null)",
    "select pgmb_internal.drop_queue_views('order_queue')",
    "select pgmb_internal.grant_queue_views(1, current_user)",
    "select pgmb_internal.create_messages_view()",
    "select pgmb_internal.snapshot_with_own()",
    "drop view pgmb.order_queue",
    "insert into pgmb.queue_view values (1, 'queue')",
    "insert into pgmb.endpoint (name, url) values ('x', 'http://localhost/')",
    "update pgmb.workers set endpoint = 'http://evil.example/'",
    "delete from pgmb.workers",
]


@pytest.fixture(autouse=True)
def queues(db: psycopg.Connection[Any]) -> None:
    """Two queues of one worker, with a message each."""
    db.execute("select pgmb.worker('w', 'http://localhost/', 1)")
    for name in ("order", "invoice"):
        db.execute(f"select pgmb.create('{name}_queue', '{name}.*', 5, id) from pgmb.workers")
        db.execute(f"select pgmb.send(gen_random_uuid(), '{name}.created', '{{}}')")


def test_a_stranger_can_do_none_of_it(cast: Cast) -> None:
    stranger = cast.acting(cast.role("stranger"))
    for statement in [*EVERY_SEND, *ADMINISTER, *WATCH, *INSIDE]:
        refused(stranger, statement)


def test_a_publisher_sends_and_does_nothing_else(db: psycopg.Connection[Any], cast: Cast) -> None:
    publisher = cast.acting(cast.role("publisher", "pgmb_publisher"))
    for statement in EVERY_SEND:
        publisher.execute(statement)
    for statement in [*ADMINISTER, *WATCH, *INSIDE]:
        refused(publisher, statement)
    assert rows(db, "select count(*) from pgmb.messages") == [(9,)]


def test_a_publisher_of_another_stream_does_not_send(db: psycopg.Connection[Any], cast: Cast) -> None:
    """Messages go to main, with the caller's own rights."""
    db.execute("select pgmb.create_stream('other')")
    role = cast.role("elsewhere")
    db.execute("select pgmb.grant_publish('other', %s)", [role])
    publisher = cast.acting(role)
    for statement in EVERY_SEND:
        refused(publisher, statement)
    db.execute("select pgmb.grant_publish('main', %s)", [role])
    for statement in EVERY_SEND:
        publisher.execute(statement)


def test_a_consumer_watches_queues_and_does_nothing_else(cast: Cast) -> None:
    consumer = cast.acting(cast.role("consumer", "pgmb_consumer"))
    for statement in WATCH:
        consumer.execute(statement)
    for statement in [*EVERY_SEND, *ADMINISTER, *INSIDE]:
        refused(consumer, statement)


@pytest.mark.parametrize("before", [True, False], ids=["granted before", "granted after"])
def test_a_consumer_of_one_queue_watches_that_one(
    db: psycopg.Connection[Any], cast: Cast, before: bool
) -> None:
    role = cast.role("biller")
    if before:
        db.execute("select pgmb.drop_queue('invoice_queue')")
        db.execute("select pgmb.create_queue('invoice_queue', '{invoice.*}')")
    db.execute("select pgmb.grant_consume('invoice_queue', %s)", [role])
    if before:
        db.execute("select pgmb.create('invoice_queue', 'invoice.*', 5, id) from pgmb.workers")
        db.execute("select pgmb.send(gen_random_uuid(), 'invoice.created', '{}')")
    biller = cast.acting(role)
    for statement in WATCH:
        biller.execute(statement.replace("order", "invoice"))
    assert rows(biller, "select count(*) from pgmb.invoice_queue where acknoledge = false") == [(1,)]
    for statement in [*WATCH, *EVERY_SEND, *ADMINISTER, *INSIDE]:
        refused(biller, statement)
    # A right on the view alone does not help: the queue is asked.
    db.execute(sql.SQL("grant select on pgmb.order_queue to {}").format(sql.Identifier(role)))
    refused(biller, "select * from pgmb.order_queue")
    db.execute("select pgmb.revoke_consume('invoice_queue', %s)", [role])
    refused(biller, "select * from pgmb.invoice_queue")


def test_an_admin_does_all_of_it(db: psycopg.Connection[Any], cast: Cast) -> None:
    """Although it owns nothing; what it makes belongs to the owner of the schema."""
    admin = cast.acting(cast.role("admin", "pgmb_admin"))
    for statement in [*WATCH, *ADMINISTER]:
        admin.execute(statement)
    owners = rows(
        db,
        "select distinct c.relowner = n.nspowner from pg_class c"
        " join pg_namespace n on n.oid = c.relnamespace where n.nspname = 'pgmb'",
    )
    assert owners == [(True,)]
    refused(admin, SEND)


def test_nothing_of_a_new_queue_is_for_public(db: psycopg.Connection[Any]) -> None:
    public = rows(
        db,
        "select c.relname from pg_class c, aclexplode(c.relacl) a"
        " where c.relnamespace = 'pgmb'::regnamespace and a.grantee = 0",
    )
    assert public == []


def test_shadows_in_the_callers_schemas_are_not_reached(db: psycopg.Connection[Any], cast: Cast) -> None:
    """worker, create and the views run with a pinned search_path."""
    role = cast.role("mallory", "pgmb_admin")
    db.execute(sql.SQL("create schema trap authorization {}").format(sql.Identifier(role)))
    mallory = cast.acting(role)
    for signature, returned in (
        ("format(text, text)", "text"),
        ("quote_literal(text)", "text"),
        ("octet_length(text)", "int"),
        ("gen_random_uuid()", "uuid"),
        ("clock_timestamp()", "timestamptz"),
        ("to_jsonb(text)", "jsonb"),
    ):
        mallory.execute(
            f"create function trap.{signature} returns {returned} language plpgsql as"
            " $$begin raise exception 'ran as %', current_user using errcode = 'XX999'; end$$"
        )
    mallory.execute("set search_path = trap, pg_catalog")
    mallory.execute("select pgmb.worker('mine', 'http://localhost/', 1)")
    mallory.execute("select pgmb.create('mine', 'a', 5, id) from pgmb.workers where name = 'mine'")
    for view in ("mine_queue", "mine_dead_letter_queue", "order_queue", "messages", "queues", "workers"):
        mallory.execute(f"select * from pgmb.{view}")
