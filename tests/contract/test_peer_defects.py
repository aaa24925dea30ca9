"""What peers get wrong (shared notes, peers.md) and we promise: one section a defect, by its number there.

1, 2 and 3 are in test_crash.py and test_clock.py, 5 in test_privileges.py and unit/test_catalog.py, 7 in
test_maintenance_waits.py, 15 in test_pooler.py, 16 in test_claim_cost.py, 22 in test_workers.py and beside
it, 24 in test_standby.py.
"""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from harness.sessions import Sessions
from harness.states import kept_of_queues, sweep_at_once

Connection = psycopg.Connection[Any]


def rows(db: Connection, statement: str, *parameters: Any) -> list[Any]:
    return db.execute(statement, parameters).fetchall()


def value(db: Connection, statement: str, *parameters: Any) -> Any:
    ((only,),) = rows(db, statement, *parameters)
    return only


def publish(db: Connection, *numbers: int, topic: str = "t") -> None:
    for number in numbers:
        db.execute("select pgmb.publish(%s, to_json(%s::int))", [topic, number])


def payloads(db: Connection, queue: str = "q", size: int = 100) -> list[Any]:
    return [row[0] for row in rows(db, "select payload from pgmb.receive(%s, %s)", queue, size)]


# 6: publishing never depends on a daemon; delays of any length -------------------------------------------


def test_publishing_goes_on_though_maintenance_never_ran(db: Connection) -> None:
    """The schema looks as if it had been installed years ago and nobody had ticked, rotated or sealed
    since."""
    db.execute("update pgmb.stream set created_at = now() - interval '3 years'")
    db.execute("update pgmb.segment set attached_at = now() - interval '3 years'")
    db.execute("select pgmb.create_queue('q')")
    for round_number in range(5):
        db.execute("select pgmb.publish_many('t', array_fill('1'::json, array[500]))")
        with db.cursor().copy("copy pgmb.log_main (topic, payload) from stdin") as copy:
            for _ in range(500):
                copy.write_row(("t", "2"))
        lease = rows(db, "select lease from pgmb.receive('q', 1000)")
        assert len(lease) == 1000, round_number
        assert value(db, "select pgmb.ack(%s)", lease[0][0]) == 1000


@pytest.mark.parametrize("delay", ["1 microsecond", "4 hours", "10 years", "5000 years"])
def test_a_delay_may_be_of_any_length(db: Connection, delay: str) -> None:
    db.execute("select pgmb.create_queue('q')")
    given = value(db, "select pgmb.publish('t', '1', 'k', '{\"h\": 1}', delay => %s)", delay)
    if delay.endswith("microsecond"):
        db.execute("select pgmb.tick()")
    else:
        assert payloads(db) == []
        db.execute("update pgmb.delayed set due_at = now() - interval '1 ms'")
        db.execute("select pgmb.tick()")
    assert rows(db, "select id, payload, key, headers from pgmb.receive('q')") == [(given, 1, "k", {"h": 1})]
    assert payloads(db) == []


def test_an_event_delayed_for_ever_can_be_cancelled(db: Connection) -> None:
    given = value(db, "select pgmb.publish('t', '1', at => 'infinity')")
    assert value(db, "select pgmb.cancel(%s)", given) is True
    assert value(db, "select pgmb.cancel(%s)", given) is False


def test_events_due_are_delivered_without_a_daemon_and_in_due_order(db: Connection) -> None:
    db.execute("select pgmb.create_queue('q')")
    for number, due in ((1, "3 s"), (2, "1 s"), (3, "2 s")):
        db.execute("select pgmb.publish('t', to_json(%s::int), at => now() + %s::interval)", [number, due])
    db.execute("update pgmb.delayed set due_at = due_at - interval '1 hour'")
    sweep_at_once(db)
    assert payloads(db) == [], "receive itself moves what is due; it is delivered after the commit"
    assert payloads(db) == [2, 3, 1]


# 8: identity is the full value ----------------------------------------------------------------------------


def test_values_that_collide_under_a_32_bit_hash_stay_distinct(db: Connection) -> None:
    """hashtext() has collisions among a few hundred thousand strings; each pair must be two things."""
    pairs = rows(
        db,
        "with named as (select 'tenant-' || g as name, hashtext('tenant-' || g) as hash"
        "  from generate_series(1, 300000) g)"
        " select min(name), max(name) from named group by hash having count(*) > 1 limit 5",
    )
    assert len(pairs) == 5, "there are about ten such pairs"
    for one, other in pairs:
        assert value(db, "select pgmb.create_queue(%s, array[%s])", one, one) is True
        assert value(db, "select pgmb.create_queue(%s, array[%s])", other, other) is True
        db.execute("select pgmb.create_stream(%s)", [one])
        db.execute("select pgmb.create_stream(%s)", [other])
        db.execute("select pgmb.publish(%s, '1', key => %s)", [one, one])
        db.execute("select pgmb.publish(%s, '2', key => %s)", [other, other])
        db.execute("select pgmb.publish('t', '3', stream => %s)", [one])
    for one, other in pairs:
        assert rows(db, "select topic, key, payload from pgmb.receive(%s)", one) == [(one, one, 1)]
        assert rows(db, "select topic, key, payload from pgmb.receive(%s)", other) == [(other, other, 2)]
        assert value(db, "select pgmb_internal.last_seq(%s)", one) == 1
        assert value(db, "select pgmb_internal.last_seq(%s)", other) == 0


def test_queues_are_locked_by_identity_not_by_hash(sessions: Sessions) -> None:
    """A receive in an open transaction holds up no queue but its own, whatever the number of queues."""
    holder, other = sessions.open("holder", "other")
    other.run("select pgmb.create_queue('q' || g) from generate_series(1, 300) g")
    other.run("select pgmb.publish('t', '1')")
    holder.run("begin")
    holder.run("select pgmb.receive('q7')")
    other.run("set statement_timeout = '20s'")
    other.run("begin")
    for number in range(1, 301):
        if number != 7:
            assert len(other.run("select lease from pgmb.receive('q' || %s)", [number])) == 1
    locks = other.value("select count(distinct (classid, objid)) from pg_locks where locktype = 'advisory'")
    assert locks == 300
    other.run("rollback")


def test_names_are_kept_apart_to_the_letter(db: Connection) -> None:
    names = ["a", "A", "a.b", "a_b", "a-b", "a" * 99, "a" * 98 + "b", "a b"]
    for name in names:
        assert value(db, "select pgmb.create_queue(%s, array[%s])", name, name) is True
        publish(db, 1, topic=name)
    for name in names:
        assert [row[0] for row in rows(db, "select topic from pgmb.receive(%s)", name)] == [name]
    for stream in ("a", "A", "a.b", "a_b", "a-b", "a" * 40, "a" * 39 + "b"):
        db.execute("select pgmb.create_stream(%s)", [stream])
        db.execute("select pgmb.publish('t', to_json(%s::text), stream => %s)", [stream, stream])
    for stream in ("a", "A", "a.b", "a_b", "a-b", "a" * 40, "a" * 39 + "b"):
        read = "select payload from pgmb.between(%s, pgmb.earliest(%s), pgmb.position(%s))"
        assert rows(db, read, stream, stream, stream) == [(stream,)]


# 9: reads are ordered by position, whatever the plan -----------------------------------------------------

ODD_PLANS = [
    {},
    {"enable_indexscan": "off", "enable_indexonlyscan": "off", "enable_seqscan": "on"},
    {
        "enable_sort": "off",
        "enable_hashjoin": "on",
        "random_page_cost": "1000",
        "cpu_index_tuple_cost": "100",
    },
    {"enable_bitmapscan": "on", "enable_indexscan": "off", "plan_cache_mode": "force_generic_plan"},
    {
        "min_parallel_table_scan_size": "0",
        "parallel_setup_cost": "0",
        "parallel_tuple_cost": "0",
        "max_parallel_workers_per_gather": "4",
        "plan_cache_mode": "force_custom_plan",
    },
    {"enable_nestloop": "off", "jit": "on", "jit_above_cost": "0", "work_mem": "64kB"},
]


@pytest.mark.parametrize("plan", ODD_PLANS, ids=lambda plan: next(iter(plan), "default"))
def test_reads_are_ordered_and_complete_under_any_plan(
    db: Connection, connect: Any, plan: dict[str, str]
) -> None:
    reader: Connection = connect()
    for name, setting in plan.items():
        reader.execute("select set_config(%s, %s, false)", [name, setting])
    reader.execute("select pgmb.create_queue('q', '{a,b}')")
    reader.execute("select pgmb.create_queue('wild', '{#.x}')")
    late: Connection = connect(autocommit=False)
    expected = []
    for start in range(0, 1500, 300):
        with db.transaction():
            for number in range(start, start + 300):
                topic = ("a", "b.x", "b")[number % 3]
                if number % 50 == 0:
                    publish(late, -number - 1, topic="a")
                publish(db, number, topic=topic)
                if topic != "b.x":
                    expected.append(number)
    first: list[Any] = []
    wild: list[Any] = []
    while got := rows(reader, "select lease, seq, payload from pgmb.receive('q', 37)"):
        assert [seq for _, seq, _ in got] == sorted(seq for _, seq, _ in got)
        first += [payload for _, _, payload in got]
        reader.execute("select pgmb.ack(%s)", [got[0][0]])
    while got := payloads(reader, "wild", 37):
        wild += got
    late.commit()
    assert first == expected
    assert wild == list(range(1, 1500, 3))
    assert payloads(reader) == [-number - 1 for number in range(0, 1500, 50)]
    whole = rows(
        reader, "select seq, payload from pgmb.between('main', pgmb.earliest(), pgmb.position(), 0, 5000)"
    )
    assert len(whole) == 1530
    assert whole == sorted(whole)


# 10: a position moves only past what was settled ----------------------------------------------------------


def test_what_came_before_the_first_consumer_is_not_skipped(db: Connection, connect: Any) -> None:
    db.execute("select pgmb.create_queue('q', lease_for => '1 ms')")
    publish(db, 1, 2, 3)
    db.execute("select pgmb.tick()")
    db.execute("select pgmb.rotate()")
    publish(db, 4)
    # A consumer starts, receives and dies before it handles anything.
    consumer = connect()
    assert payloads(consumer) == [1, 2, 3, 4]
    consumer.close()
    db.execute("select pg_sleep(0.06)")
    got = rows(db, "select payload, attempt from pgmb.receive('q', 100, '1 hour')")
    assert got == [(1, 2), (2, 2), (3, 2), (4, 2)]


def test_a_receive_rolled_back_moves_nothing(db: Connection) -> None:
    db.execute("select pgmb.create_queue('q')")
    publish(db, 1, 2)
    for _ in range(3):
        with db.transaction(force_rollback=True):
            assert payloads(db) == [1, 2]
    assert payloads(db, size=1) == [1]
    assert payloads(db) == [2]


# 17: settle needs the lease's token -----------------------------------------------------------------------

SETTLEMENTS = [
    "ack(%s)",
    "ack(%s, '{1}')",
    "retry(%s)",
    "retry(%s, '{1}')",
    "bury(%s)",
    "bury(%s, '{1}')",
    "extend(%s)",
]


@pytest.mark.parametrize(
    "how", ["taken over", "sought", "purged", "settled and cleared", "dropped", "guessed"]
)
def test_a_stale_lease_changes_nothing_and_says_so(db: Connection, how: str) -> None:
    db.execute("select pgmb.create_queue('q', lease_for => '1 ms')")
    publish(db, 1)
    lease = rows(db, "select lease from pgmb.receive('q')")[0][0]
    if how == "taken over":
        db.execute("select pg_sleep(0.06)")
        assert rows(db, "select payload, attempt from pgmb.receive('q', 1, '1 hour')") == [(1, 2)]
    elif how == "sought":
        db.execute("select pgmb.seek('q', pgmb.earliest())")
    elif how == "purged":
        db.execute("select pgmb.purge('q')")
    elif how == "settled and cleared":
        db.execute("select pgmb.ack(%s)", [lease])
        publish(db, 2)
        payloads(db)
        db.execute("select pgmb.clear_settled()")
    elif how == "dropped":
        db.execute("select pgmb.drop_queue('q')")
    else:
        text = str(lease)
        lease = text[:-1] + ("0" if text[-1] != "0" else "1")
    before = kept_of_queues(db)
    for settle in SETTLEMENTS:
        with pytest.raises(psycopg.Error) as caught:
            db.execute(f"select pgmb.{settle}", [lease])
        assert caught.value.sqlstate == "MB011", settle
    assert kept_of_queues(db) == before


def test_a_stale_ack_brings_the_receive_that_carries_it_down(db: Connection) -> None:
    db.execute("select pgmb.create_queue('q')")
    publish(db, 1)
    lease = rows(db, "select lease from pgmb.receive('q', 1, '1 ms')")[0][0]
    db.execute("select pg_sleep(0.06)")
    assert payloads(db) == [1]
    publish(db, 2)
    with pytest.raises(psycopg.Error) as caught:
        db.execute("select * from pgmb.receive('q', ack => %s)", [lease])
    assert caught.value.sqlstate == "MB011"
    assert payloads(db) == [2]


# 18: producers take no shared row lock and send no NOTIFY -----------------------------------------------


def test_two_producers_never_wait_for_one_another(sessions: Sessions) -> None:
    one, two, admin = sessions.open("one", "two", "admin")
    admin.run("select pgmb.create_queue('q')")
    for session in (one, two):
        session.run("set lock_timeout = '50ms'")
        session.run("begin")
    calls = (
        "select pgmb.publish('t', '1', key => 'same')",
        "select pgmb.publish('t', '1', key => 'same', delay => '1 hour')",
        "select pgmb.publish_many('t', array['1', '2']::json[])",
        "select pgmb.publish_many(array['t'], array['1']::json[], keys => array['same'])",
        "insert into pgmb.log_main (topic, payload) values ('t', '1')",
        "select pgmb.publish('t', '1', id => '00000000-0000-7000-8000-000000000000')",
    )
    for call in calls:
        one.run(call)
        two.run(call)
    modes = admin.run(
        "select locktype, relation::regclass::text, mode from pg_locks where pid in (%s, %s)"
        " and locktype not in ('virtualxid', 'transactionid') order by 1, 2, 3",
        [one.pid, two.pid],
    )
    assert modes
    heavy = [
        row for row in modes if row[0] != "relation" or row[2] not in ("AccessShareLock", "RowExclusiveLock")
    ]
    assert heavy == [], "nothing but the locks of an insert"
    one.run("commit")
    two.run("rollback")


def test_a_commit_of_a_producer_wakes_nobody(db: Connection, connect: Any) -> None:
    listener: Connection = connect()
    listener.execute("listen pgmb")
    publish(db, 1, 2)
    db.execute("select pgmb.create_queue('q', starting => pgmb.earliest())")
    assert payloads(db) == [1, 2]
    assert list(listener.notifies(timeout=0.2)) == []
    db.execute("select pgmb.tick()")
    assert [(note.channel, note.payload) for note in listener.notifies(timeout=5, stop_after=1)] == [
        ("pgmb", "main")
    ]


# 21: settle covers exactly what was received -------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 7])
def test_an_ack_covers_exactly_what_was_received(db: Connection, connect: Any, size: int) -> None:
    """Smaller than the batch, with stragglers and other topics in between, over a rotation."""
    db.execute("select pgmb.create_queue('q', '{t}')")
    late: Connection = connect(autocommit=False)
    publish(late, 100, 101)
    publish(db, *range(5))
    publish(db, 200, topic="other")
    assert payloads(db, size=2) == [0, 1]
    late.commit()
    publish(db, *range(5, 10))
    db.execute("select pgmb.rotate()")
    publish(db, *range(10, 15))
    seen: list[Any] = []
    while got := rows(db, "select lease, payload from pgmb.receive('q', %s)", size):
        assert len(got) <= size
        seen += [payload for _, payload in got]
        assert value(db, "select pgmb.ack(%s)", got[0][0]) == len(got)
    assert sorted(seen) == [*range(2, 15), 100, 101]
    assert len(seen) == len(set(seen))


def test_an_ack_of_some_leaves_the_others(db: Connection) -> None:
    db.execute("select pgmb.create_queue('q')")
    publish(db, *range(6))
    got = rows(db, "select lease, seq from pgmb.receive('q', 4, '40 ms')")
    seqs = [seq for _, seq in got]
    assert value(db, "select pgmb.ack(%s, %s)", got[0][0], seqs[1:3]) == 2
    assert value(db, "select pgmb.ack(%s, %s)", got[0][0], seqs[1:3]) == 0
    assert value(db, "select pgmb.ack(%s, '{}')", got[0][0]) == 0
    assert value(db, "select pgmb.ack(%s, '{999999}')", got[0][0]) == 0
    db.execute("select pg_sleep(0.1)")
    assert payloads(db) == [0, 3]
    assert payloads(db) == [4, 5]


# 23: out-of-order commits --------------------------------------------------------------------------------


def test_out_of_order_commits_are_all_delivered(db: Connection, connect: Any) -> None:
    """Twenty transactions that take their numbers in one order and commit in the opposite one."""
    db.execute("select pgmb.create_queue('q')")
    start = value(db, "select pgmb.position()::text")
    writers: list[Connection] = [connect(autocommit=False) for _ in range(20)]
    for number, writer in enumerate(writers):
        publish(writer, number)
    seen: list[Any] = []
    for number in reversed(range(20)):
        writers[number].commit()
        got = payloads(db)
        assert got == [number]
        seen += got
    assert sorted(seen) == list(range(20))
    read = "select payload from pgmb.between('main', %s::pgmb.position, pgmb.position())"
    assert [row[0] for row in rows(db, read, start)] == list(range(20))
