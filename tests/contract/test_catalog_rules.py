"""The rules of ADR 27 and ADR 28, over every table, function and role of an installation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


MUTATIONS: dict[Callable[[psycopg.Connection[Any]], list[str]], list[str]] = {
    rules.lesser_owners: [
        "alter function pgmb.tick owner to pgmb_matcher",
        "alter function pgmb_parser.parse security invoker",
        "grant create on schema pgmb to pgmb_admin",
        "alter schema pgmb_condition owner to pgmb_matcher",
        "alter table pgmb.binding owner to pgmb_admin",
    ],
    rules.unchecked_calls: [
        (
            "create function pgmb.added() returns void language plpgsql as"
            " $$begin execute 'select pgmb_parser.parse($1)' using 'true'; end$$"
        )
    ],
    rules.loose_definers: [
        "alter function pgmb.receive reset search_path",
        "alter function pgmb.ack(uuid, bigint[]) set search_path = pg_temp, pg_catalog",
        "create function pgmb.added() returns void language sql security definer as ''",
    ],
    rules.unqualified_names: [
        (
            "create function pgmb.added() returns bigint language plpgsql as"
            " $$begin return (select count(*) from queue); end$$"
        ),
        (
            "create function pgmb.added() returns void language plpgsql as"
            " $$begin execute format('delete from claim where id = %s', 1); end$$"
        ),
        "create function pgmb.added() returns text language sql as $$select 'x'::event$$",
        "create function pgmb.added() returns void language sql as $$update retry set id = 1$$",
    ],
    rules.trusting_the_session: [
        "create function pgmb.added() returns boolean language sql as $$select session_user = 'postgres'$$",
        "create function pgmb.added() returns text language sql as $$select current_setting('role')$$",
    ],
    rules.admin_calls_for_others: [
        "grant execute on function pgmb.maintain to pgmb_consumer",
        "grant execute on function pgmb.create_api_key to public",
    ],
    rules.untimed: [
        (
            "create function pgmb.added() returns text language sql security definer as"
            " $$select pgmb_internal.asking(q) from pgmb.queue q$$"
        ),
    ],
}


def test_every_other_rule_holds(installed: psycopg.Connection[Any]) -> None:
    """Nothing is owned by a lesser role, found by search path, decided by the session, or run without end."""
    assert {rule.__name__: rule(installed) for rule in MUTATIONS} == {rule.__name__: [] for rule in MUTATIONS}


@pytest.mark.parametrize("rule", MUTATIONS, ids=lambda rule: rule.__name__)
def test_each_rule_catches_a_violation(
    installed: psycopg.Connection[Any], rule: Callable[[psycopg.Connection[Any]], list[str]]
) -> None:
    installed.execute("set check_function_bodies = off")
    for mutation in MUTATIONS[rule]:
        with installed.transaction(force_rollback=True):
            installed.execute(mutation)
            assert len(rule(installed)) == 1, mutation


def test_no_table_keeps_the_number_of_a_dropped_queue(installed: psycopg.Connection[Any]) -> None:
    assert rules.uncleared_queue_numbers(installed) == []
    installed.execute("create table pgmb.careless (queue integer not null)")
    assert rules.uncleared_queue_numbers(installed) == ["pgmb.careless"]


BOUNDED_ELSEWHERE = {
    # Given by administrators, dispatchers and programs of the lake, who are administrators too.
    *("access_token", "api_key", "archived", "attempt", "audit", "dead_batch", "dispatcher", "endpoint"),
    *(
        "endpoint_activity",
        "endpoint_secret",
        "erasure",
        "erasure_stream",
        "erasure_table",
        "lake",
        "lake_field",
    ),
    *(
        "lake_field",
        "lake_projection",
        "lake_replay",
        "leader",
        "maintenance_failure",
        "owner",
        "schedule",
        "delivery",
    ),
    # Made by pgmb itself of numbers, times and digests.
    *("claim", "clock", "installation", "lock_secret", "segment"),
    # Definitions of queues are an administrator's; declare_queue bounds its own.
    *("queue", "binding"),
    # Copies of an event of the log, whose domains bound it; errors are cut when they are written.
    *("retry", "dead"),
    # The name of a stream that exists.
    *("dedup", "delayed"),
    # Compiled from filters and conditions, whose length and depth are bounded.
    *("condition", "shape"),
    "subscription.digest",
}
"""Tables, or single columns, whose texts are bounded where they are written."""


def test_what_a_lesser_role_gives_is_bounded(installed: psycopg.Connection[Any]) -> None:
    def unexplained() -> list[str]:
        return [
            column
            for column in rules.unbounded_columns(installed)
            if column not in BOUNDED_ELSEWHERE and column.partition(".")[0] not in BOUNDED_ELSEWHERE
        ]

    assert unexplained() == []
    installed.execute("create table pgmb.careless (note text, code text check (length(code) < 9))")
    assert unexplained() == ["careless.note"]
    installed.execute("drop table pgmb.careless")


def test_long_texts_of_lesser_roles_are_refused_or_cut(installed: psycopg.Connection[Any]) -> None:
    long = "x" * 100_000
    for call in (
        "pgmb.pause('q', %s)",
        "pgmb.confirm('main', %s, pgmb.position('main'))",
        "pgmb.subscribe('g', '{t}', params => jsonb_build_object('a', %s::text))",
        "pgmb.subscribe('g', array[%s])",
        "pgmb.claim_stage('main', %s)",
    ):
        with pytest.raises(psycopg.Error):
            installed.execute(f"select {call}".encode(), [long])
    installed.execute("select pgmb.publish('t', '1', stream => 'orders')")
    installed.execute("select pgmb.bury((select lease from pgmb.receive('q')), error => %s)", [long])
    dead = installed.execute("select error from pgmb.dead_letters('q')").fetchall()
    assert [len(error) for (error,) in dead] == [10_000]
