"""The rules of ADR 27 and ADR 28, over every table, function and role of an installation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from pgmb import schema
from tests.contract import catalog_rules as rules


@pytest.fixture
def installed(db: psycopg.Connection[Any]) -> Iterator[psycopg.Connection[Any]]:
    """An installation with everything in use that makes objects of its own, in a transaction of its own."""
    schema.install(db, compat=("pgmq",))
    db.execute("select pgmb.create_stream('orders')")
    db.execute("select pgmb.create_queue('q', stream => 'orders')")
    db.execute("select pgmq.create('jobs')")
    db.execute("select pgmb.claim_stage('orders', 'app')")
    db.execute("select pgmb.create_queue('conditional', condition => $$e.key = 'a'$$)")
    db.execute("create role granted_one")
    db.execute("select pgmb.grant_publish('orders', 'granted_one'), pgmb.grant_read('orders', 'granted_one')")
    db.execute("select pgmb.grant_consume('q', 'granted_one')")
    db.execute("select pgmq.grant_send('jobs', 'granted_one'), pgmq.grant_read('jobs', 'granted_one')")
    yield db
    db.execute("drop owned by granted_one; drop role granted_one")


def test_no_role_but_the_owner_may_change_lock_or_hook_into_a_table(
    installed: psycopg.Connection[Any],
) -> None:
    assert rules.harmful_grants(installed) == []


@pytest.mark.parametrize(
    "granted",
    [
        "grant delete on pgmb.delayed to pgmb_publisher",
        "grant update (topic) on pgmb.log_orders to pgmb_publisher",
        "grant truncate on pgmb.segment to public",
        "grant references on pgmb.queue to pgmb_admin",
        "grant trigger on pgmq.queue to pgmb_consumer",
    ],
)
def test_the_rule_on_tables_catches_a_grant(installed: psycopg.Connection[Any], granted: str) -> None:
    installed.execute(granted)
    assert len(rules.harmful_grants(installed)) == 1


def test_no_role_but_the_owner_may_set_a_sequence(installed: psycopg.Connection[Any]) -> None:
    assert rules.harmful_sequence_grants(installed) == []
    installed.execute("grant update on sequence pgmb.seq_orders to pgmb_publisher")
    assert len(rules.harmful_sequence_grants(installed)) == 1


def test_nothing_is_open_to_public(installed: psycopg.Connection[Any]) -> None:
    assert rules.open_to_public(installed) == []


@pytest.mark.parametrize(
    "granted",
    [
        "grant execute on function pgmb.tick to public",
        "grant select on pgmb.queue to public",
        "grant usage on schema pgmb to public",
        "create function pgmb.added() returns int language sql as 'select 1'",
    ],
)
def test_the_rule_on_public_catches_a_grant(installed: psycopg.Connection[Any], granted: str) -> None:
    installed.execute(granted)
    assert len(rules.open_to_public(installed)) == 1
