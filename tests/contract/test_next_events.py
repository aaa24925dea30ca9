"""next_events: what a queue delivers next, in that order, at a bounded cost, and without leaving a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg import errors

from harness.states import add_dead, add_retries, kept_claims, retries_waiting, stop_vacuum

# Costs are measured: rows that other tests left would count.
pytestmark = pytest.mark.new_database

DB = psycopg.Connection[Any]


def one(db: DB, statement: str, *parameters: Any) -> Any:
    found = db.execute(statement.encode(), parameters).fetchone()
    assert found is not None
    return found[0] if len(found) == 1 else found


def publish(db: DB, topic: str = "t", count: int = 1, **given: Any) -> None:
    named = "".join(f", {name} => %s" for name in given)
    db.execute(
        f"select count(pgmb.publish(%s, json_build_object('n', n){named}))"
        " from generate_series(1, %s) n".encode(),
        (topic, *given.values(), count),
    )


def peek(db: DB, queue: str = "q", **asked: Any) -> dict[str, Any]:
    named = "".join(f", {name} => %s" for name in asked)
    found: dict[str, Any] = one(db, f"select pgmb.next_events(%s{named})", queue, *asked.values())
    return found


def shown(found: dict[str, Any]) -> list[tuple[int, int]]:
    return [(event["seq"], event["attempt"]) for event in found["events"]]


def receive(db: DB, queue: str = "q", max: int = 20) -> list[tuple[str, int, int]]:
    return db.execute("select lease::text, seq, attempt from pgmb.receive(%s, %s)", (queue, max)).fetchall()


def drain(db: DB, queue: str = "q") -> list[tuple[int, int]]:
    """All that a consumer gets, one event at a time."""
    got: list[tuple[int, int]] = []
    while rows := receive(db, queue, 1):
        got.append(rows[0][1:])
        db.execute("select pgmb.ack(%s)", rows[0][:1])
    return got


def plain(db: DB) -> None:
    db.execute("select pgmb.create_queue('q')")
    publish(db, count=5)


def in_the_middle_of_a_batch(db: DB) -> None:
    plain(db)
    receive(db, max=2)
    publish(db, count=3)


def by_patterns(db: DB) -> None:
    db.execute("select pgmb.create_queue('q', '{order.*}')")
    for topic in ("order.paid", "cart", "order.sent", "order", "order.paid"):
        publish(db, topic)


def by_a_filter(db: DB) -> None:
    db.execute("select pgmb.create_queue('q', filter => '$.payload.n > 3')")
    publish(db, count=6)


def by_a_costly_filter(db: DB) -> None:
    db.execute("select pgmb.create_queue('q', filter => '$.payload.s like_regex \"^a+$\"')")
    for text in ("a", "b", "aa"):
        db.execute("select pgmb.publish('t', json_build_object('s', %s::text))", (text,))


def retried(db: DB) -> None:
    plain(db)
    ((lease, *_), *_) = receive(db, max=2)
    db.execute("select pgmb.retry(%s, after => '0 s', error => 'broken')", (lease,))


def retried_in_another_order(db: DB) -> None:
    plain(db)
    for lease, *_ in reversed([*receive(db, max=1), *receive(db, max=1)]):
        db.execute("select pgmb.retry(%s, after => '0 s')", (lease,))


def retried_later(db: DB) -> None:
    plain(db)
    ((lease, *_), *_) = receive(db, max=2)
    db.execute("select pgmb.retry(%s, after => '1 hour')", (lease,))


def of_an_expired_lease(db: DB) -> None:
    plain(db)
    db.execute("select pgmb.receive('q', 2, '1 ms')")
    db.execute("select pg_sleep(0.1)")


def of_an_expired_lease_of_retries(db: DB) -> None:
    retried(db)
    db.execute("select pgmb.receive('q', 2, '1 ms')")
    db.execute("select pg_sleep(0.1)")


def of_a_lease_cut_short(db: DB) -> None:
    plain(db)
    ((lease, *_), *_) = receive(db, max=2)
    db.execute("select pgmb.extend(%s, '1 ms')", (lease,))
    db.execute("select pg_sleep(0.1)")


def dead_at_once(db: DB) -> None:
    db.execute("select pgmb.create_queue('q', max_attempts => 1)")
    publish(db, count=4)
    db.execute("select pgmb.receive('q', 2, '1 ms')")
    db.execute("select pg_sleep(0.1)")


def after_a_seek(db: DB) -> None:
    plain(db)
    receive(db)
    db.execute("select pgmb.seek('q', pgmb.earliest('main'))")


def after_a_purge(db: DB) -> None:
    plain(db)
    db.execute("select pgmb.purge('q')")
    publish(db, count=2)


def across_segments(db: DB) -> None:
    plain(db)
    for _ in range(2):
        db.execute("select pgmb.rotate()")
        publish(db, count=3)


def expired_and_young(db: DB) -> None:
    db.execute("select pgmb.create_queue('q', ttl => '1 minute')")
    publish(db, count=4)
    db.execute(
        "update pgmb.log_main set published_at = now() - interval '1 hour' where (payload ->> 'n')::int < 3"
    )


def too_long(db: DB) -> None:
    db.execute("select pgmb.create_queue('q', max_length => 5, when_full => 'drop_oldest')")
    publish(db, count=20)


KINDS = [
    plain,
    in_the_middle_of_a_batch,
    by_patterns,
    by_a_filter,
    by_a_costly_filter,
    retried,
    retried_in_another_order,
    retried_later,
    of_an_expired_lease,
    of_an_expired_lease_of_retries,
    of_a_lease_cut_short,
    dead_at_once,
    after_a_seek,
    after_a_purge,
    across_segments,
    expired_and_young,
    too_long,
]


@pytest.mark.parametrize("made", KINDS, ids=lambda made: made.__name__)
def test_it_shows_what_receive_delivers_in_that_order(db: DB, made: Callable[[DB], None]) -> None:
    db.execute("set statement_timeout = '5s'")
    made(db)
    found = peek(db)
    assert not found["more"]
    assert shown(found) == drain(db)
    assert found["events"]
    assert peek(db)["events"] == []


def test_what_a_paused_queue_shows_is_delivered_when_it_is_resumed(db: DB) -> None:
    plain(db)
    db.execute("select pgmb.pause('q')")
    found = peek(db)
    assert receive(db) == []
    db.execute("select pgmb.resume('q')")
    assert shown(found) == drain(db)


def test_a_late_commit_is_shown_where_it_is_delivered(db: DB, connect: Any) -> None:
    db.execute("select pgmb.create_queue('q')")
    late = connect(autocommit=False)
    late.execute("select pgmb.publish('late', '1')")
    publish(db, count=80)
    receive(db, max=80)
    assert peek(db)["events"] == []
    late.commit()
    publish(db)
    found = peek(db)
    assert [event["topic"] for event in found["events"]] == ["late", "t"]
    assert shown(found) == drain(db)


def test_the_most_urgent_lane_comes_first(db: DB) -> None:
    db.execute("select pgmb.create_queue('q', lanes => '{urgent}')")
    for topic in ("t", "urgent", "t", "urgent"):
        publish(db, topic)
    found = peek(db)
    assert [event["topic"] for event in found["events"]] == ["urgent", "urgent", "t", "t"]
    assert not found["more"]
    assert peek(db, max=2)["more"]
    # One receive in eight starts with the last lane.
    assert sorted(shown(found)) == sorted(drain(db))


@pytest.mark.parametrize("options", ["ordered => true", "fair_by => 'key'"])
def test_an_ordered_or_fair_queue_shows_all_that_waits(db: DB, options: str) -> None:
    db.execute(f"select pgmb.create_queue('q', {options})".encode())
    for key in ("a", "b", "c") * 3:
        publish(db, key=key, count=30 if key == "a" else 1)
    ((lease, *_), *_) = receive(db, max=3)
    found = peek(db, max=200)
    db.execute("select pgmb.release(%s)", (lease,))
    after = peek(db, max=200)
    assert len(after["events"]) == 96
    assert len(found["events"]) == one(db, "select pgmb.queue_depth('q')") - 3
    assert sorted(event["seq"] for event in after["events"]) == sorted(seq for seq, _ in drain(db))


def test_a_retry_says_when_it_was_due_and_why(db: DB) -> None:
    retried(db)
    first, _, fresh, *_ = peek(db)["events"]
    assert (first["attempt"], first["error"]) == (2, "broken")
    assert first["due_at"] is not None
    assert (fresh["attempt"], fresh["due_at"], fresh["error"]) == (1, None, None)


def test_the_beginning_of_a_payload_and_its_size(db: DB) -> None:
    db.execute("select pgmb.create_queue('q')")
    db.execute("select pgmb.publish('t', to_json(repeat('x', 5000)), key => 'k')")
    (event,) = peek(db)["events"]
    assert (event["payload"], event["bytes"]) == ('"' + "x" * 299, 5002)
    assert (event["topic"], event["key"]) == ("t", "k")
    assert event["id"] == str(one(db, "select id from pgmb.receive('q')"))


def test_it_stops_where_it_may_look_no_further_and_says_so(db: DB) -> None:
    db.execute("select pgmb.create_queue('q', '{rare}')")
    publish(db, "common", 300)
    publish(db, "rare")
    assert peek(db, look=100) == {"events": [], "looked": 100, "more": True}
    assert len(peek(db, look=400)["events"]) == 1
    publish(db, "rare", 4)
    found = peek(db, max=3)
    assert (len(found["events"]), found["more"]) == (3, True)


def test_it_takes_no_lease_no_lock_and_no_transaction_id(db: DB, connect: Any) -> None:
    of_an_expired_lease(db)
    before = kept_claims(db), retries_waiting(db)
    looking = connect(autocommit=False)
    assert len(peek(looking)["events"]) == 5
    assert one(looking, "select pg_current_xact_id_if_assigned()") is None
    held = looking.execute(
        "select l.locktype, l.mode from pg_locks l left join pg_class c on c.oid = l.relation"
        " where l.pid = pg_backend_pid() and l.locktype <> 'virtualxid'"
        # PostgreSQL reads a sequence under the lock of a nextval().
        " and not (l.mode = 'AccessShareLock' or c.relkind = 'S' and l.mode = 'RowExclusiveLock')"
    ).fetchall()
    assert held == []
    # A consumer does not wait for it.
    assert len(receive(db, max=2)) == 2
    looking.rollback()
    assert (kept_claims(db), retries_waiting(db)) == (before[0] + 1, before[1] + 2)


def test_it_works_in_a_read_only_transaction(db: DB) -> None:
    retried(db)
    with db.transaction():
        db.execute("set transaction read only")
        assert len(peek(db)["events"]) == 5


def test_a_filter_that_raises_is_named_and_pauses_nothing(db: DB) -> None:
    db.execute("set statement_timeout = '5s'")
    db.execute("select pgmb.create_queue('q', condition => '1 / (e.payload ->> ''n'')::int = 1')")
    db.execute("select pgmb.publish('t', '{\"n\": 0}')")
    with pytest.raises(errors.Error, match="the condition of queue 'q' failed: division by zero") as raised:
        peek(db)
    assert raised.value.sqlstate == "MB010"
    assert one(db, "select paused_at from pgmb.queue_status") is None
    db.execute("set statement_timeout = 0")
    with pytest.raises(errors.Error) as raised:
        peek(db)
    assert raised.value.sqlstate == "MB024"


@pytest.mark.parametrize("wrong", ["max => 0", "look => 0", "max => null"])
def test_bounds_must_be_positive(db: DB, wrong: str) -> None:
    plain(db)
    with pytest.raises(errors.Error) as raised:
        db.execute(f"select pgmb.next_events('q', {wrong})".encode())
    assert raised.value.sqlstate == "MB005"


def pages(db: DB, **asked: Any) -> int:
    return min(pages_once(db, **asked) for _ in range(4))


def pages_once(db: DB, **asked: Any) -> int:
    named = "".join(f", {name} => %s" for name in asked)
    plan = one(
        db,
        f"explain (analyze, buffers, timing off, format json) select pgmb.next_events('q'{named})",
        *asked.values(),
    )
    root = plan[0]["Plan"]
    return int(root["Shared Hit Blocks"]) + int(root["Shared Read Blocks"])


def a_backlog(db: DB) -> None:
    db.execute("select pgmb.publish_many('t', array_fill('1'::json, array[50000]))")


def due_retries(db: DB) -> None:
    add_retries(db, 20_000, due="0 s", step="-1 ms")


def dead_letters(db: DB) -> None:
    add_dead(db, 20_000)


@pytest.mark.parametrize("load", [a_backlog, due_retries, dead_letters], ids=lambda load: load.__name__)
def test_its_cost_does_not_grow_with_what_waits(db: DB, load: Callable[[DB], None]) -> None:
    stop_vacuum(db)
    db.execute("select pgmb.create_queue('q')")
    publish(db, count=100)
    before = pages(db)
    load(db)
    after = pages(db)
    assert after <= before + 25, f"{before} pages before, {after} after"


def test_its_cost_does_not_grow_with_what_does_not_match(db: DB) -> None:
    db.execute("select pgmb.create_queue('q', '{rare}')")
    a_backlog(db)
    before = pages(db, look=2000)
    a_backlog(db)
    after = pages(db, look=2000)
    assert after <= before + 25, f"{before} pages before, {after} after"
