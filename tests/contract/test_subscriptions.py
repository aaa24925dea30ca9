"""Subscriptions of a group: matched together, told apart, and no trouble to each other."""

from __future__ import annotations

import json
import threading
import time
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg.types.json import Jsonb

from harness.states import leases_in_flight, retries_waiting
from tests.conftest import Connect

NUMBER = "(e.payload->>'n')::int = (s.params->>'n')::int"


@pytest.fixture
def db(db: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    db.execute("set statement_timeout = '60s'")
    db.execute("select pgmb.create_queue('g')")
    return db


def subscribe(db: psycopg.Connection[Any], group: str = "g", **asked: Any) -> UUID:
    given = {name: Jsonb(value) if name in ("equals", "params") else value for name, value in asked.items()}
    arguments = "".join(f", {name} => %({name})s" for name in given)
    row = db.execute(f"select pgmb.subscribe(%(group)s{arguments})", {"group": group, **given}).fetchone()
    assert row is not None
    assert isinstance(row[0], UUID)
    return row[0]


def publish(db: psycopg.Connection[Any], *payloads: Any, topic: str = "t") -> None:
    for payload in payloads:
        db.execute("select pgmb.publish(%s, %s::json)", [topic, json.dumps(payload)])


def received(db: psycopg.Connection[Any], group: str = "g", max: int = 1000) -> list[tuple[Any, set[UUID]]]:
    rows = db.execute(
        "select payload, subscriptions from pgmb.receive_group(%s, %s)", [group, max]
    ).fetchall()
    return [(payload, set(ids)) for payload, ids in rows]


def paused(db: psycopg.Connection[Any]) -> dict[UUID, str]:
    return dict(
        db.execute("select id, paused_reason from pgmb.subscription where paused_at is not null").fetchall()
    )


# Identity.


def test_equal_ones_are_one_and_others_are_not(db: psycopg.Connection[Any]) -> None:
    one = subscribe(db, filter="$.payload.n == $n", params={"n": 1, "m": 2})
    assert subscribe(db, filter="$.payload.n==$n", params={"m": 2, "n": 1}) == one, "as the server reads them"
    others = [
        subscribe(db, filter="$.payload.n == $n", params={"n": 2, "m": 2}),
        subscribe(db, filter="$.payload.n == $n", params={"n": 1}),
        subscribe(db, filter="$.payload.n == $n", params={"n": "1", "m": 2}),
        # A condition can tell these apart: s.params->>'n'.
        subscribe(db, filter="$.payload.n == $n", params={"n": 1.0, "m": 2}),
        subscribe(db, "h", filter="$.payload.n == $n", params={"n": 1, "m": 2}),
        subscribe(db, patterns=["t"], filter="$.payload.n == $n", params={"n": 1, "m": 2}),
        subscribe(db, filter="$.payload.n > $n", params={"n": 1, "m": 2}),
        subscribe(db, equals={"payload": {"n": 1}}),
        subscribe(db, equals={"payload": {"n": 2}}),
        subscribe(db, equals={"headers": {"n": 1}}),
        subscribe(db, equals={"payload": {"n": "1"}}),
        subscribe(db),
        subscribe(db, condition="e.seq > 0"),
        subscribe(db, condition="e.seq > 0", params={"a": None}),
    ]
    assert len({one, *others}) == len(others) + 1
    assert subscribe(db, condition="(e.seq   >  0) -- all") == others[-2]
    db.execute("select pgmb.create_stream('other')")
    assert subscribe(db, stream="other") not in others


@pytest.mark.slow
def test_identity_is_the_full_value(db: psycopg.Connection[Any]) -> None:
    """What a 32-bit hash confuses 13 times in 200,000 is told apart by 256 bits of all that was asked."""
    made = db.execute(
        "select count(distinct pgmb.subscribe('many', params => jsonb_build_object('tenant', n)))"
        " from generate_series(1, 1000) n"
    ).fetchall()
    assert made == [(1000,)]
    assert db.execute("select count(*), count(distinct shape) from pgmb.subscription").fetchall() == [
        (1000, 1)
    ]
    assert db.execute("select distinct octet_length(digest) from pgmb.subscription").fetchall() == [(32,)]
    # A collision of 32-bit hashes: both are there.
    pair = db.execute(
        "select array_agg(n) from generate_series(1, 300000) n"
        " group by hashtext('tenant ' || n) having count(*) > 1 limit 1"
    ).fetchone()
    assert pair is not None
    ids = {subscribe(db, params={"tenant": f"tenant {n}"}) for n in pair[0]}
    assert len(ids) == len(pair[0])


def test_many_subscribe_to_the_same_at_once(db: psycopg.Connection[Any], connect: Connect) -> None:
    found: list[list[UUID]] = []
    ready = threading.Barrier(5)

    def run(conn: psycopg.Connection[Any]) -> None:
        ready.wait(60)
        found.append([subscribe(conn, equals={"payload": {"n": n}}) for n in range(20)])

    threads = [threading.Thread(target=run, args=(connect(),)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 5
    assert all(ids == found[0] for ids in found)


# Matching.


def test_one_read_gives_events_with_all_that_match(db: psycopg.Connection[Any]) -> None:
    every = subscribe(db)
    topic = subscribe(db, patterns=["order.*"])
    field = subscribe(db, equals={"payload": {"room": 1}})
    other = subscribe(db, equals={"payload": {"room": 2}})
    path = subscribe(db, filter="$.payload.room > $n", params={"n": 1})
    indexed = subscribe(
        db, condition="s.params @> jsonb_build_object('room', e.payload->'room')", params={"room": 1}
    )
    plain = subscribe(db, condition=NUMBER, params={"n": 5})
    publish(db, {"room": 1}, topic="order.made")
    publish(db, {"room": 2, "n": 5}, {"n": 6})
    assert received(db) == [
        ({"room": 1}, {every, topic, field, indexed}),
        ({"room": 2, "n": 5}, {every, other, path, plain}),
        ({"n": 6}, {every}),
    ]
    assert paused(db) == {}


def test_of_other_groups_and_streams_it_tells_nothing(db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.create_stream('other')")
    db.execute("select pgmb.create_queue('h')")
    mine = subscribe(db, params={"a": 1})
    theirs = subscribe(db, "h", params={"a": 1})
    subscribe(db, stream="other", params={"a": 1})
    publish(db, 1)
    assert received(db) == [(1, {mine})]
    assert received(db, "h") == [(1, {theirs})]


def test_what_others_ask_for_is_no_trouble(db: psycopg.Connection[Any]) -> None:
    """The index finds subscriptions of other shapes, groups and streams: their params are not looked at."""
    condition = (
        "s.params @> jsonb_build_object('room', e.payload->'room') and jsonb_path_match(s.params, '$.on')"
    )
    mine = subscribe(db, condition=condition, params={"room": 1, "on": True})
    subscribe(db, "h", condition=condition, params={"room": 1, "on": "neither"})
    subscribe(db, condition="s.params @> '{}' and e.seq > 0", params={"room": 1, "on": "nor"})
    stopped = subscribe(db, condition=condition, params={"room": 1, "on": "stopped"})
    db.execute("update pgmb.subscription set paused_at = now() where id = %s", [stopped])
    publish(db, {"room": 1})
    ((_, found),) = received(db)
    assert mine in found
    assert set(paused(db)) == {stopped}


def test_a_condition_on_the_whole_event_sees_it(db: psycopg.Connection[Any]) -> None:
    found = {
        subscribe(db, condition='e.event @> \'{"payload": {"n": 1}, "topic": "t"}\''),
        subscribe(db, condition="to_jsonb(e)->'event'->'payload'->>'n' = '1'"),
        subscribe(db, condition="e.id is not null and e.published_at <= now() and e.metadata is null"),
    }
    publish(db, {"n": 1})
    assert received(db) == [({"n": 1}, found)]


@pytest.mark.new_database
@pytest.mark.parametrize("count", [1_000])
def test_many_params_of_one_condition_are_found_by_the_index(
    db: psycopg.Connection[Any], connect: Connect, count: int
) -> None:
    """On tables that were never analyzed, too: pages are counted, not seconds."""
    db.execute("alter table pgmb.subscription set (autovacuum_enabled = off)")
    db.execute(
        "select count(pgmb.subscribe('g', params => jsonb_build_object('room', n),"
        " condition => 's.params @> jsonb_build_object(''room'', e.payload -> ''room'')'))"
        " from generate_series(1, %s) n",
        [count],
    )
    db.execute(
        "select count(pgmb.subscribe('f', equals => format('{\"payload\": {\"room\": %%s}}', n)::jsonb))"
        " from generate_series(1, %s) n",
        [count],
    )
    db.execute("select pgmb.create_queue('f')")
    publish(db, *({"room": n} for n in range(1, 51)))
    for group in ("g", "f"):
        reader = connect()
        reader.execute("set statement_timeout = '60s'")
        plan = reader.execute(
            "explain (analyze, buffers, format json) select * from pgmb.receive_group(%s, 1000)", [group]
        ).fetchone()
        assert plan is not None
        node = plan[0][0]["Plan"]
        touched = node["Shared Hit Blocks"] + node["Shared Read Blocks"]
        assert node["Actual Rows"] == 50
        # One look at every subscription for each of the 50 events would be 50 times their table.
        pages = reader.execute(
            "select pg_relation_size('pgmb.subscription') / current_setting('block_size')::int"
        ).fetchone()
        assert pages is not None
        assert touched < 20_000, (group, touched, pages)


# Trouble.


def test_one_with_bad_params_among_many_stands_alone(db: psycopg.Connection[Any]) -> None:
    good = [subscribe(db, condition=NUMBER, params={"n": n % 10, "of": n}) for n in range(500)]
    bad = [subscribe(db, condition=NUMBER, params={"n": "x", "of": n}) for n in range(3)]
    publish(db, {"n": 1})
    ((_, found),) = received(db)
    assert found == {one for n, one in enumerate(good) if n % 10 == 1}
    assert set(paused(db)) == set(bad)
    assert all("invalid input syntax for type integer" in why for why in paused(db).values())
    publish(db, {"n": 2})
    assert len(received(db)[0][1]) == 50
    assert db.execute("select pgmb.resume_subscriptions('g', %s)", [bad[0]]).fetchall() == [(1,)]
    assert set(paused(db)) == set(bad[1:])
    assert db.execute("select pgmb.resume_subscriptions('g')").fetchall() == [(2,)]
    assert subscribe(db, condition=NUMBER, params={"n": "x", "of": 0}) == bad[0]


def test_an_event_that_breaks_a_condition_pauses_those_who_ask_it_and_nobody_else(
    db: psycopg.Connection[Any],
) -> None:
    asking = {subscribe(db, condition=NUMBER, params={"n": n}) for n in range(60)}
    others = {
        subscribe(db),
        subscribe(db, condition="e.payload->>'n' = s.params->>'n'", params={"n": "abc"}),
        subscribe(db, equals={"payload": {"n": "abc"}}),
    }
    # The same behind a pattern that the event does not match is not asked.
    subscribe(db, patterns=["other"], condition=NUMBER, params={"n": 1})
    elsewhere = subscribe(db, "h", condition=NUMBER, params={"n": 1})
    publish(db, {"n": 1}, {"n": "abc"})
    got = received(db)
    assert [payload for payload, _ in got] == [{"n": 1}, {"n": "abc"}]
    assert got[1][1] == others
    assert set(paused(db)) == asking
    assert elsewhere not in paused(db)
    publish(db, {"n": 3})
    assert all(not ids & asking for _, ids in received(db))


def test_a_filter_that_raises_pauses_its_own(db: psycopg.Connection[Any]) -> None:
    at = "$.payload.at.datetime() < $at.datetime()"
    good = subscribe(db, filter=at, params={"at": "2020-01-01"})
    bad = subscribe(db, filter=at, params={"at": "2020-01-01T00:00:00+00:00"})
    publish(db, {"at": "2019-01-01"})
    assert received(db) == [({"at": "2019-01-01"}, {good})]
    assert set(paused(db)) == {bad}


def test_one_that_takes_too_long_is_paused_and_the_others_are_not(db: psycopg.Connection[Any]) -> None:
    slow = "factorial((s.params->>'n')::bigint) > 0 and " * 40 + "true"
    late = subscribe(db, condition=slow, params={"n": 32_000})
    others = {subscribe(db, condition=f"e.seq > 0 and {n} = {n}") for n in range(5)} | {subscribe(db)}
    publish(db, 1)
    db.execute("set statement_timeout = '2s'")
    assert received(db) == [(1, others)]
    assert paused(db) == {late: "took longer than 2s"}
    publish(db, 2)
    assert received(db) == [(2, others)]


def test_a_condition_that_the_server_cannot_serve_pauses_its_own(db: psycopg.Connection[Any]) -> None:
    """An allocation that is refused counts as the server's trouble elsewhere: here it is the condition's."""
    half = "repeat(repeat(e.topic, 1000000), 540)"
    huge = subscribe(db, condition=f"length({half} || {half}) > 0")
    other = subscribe(db)
    publish(db, 1)
    assert received(db) == [(1, {other})]
    assert set(paused(db)) == {huge}


# Life.


def test_they_expire_unless_kept(db: psycopg.Connection[Any]) -> None:
    for_ever = subscribe(db)
    kept = subscribe(db, params={"a": 1}, expires_after="1 hour")
    again = subscribe(db, params={"a": 2}, expires_after="1 hour")
    gone = subscribe(db, params={"a": 3}, expires_after="1 hour")
    db.execute(
        "update pgmb.subscription set active_at = now() - interval '2 hours',"
        " expires_at = now() - interval '2 hours' + expires_after"
    )
    assert db.execute("select * from pgmb.keep_subscriptions(%s)", [[kept, for_ever]]).fetchall() != []
    assert subscribe(db, params={"a": 2}, expires_after="1 hour") == again
    db.execute("select pgmb.maintain()")
    left = {row[0] for row in db.execute("select id from pgmb.subscription")}
    assert left == {for_ever, kept, again}
    assert db.execute("select * from pgmb.keep_subscriptions(%s)", [[gone, kept]]).fetchall() == [(kept,)]
    assert subscribe(db, params={"a": 3}, expires_after="1 hour") != gone
    with pytest.raises(psycopg.errors.CheckViolation):
        subscribe(db, params={"a": 4}, expires_after="0 s")


def test_keeping_writes_little(db: psycopg.Connection[Any]) -> None:
    kept = subscribe(db, expires_after="1 hour")
    db.execute("begin")
    db.execute("select * from pgmb.keep_subscriptions(%s)", [[kept]])
    assert db.execute("select pg_current_xact_id_if_assigned()").fetchall() == [(None,)]
    db.execute("commit")


def test_an_unsubscribed_one_matches_nothing_more(db: psycopg.Connection[Any], connect: Connect) -> None:
    left, stays = subscribe(db, params={"a": 1}), subscribe(db)
    publish(db, 1)
    reading = connect(autocommit=False)
    reading.execute("set statement_timeout = '60s'")
    got = reading.execute("select lease, subscriptions from pgmb.receive_group('g')").fetchall()
    assert set(got[0][1]) == {left, stays}
    assert db.execute("select pgmb.unsubscribe(%s)", [left]).fetchall() == [(True,)]
    assert db.execute("select pgmb.unsubscribe(%s)", [left]).fetchall() == [(False,)]
    reading.execute("select pgmb.retry(%s, after => '0 s')", [got[0][0]])
    reading.commit()
    assert received(db) == [(1, {stays})]


# Reading.


def test_events_that_nobody_asks_for_are_settled(db: psycopg.Connection[Any]) -> None:
    subscribe(db, filter="$.payload == 3")
    publish(db, *range(10))
    rows = db.execute("select lease, payload from pgmb.receive_group('g')").fetchall()
    assert [row[1] for row in rows] == [3]
    assert db.execute("select pgmb.ack(%s)", [rows[0][0]]).fetchall() == [(1,)]
    publish(db, *range(4, 8))
    assert received(db) == []
    assert leases_in_flight(db) == 0


@pytest.mark.parametrize("statement_timeout", [60.0, 0.4])
def test_a_receive_passes_events_that_nobody_asks_for_until_its_deadline(
    db: psycopg.Connection[Any], statement_timeout: float
) -> None:
    """A consumer that gets nothing waits: so a call gets nothing only at its deadline."""
    subscribe(db, filter="$.payload == 0")
    db.execute("select pgmb.publish('t', to_json(n)) from generate_series(1, 2000) n")
    publish(db, 0)
    db.execute("select set_config('statement_timeout', %s, false)", [f"{statement_timeout * 1000:.0f}ms"])
    for _ in range(300):
        began = time.monotonic()
        if rows := received(db, max=10):
            break
        assert time.monotonic() - began >= min(0.5, statement_timeout / 4)
    assert [payload for payload, _ in rows] == [0]


@pytest.mark.parametrize("how", ["expire", "retry", "bury", "release"])
@pytest.mark.parametrize("settings", ["", ", ttl => '1 hour'", ", ordered => true", ", max_in_flight => 100"])
def test_only_what_matched_comes_again_or_is_buried(
    db: psycopg.Connection[Any], how: str, settings: str
) -> None:
    db.execute("select pgmb.drop_queue('g')")
    db.execute(f"select pgmb.create_queue('g', max_attempts => 3{settings})")
    wanted = subscribe(db, filter="$.payload > 7")
    publish(db, *range(10))
    rows = db.execute(
        "select lease, payload from pgmb.receive_group('g', lease_for => %s)",
        ["1 ms" if how == "expire" else "1 min"],
    ).fetchall()
    assert {row[1] for row in rows} <= {8, 9}
    leases = {row[0] for row in rows}
    while len(rows) < 2:
        more = db.execute(
            "select lease, payload from pgmb.receive_group('g', lease_for => '1 ms')"
        ).fetchall()
        rows += more
        leases |= {row[0] for row in more}
    if how != "expire":
        after = {"retry": "retry(%s, after => '0 s')", "bury": "bury(%s)", "release": "release(%s)"}[how]
        assert sum(db.execute(f"select pgmb.{after}", [lease]).fetchall()[0][0] for lease in leases) == 2
    if how == "bury":
        assert sorted(row[0] for row in db.execute("select payload from pgmb.dead")) == [8, 9]
        assert received(db) == []
        return
    got: list[Any] = []
    while len(got) < 2:
        again = db.execute("select lease, payload, subscriptions from pgmb.receive_group('g')").fetchall()
        assert all(row[2] == [wanted] for row in again)
        got += [row[1] for row in again]
        for lease in {row[0] for row in again}:
            db.execute("select pgmb.ack(%s)", [lease])
    assert sorted(got) == [8, 9]
    assert retries_waiting(db) == 0
    # An ordered queue is read by shards, in any order: some may hold what nobody asked for still.
    for _ in range(50):
        if db.execute("select pgmb.queue_depth('g')").fetchall() == [(0,)]:
            return
        assert received(db) == []
    raise AssertionError("something waits that nobody will ever get")


def test_the_unmatched_of_a_retried_lease_are_settled_too(db: psycopg.Connection[Any]) -> None:
    one = subscribe(db, filter="$.payload >= 0")
    two = subscribe(db, filter="$.payload == 3")
    publish(db, *range(5))
    (lease,) = {row[0] for row in db.execute("select lease from pgmb.receive_group('g')")}
    db.execute("select pgmb.retry(%s, after => '0 s')", [lease])
    db.execute("select pgmb.unsubscribe(%s)", [one])
    rows = db.execute("select lease, payload, subscriptions from pgmb.receive_group('g')").fetchall()
    assert [(row[1], row[2]) for row in rows] == [(3, [two])]
    assert retries_waiting(db) == 1
    assert db.execute("select pgmb.ack(%s)", [rows[0][0]]).fetchall() == [(1,)]


@pytest.mark.parametrize("page", [1, 3, 1000])
def test_pages_between_positions_give_every_event_once(db: psycopg.Connection[Any], page: int) -> None:
    wanted = subscribe(db, filter="$.payload > 4")
    (before,) = db.execute("select pgmb.position()").fetchone() or (None,)
    publish(db, *range(10))
    (after,) = db.execute("select pgmb.position()").fetchone() or (None,)
    place, looked, got = 0, 0, []
    while True:
        rows = db.execute(
            "select seq, payload, subscriptions from pgmb.between_group('g', 'main', %s::pgmb.position,"
            " %s::pgmb.position, %s, %s)",
            [before, after, place, page],
        ).fetchall()
        if not rows:
            break
        looked += 1
        place = rows[-1][0]
        got += [row[1] for row in rows if row[2]]
        assert all(row[2] in ([], [wanted]) for row in rows)
        assert all(row[2] for row in rows[:-1])
    assert got == [5, 6, 7, 8, 9]
    assert looked == -(-10 // page)
