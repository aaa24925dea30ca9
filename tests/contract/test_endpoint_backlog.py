"""An endpoint waits for what a count finds, and gets nothing from before its creation."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from tests.contract.endpoints import claim, create, dead, publish, receive, settle, value, waiting

COUNTS = "select name, waiting from pgmb.endpoints order by name"


def test_events_that_a_shared_queue_holds_wait_for_their_endpoints(db: psycopg.Connection[Any]) -> None:
    create(db, "all")
    create(db, "half", filter="$.payload == 1")
    create(db, "other", "{other}")
    create(db, "topics", "{t}", filter="$.payload > 0")
    db.execute("select pgmb.publish('t', to_json(n % 2)) from generate_series(1, 400) n")
    db.execute("select pgmb.publish('other', '7') from generate_series(1, 30)")
    expected = {"all": 430, "half": 200, "other": 30, "topics": 200}
    assert dict(db.execute(COUNTS).fetchall()) == expected
    found = db.execute(
        "select endpoint, waiting, oldest_age is not null from pgmb.endpoint_backlogs()"
    ).fetchall()
    assert {name: count for name, count, _ in found} == expected
    assert all(aged for *_, aged in found)
    got = receive(db, max=500)
    rows = [(seq, endpoint) for _, seq, _, _, endpoints in got.rows for endpoint in endpoints]
    settle(db, got.lease, None, [(seq, endpoint, "1 h", "no", True, False) for seq, endpoint in rows])
    assert dict(db.execute(COUNTS).fetchall()) == expected


def test_a_long_backlog_of_a_shared_queue_is_counted_up_to_a_bound(db: psycopg.Connection[Any]) -> None:
    create(db, "all")
    db.execute("select pgmb.publish_many('t', array(select to_json(n) from generate_series(1, 10050) n))")
    assert db.execute("select waiting, at_least from pgmb.endpoints").fetchall() == [(10000, ["waiting"])]


def test_a_statement_counts_shared_queues_for_a_second(db: psycopg.Connection[Any]) -> None:
    """Thousands of endpoints would each look at the same events, and a scrape of metrics would time out."""
    hook, own = create(db, "hook"), create(db, "own", batch=5)
    publish(db, 1, 2)
    asked = (
        "with slept as materialized (select pg_sleep(%s))"
        " select b.waiting, b.at_least from slept, lateral pgmb.endpoint_backlog(%s) b"
    )
    assert db.execute(asked, [0, hook]).fetchall() == [(2, [])]
    assert db.execute(asked, [1.1, hook]).fetchall() == [(0, ["waiting"])]
    assert db.execute(asked, [1.1, own]).fetchall() == [(2, [])]
    settle(db, receive(db).lease)
    assert db.execute(asked, [1.1, hook]).fetchall() == [(0, [])]


def test_a_new_endpoint_gets_nothing_from_before_its_creation(db: psycopg.Connection[Any]) -> None:
    old = create(db, "old")
    publish(db, 1, 2)
    new = create(db, "new")
    publish(db, 3)
    assert dict(db.execute(COUNTS).fetchall()) == {"new": 1, "old": 3}
    assert receive(db).meant == {1: {old}, 2: {old}, 3: {old, new}}
    assert value(db, "select pgmb.replay('new', '-infinity')") == 3, "a replay sends them"


def test_an_endpoint_that_is_created_again_keeps_what_waits(db: psycopg.Connection[Any]) -> None:
    made = create(db, "hook")
    publish(db, 1)
    create(db, "hook", rps=5)
    assert receive(db).meant == {1: {made}}


def test_rates_count_events_that_endpoints_get(db: psycopg.Connection[Any]) -> None:
    create(db, "hook", "{wanted}")
    publish(db, *range(30), topic="other")
    publish(db, *range(3), topic="wanted")
    publish(db, *range(30), topic="other")
    while got := receive(db, max=10):
        settle(db, got.lease)
    rate = "select round(received_per_second * 10) from pgmb.describe_queues() where queue = 'webhooks'"
    assert value(db, rate) == 3


@pytest.mark.parametrize("attempts", [0, 2])
def test_deliveries_of_a_disabled_endpoint_become_dead_letters(
    db: psycopg.Connection[Any], attempts: int
) -> None:
    hook, other = create(db, "hook"), create(db, "other")
    publish(db, 1, 2)
    got = receive(db)
    tried = attempts > 0
    error = "status 500" if tried else None
    failures = [(seq, one, "1 h", error, tried, False) for seq in got.seqs(1, 2) for one in (hook, other)]
    settle(db, got.lease, None, failures)
    db.execute("select pgmb.set_endpoint_state('hook', 'disabled')")
    db.execute("select pgmb.maintain()")
    assert len(waiting(db)) == 4, "it may have been disabled by mistake"
    db.execute("update pgmb.endpoint set changed_at = changed_at - interval '61 s' where name = 'hook'")
    db.execute("select pgmb.maintain()")
    assert {row[0] for row in waiting(db)} == {other}
    said = "the endpoint is disabled" + ("; before: status 500" if tried else "")
    assert [(row[0], row[1], row[3]) for row in dead(db)] == [(hook, 1, said), (hook, 2, said)]
    db.execute("select pgmb.set_endpoint_state('hook', 'active')")
    assert value(db, "select pgmb.redrive_failed('hook')") == 2
    assert sorted(claim(db)) == [1, 2]
