"""Schema pgmb is the documented interface; no role but the owner can use schema pgmb_internal (ADR 26)."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from harness import boundary
from tests.contract.cast import Cast


def test_the_reference_documents_every_public_function(db: psycopg.Connection[Any]) -> None:
    assert len(boundary.public_functions(db)) > 100
    assert boundary.undocumented(db) == []


def test_every_documented_function_exists(db: psycopg.Connection[Any]) -> None:
    assert len(boundary.documented()) > 100
    assert boundary.missing(db) == []


def test_the_rules_catch_a_stray_function_and_a_renamed_one(db: psycopg.Connection[Any]) -> None:
    db.execute("create function pgmb.added() returns int language sql as 'select 1'")
    db.execute("alter function pgmb.newest_tick rename to latest_tick")
    assert boundary.undocumented(db) == ["added", "latest_tick"]
    assert boundary.missing(db) == ["newest_tick"]


def test_internal_functions_are_for_the_owner_only(db: psycopg.Connection[Any], cast: Cast) -> None:
    """Also after what grants rights: streams, queues and grants of each kind."""
    db.execute("select pgmb.create_stream('orders')")
    db.execute("select pgmb.create_queue('q', stream => 'orders')")
    role = cast.role("granted")
    db.execute("select pgmb.grant_publish('orders', %s), pgmb.grant_read('orders', %s)", [role, role])
    db.execute("select pgmb.grant_consume('q', %s)", [role])
    count = db.execute("select count(*) from pg_proc where pronamespace = 'pgmb_internal'::regnamespace")
    assert count.fetchall()[0][0] > 100
    assert boundary.open_internals(db) == []


@pytest.mark.parametrize(
    "granted",
    [
        "grant usage on schema pgmb_internal to pgmb_admin",
        "grant usage on schema pgmb_internal to public",
        "grant execute on function pgmb_internal.release_due to pgmb_consumer",
        "create function pgmb_internal.added() returns int language sql as 'select 1'",
    ],
)
def test_the_rule_on_internal_functions_catches_a_grant(db: psycopg.Connection[Any], granted: str) -> None:
    db.execute(granted)
    assert len(boundary.open_internals(db)) == 1


def test_a_role_with_every_pgmb_role_cannot_call_an_internal_function(cast: Cast) -> None:
    every = cast.acting(
        cast.role("every", "pgmb_publisher", "pgmb_consumer", "pgmb_admin", "pgmb_conditions")
    )
    for call in ("pgmb_internal.caller()", "pgmb_internal.release_due('main', now())"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="schema pgmb_internal"):
            every.execute(f"select {call}")
