"""Promises 2 and 3: nothing is ordered or filtered by wall clock except delays and retention, and
maintenance does not depend on the session's time zone, date style or locale.

The server runs under libfaketime, whose offset is read from a file at every call: the clock steps while
sessions and leases are open, as it would under a bad NTP server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

import pgmb
from harness.clock import clocked
from harness.postgres import Server, create_database, drop_database
from harness.states import retries
from pgmb import schema
from pgmb.services import Scheduler
from pgmb.services.scheduler import STANDS_AFTER

Step = Callable[[str], None]


# One process runs these tests: its server is the only one under libfaketime.
pytestmark = pytest.mark.xdist_group("clock")


@pytest.fixture(scope="module")
def own_clock(pg_major: int, prepared: Server) -> Iterator[tuple[Server, str, Step]]:
    """A server whose clock `step("-10m")` sets relative to the real one, and a database in it to copy."""
    with clocked(pg_major, copy_of=prepared) as (server, clock):
        template = create_database(server)
        schema.install(server.dsn(template))
        yield server, template, clock.step


@pytest.fixture
def stepping(own_clock: tuple[Server, str, Step]) -> Iterator[tuple[psycopg.Connection[Any], Step]]:
    """A connection to a new database of the server with that clock, which is right again, and `step`."""
    server, template, step = own_clock
    step("+0")
    name = create_database(server, template)
    with server.connect(name) as connection:
        yield connection, step
    step("+0")
    drop_database(server, name)


def publish(connection: psycopg.Connection[Any], number: int) -> None:
    connection.execute("select pgmb.publish('t', to_json(%s::int))", [number])


def receive(connection: psycopg.Connection[Any], lease_for: str = "30 s") -> tuple[Any, list[Any]]:
    rows = connection.execute("select lease, payload from pgmb.receive('q', 100, %s)", [lease_for]).fetchall()
    return (rows[0][0] if rows else None), [payload for _, payload in rows]


def skew(connection: psycopg.Connection[Any]) -> float:
    import time

    row = connection.execute("select extract(epoch from clock_timestamp())::float8").fetchone()
    assert row is not None
    return float(row[0]) - time.time()


def test_a_clock_stepped_back_hides_nothing(stepping: tuple[psycopg.Connection[Any], Step]) -> None:
    db, step = stepping
    db.execute("select pgmb.create_queue('q')")
    start = db.execute("select pgmb.position()::text").fetchone()
    publish(db, 1)
    db.execute("select pgmb.tick()")
    step("-10m")
    assert skew(db) == pytest.approx(-600, abs=60), "the clock did not step"
    publish(db, 2)
    lease, got = receive(db)
    assert got == [1, 2]
    assert db.execute("select pgmb.ack(%s)", [lease]).fetchone() == (2,)
    tick = db.execute("select pgmb.tick()").fetchone()
    assert tick is not None
    assert tick[0] is not None
    step("+1h")
    publish(db, 3)
    step("-1h")
    publish(db, 4)
    lease, got = receive(db)
    assert got == [3, 4]
    assert db.execute("select pgmb.ack(%s)", [lease]).fetchone() == (2,)
    rows = db.execute(
        "select payload from pgmb.between('main', %s::pgmb.position, pgmb.position())", start
    ).fetchall()
    assert rows == [(1,), (2,), (3,), (4,)]
    db.execute("select pgmb.maintain()")
    db.execute("select pgmb.rotate()")
    publish(db, 5)
    db.execute("select pgmb.maintain()")
    assert receive(db)[1] == [5]


def test_a_lease_given_while_the_clock_was_ahead_ends_in_its_time(
    stepping: tuple[psycopg.Connection[Any], Step],
) -> None:
    db, step = stepping
    db.execute("select pgmb.create_queue('q')")
    publish(db, 1)
    step("+1h")
    lost, got = receive(db, "5 s")
    assert got == [1]
    step("+0")
    db.execute("select pgmb.maintain()")
    assert receive(db) == (None, [])
    step("+6s")
    db.execute("select pgmb.maintain()")
    assert db.execute("select payload, attempt from pgmb.receive('q')").fetchall() == [(1, 2)]
    with pytest.raises(psycopg.Error, match="is lost"):
        db.execute("select pgmb.ack(%s)", [lost])


def test_leases_survive_a_clock_stepped_back(stepping: tuple[psycopg.Connection[Any], Step]) -> None:
    """A lease given or extended after the step back expires by the new clock, and is never lost to the
    sweep."""
    db, step = stepping
    db.execute("select pgmb.create_queue('q')")
    publish(db, 1)
    old, got = receive(db)
    assert got == [1]
    publish(db, 2)
    assert receive(db, "1 hour")[1] == [2], "the sweep stands at the clock before the step"
    step("-10m")
    publish(db, 3)
    crashed, got = receive(db, "5 s")
    assert got == [3]
    publish(db, 4)
    kept, got = receive(db, "5 s")
    assert got == [4]
    assert db.execute("select pgmb.extend(%s, '5 s') is not null", [kept]).fetchone() == (True,)
    step("-9m")
    assert db.execute("select payload, attempt from pgmb.receive('q')").fetchall() == [(3, 2), (4, 2)]
    with pytest.raises(psycopg.Error, match="is lost"):
        db.execute("select pgmb.ack(%s)", [crashed])
    assert db.execute("select pgmb.ack(%s)", [old]).fetchone() == (1,)
    step("+2h")
    # 3 and 4 expired twice: they come alone.
    assert sorted(row for _ in range(3) for row in db.execute("select payload from pgmb.receive('q')")) == [
        (2,),
        (3,),
        (4,),
    ]


def test_leases_survive_a_clock_stepped_forward(stepping: tuple[psycopg.Connection[Any], Step]) -> None:
    """An hour ahead, leases expire and come again; back again, nothing is stuck in the future."""
    db, step = stepping
    db.execute("select pgmb.create_queue('q', backoff_jitter => 0)")
    publish(db, 1)
    first, _ = receive(db)
    step("+1h")
    assert db.execute("select payload, attempt from pgmb.receive('q')").fetchall() == [(1, 2)]
    with pytest.raises(psycopg.Error, match="is lost"):
        db.execute("select pgmb.ack(%s)", [first])
    publish(db, 2)
    lease, got = receive(db)
    assert got == [2]
    step("+0")
    publish(db, 3)
    later, got = receive(db, "5 s")
    assert got == [3]
    assert db.execute("select pgmb.ack(%s)", [lease]).fetchone() == (1,)
    step("+1m")
    assert db.execute("select payload, attempt from pgmb.receive('q')").fetchall() == [(3, 2)]
    with pytest.raises(psycopg.Error, match="is lost"):
        db.execute("select pgmb.ack(%s)", [later])


def test_a_clock_of_another_century_publishes_and_delivers(
    stepping: tuple[psycopg.Connection[Any], Step],
) -> None:
    db, step = stepping
    db.execute("select pgmb.create_queue('q')")
    for offset in ("-30y", "+200y", "+0"):
        step(offset)
        publish(db, 1)
        lease, got = receive(db)
        assert got == [1], offset
        db.execute("select pgmb.ack(%s)", [lease])


@pytest.mark.parametrize("published_at", ["infinity", "-infinity", "1815-12-10", "9999-12-31"])
def test_an_odd_time_does_not_stop_a_stream(db: psycopg.Connection[Any], published_at: str) -> None:
    """Ids are made of it where none was given. Only the owner can set it, for example to copy history."""
    db.execute("select pgmb.create_queue('q')")
    db.execute(
        "insert into pgmb.log_main (topic, payload, published_at) values ('t', '1', %s)", [published_at]
    )
    publish(db, 2)
    rows = db.execute("select id, payload from pgmb.receive('q')").fetchall()
    assert [payload for _, payload in rows] == [1, 2]
    assert all(identity.version == 7 for identity, _ in rows)


SESSIONS = [
    {"timezone": "Pacific/Kiritimati", "datestyle": "SQL, DMY", "intervalstyle": "iso_8601"},
    {"timezone": "America/St_Johns", "datestyle": "German", "intervalstyle": "sql_standard"},
    {"timezone": "Pacific/Pago_Pago", "datestyle": "Postgres, MDY", "lc_time": "C", "lc_messages": "C"},
    {"timezone": "Europe/Lisbon", "extra_float_digits": "-15", "bytea_output": "escape"},
]


@pytest.mark.parametrize("settings", SESSIONS, ids=lambda settings: settings["timezone"])
def test_maintenance_in_any_session_drops_nothing_unread(
    db: psycopg.Connection[Any], connect: Any, settings: dict[str, str]
) -> None:
    """A queue that has read nothing, a lease, and a reader that confirmed nothing each hold the log."""
    janitor = connect()
    for name, value in settings.items():
        janitor.execute("select set_config(%s, %s, false)", [name, value])
    db.execute("select pgmb.alter_stream('main', keep_for => '0 s', rotate_every => '0 s')")
    db.execute("select pgmb.create_queue('slow')")
    db.execute("select pgmb.create_queue('q')")
    db.execute("select pgmb.confirm('main', 'lake', pgmb.position())")
    for number in range(8):
        publish(db, number)
        janitor.execute("select pgmb.maintain()")
        janitor.execute("select pgmb.maintain()")
    lease, got = receive(db, "1 hour")
    assert got == list(range(8))
    db.execute("select pgmb.confirm('main', 'lake', pgmb.position())")
    janitor.execute("select pgmb.maintain()")
    slow = db.execute("select lease, payload from pgmb.receive('slow', 100)").fetchall()
    assert [payload for _, payload in slow] == list(range(8))
    db.execute("select pgmb.ack(%s)", [slow[0][0]])
    janitor.execute("select pgmb.maintain()")
    assert db.execute("select pgmb.retry(%s, after => '0 s')", [lease]).fetchone() == (8,), (
        "the lease holds it"
    )
    while janitor.execute("select pgmb.maintain()").fetchone() == (True,):
        pass
    dropped = db.execute("select count(*) from pgmb.segment where dropped_at is not null").fetchone()
    assert dropped is not None
    assert dropped[0] >= 7, "what everybody has passed goes"
    assert receive(db)[1] == list(range(8)), "retries carry their events"


def test_retention_counts_from_the_last_event_and_waits_for_the_archive(db: psycopg.Connection[Any]) -> None:
    db.execute(
        "select pgmb.alter_stream('main', keep_for => '1 hour', rotate_every => '0 s', archive => true)"
    )
    publish(db, 1)
    for _ in range(3):
        db.execute("select pgmb.maintain()")
    assert db.execute("select pgmb.droppable()").fetchall() == []
    db.execute("update pgmb.segment set last_published_at = now() - interval '2 hours' where number = 0")
    assert db.execute("select pgmb.droppable()").fetchall() == [], "not archived yet"
    db.execute("update pgmb.segment set archived_at = now() where number = 0")
    assert db.execute("select pgmb.droppable()").fetchall() == [(0,)]


def test_a_time_names_the_newest_tick_after_the_clock_is_set_back(
    stepping: tuple[psycopg.Connection[Any], Step],
) -> None:
    """What was published and ticked by now lies before the position of now, and of the end of time."""
    db, step = stepping
    newest = (
        "select payload from pgmb.between('main', pgmb.earliest(), pgmb.position_at('main', {}))"
        " order by payload::text::int"
    )
    for number, offset in enumerate(("+0", "-10m", "-9m", "+200y", "+0", "-1m")):
        step(offset)
        publish(db, number)
        db.execute("select pgmb.tick()")
        for moment in ("clock_timestamp()", "'infinity'"):
            rows = db.execute(newest.format(moment)).fetchall()
            assert rows == [(n,) for n in range(number + 1)], (offset, moment)


async def test_a_schedule_goes_on_after_a_turn_with_a_wrong_clock(
    stepping: tuple[psycopg.Connection[Any], Step],
) -> None:
    """The due times that a scheduler decides meanwhile are decided again, and nothing comes twice."""
    db, step = stepping
    async with await pgmb.aconnect(db.info.dsn) as broker:
        for missed in ("last", "all"):
            await broker.create_schedule(f"yearly {missed}", "0 0 1 1 *", missed, missed=missed)
            await broker.create_schedule(missed, "* * * * *", missed, missed=missed)
        at = 0.0
        before = Scheduler(clock=lambda: at)
        await before.turn(broker)
        step("+1y")
        await before.turn(broker)
        assert db.execute("select count(*) from pgmb.log_main").fetchone() == (0,), "the clock just jumped"
        await Scheduler().turn(broker)
        step("+0")
        await before.turn(broker)
        at = STANDS_AFTER
        await before.turn(broker)
        ahead = db.execute("select count(*) from pgmb.log_main where topic = 'last'").fetchone()
        assert ahead == (2,), "by a scheduler that knows no other clock"
        rows = db.execute(
            "select name, next_at - clock_timestamp() < interval '1 minute',"
            " next_at - clock_timestamp() < interval '366 days' from pgmb.schedule order by name"
        ).fetchall()
        assert rows == [
            ("all", True, True),
            ("last", True, True),
            ("yearly all", False, True),
            ("yearly last", False, True),
        ]
        times = db.execute("select topic, headers ->> 'due_at' from pgmb.log_main").fetchall()
        assert len(set(times)) == len(times)


async def test_a_due_time_that_was_published_is_passed_over(
    stepping: tuple[psycopg.Connection[Any], Step],
) -> None:
    """Back by two minutes: what was published by then comes no second time, resumed or not."""
    db, step = stepping
    async with await pgmb.aconnect(db.info.dsn) as broker:
        for name in ("s", "resumed"):
            await broker.create_schedule(name, "* * * * *", name, missed="all")
        for ahead in ("+61s", "+121s", "+181s"):
            step(ahead)
            await Scheduler().turn(broker)
        published = db.execute("select topic, headers ->> 'due_at' from pgmb.log_main").fetchall()
        step("+60s")
        await broker.pause_schedule("resumed")
        await broker.resume_schedule("resumed")
        await Scheduler().turn(broker)
        for ahead in ("+121s", "+181s", "+241s"):
            step(ahead)
            await Scheduler().turn(broker)
        times = db.execute("select topic, headers ->> 'due_at' from pgmb.log_main").fetchall()
        assert len(set(times)) == len(times) > len(published)


def test_an_endpoint_with_a_rate_gets_requests_after_the_clock_was_ahead(
    stepping: tuple[psycopg.Connection[Any], Step],
) -> None:
    db, step = stepping
    db.execute("select pgmb.create_queue('q')")
    db.execute("select pgmb.create_endpoint('hook', 'https://example.org/', rps => 10)")
    take = "select t.given from pgmb.take_requests(array(select id from pgmb.endpoint), '{5}') t"
    step("+1h")
    assert db.execute(take).fetchone() == (5,)
    step("+0")
    assert db.execute(take).fetchone() == (5,)


def test_a_dead_consumer_of_an_ordered_queue_holds_its_keys_alone_after_the_clock_was_ahead(
    stepping: tuple[psycopg.Connection[Any], Step],
) -> None:
    db, step = stepping
    db.execute("select pgmb.create_queue('q', ordered => true, shards => 1)")
    db.execute("select pgmb.publish('t', '1', key => 'a')")
    step("+1h")
    assert receive(db)[1] == [1]
    step("+0")
    db.execute("select pgmb.publish('t', '2', key => 'b')")
    assert receive(db)[1] == [2]


LATER = "interval '1 minute'"


def test_times_that_a_clock_that_was_ahead_wrote_are_corrected(
    stepping: tuple[psycopg.Connection[Any], Step],
) -> None:
    """What was to happen after seconds happens after seconds; a time that was given stays."""
    db, step = stepping
    for name in ("given", "extended", "retried"):
        db.execute("select pgmb.create_queue(%s)", [name])
    db.execute("select pgmb.create_endpoint('hook', 'https://example.org/')")
    db.execute("select pgmb.subscribe('group', '{#}', expires_after => '1 hour')")
    db.execute("select pgmb.publish('t', '1')")
    early = db.execute("select lease from pgmb.receive('extended', 1, '1 s')").fetchone()
    step("+1y")
    db.execute("select pgmb.extend(%s, '5 s')", early)
    db.execute("select pgmb.receive('given', 1, '5 s')")
    db.execute("select pgmb.retry(r.lease, after => '5 s') from pgmb.receive('retried') r")
    given = db.execute(
        "select pgmb.publish('t', '2', delay => '5 s'), pgmb.publish('t', '3', at => now() + interval '5 s')"
    ).fetchone()
    assert given is not None
    db.execute("select pgmb.publish('t', '4', dedup_key => 'k', dedup_for => '5 s')")
    db.execute("select pgmb.trip_endpoint(id, 'tried', '5 s') from pgmb.endpoint")
    db.execute("select pgmb.rotate()")
    step("+0")
    kinds = {kind for (kind,) in db.execute("select kind from pgmb.times_ahead()")}
    assert kinds == {"retries", "leases", "delayed events", "endpoints"}
    db.execute("select pgmb.maintain()")
    step("+6s")
    db.execute("select pgmb.maintain()")
    assert db.execute("select * from pgmb.times_ahead()").fetchall() == []
    late = [
        (
            "select 'lease' from pgmb.queue_status s, pgmb.queue_leases(s.queue) l"
            f" where l.expires_at > now() + {LATER}"
        ),
        (
            "select 'retry' from pgmb.queue_status s, pgmb.retry_curve(s.queue, '{60}') c"
            " where c.within is null and c.events > 0"
        ),
        f"select 'endpoint' from pgmb.endpoint where probe_at > now() + {LATER}",
        f"select 'delayed' from pgmb.delayed where due_at > now() + {LATER} and payload::text <> '3'",
    ]
    assert [row for query in late for row in db.execute(query.encode())] == []
    assert db.execute("select id, due_at > now() + interval '300 days' from pgmb.delayed").fetchall() == [
        (given[1], True)
    ], "the other was released"
    again = "select pgmb.publish('t', '5', dedup_key => 'k', dedup_for => '5 s')"
    other = db.execute(again).fetchone()
    assert other == db.execute(again).fetchone() != None, "the key had expired, and holds from now"  # noqa: E711


def test_a_worker_that_died_while_the_clock_was_ahead_is_not_taken_for_alive(
    stepping: tuple[psycopg.Connection[Any], Step],
) -> None:
    db, step = stepping
    worker = "select pgmb.worker_heartbeat(%s::uuid, 'h', 1, '{q}')"
    dispatcher = "select cardinality(pgmb.heartbeat(%s::uuid, 'h', 1))"
    dead, living = f"{1:032x}", f"{2:032x}"
    step("+1h")
    db.execute(worker, [dead])
    db.execute(dispatcher, [dead])
    step("+0")
    db.execute(worker, [living])
    db.execute(dispatcher, [living])
    step("+50s")
    db.execute(worker, [living])
    assert db.execute(dispatcher, [living]).fetchone() == (1,)
    assert db.execute("select alive from pgmb.describe_workers() order by worker").fetchall() == [
        (False,),
        (True,),
    ]


@pytest.mark.parametrize("seen", [False, True], ids=["before maintenance", "after maintenance"])
def test_heartbeats_of_a_clock_that_jumped_ahead_delete_no_live_worker(
    stepping: tuple[psycopg.Connection[Any], Step], seen: bool
) -> None:
    db, step = stepping
    beats = (
        "select pgmb.worker_heartbeat(%s::uuid, 'h', 1, '{q}')",
        "select pgmb.heartbeat(%s::uuid, 'h', 1)",
    )
    living, other = f"{1:032x}", f"{2:032x}"

    def beat_of(process: str) -> None:
        for beat in beats:
            db.execute(beat, [process])

    def known() -> tuple[int, int]:
        row = db.execute(
            "select (select count(*) from pgmb.worker), (select count(*) from pgmb.dispatcher)"
        ).fetchone()
        assert row is not None
        return row

    db.execute("select pgmb.maintain()")
    beat_of(living)
    step("+2h")
    if seen:
        db.execute("select pgmb.maintain()")
    beat_of(other)
    assert known() == (2, 2)
    for minutes in (0, 4, 8, 12):
        step(f"+{120 + minutes}m")
        db.execute("select pgmb.maintain()")
    beat_of(other)
    assert known() == (1, 1), "the clock stands, and the first process was silent for two hours"


def test_an_endpoint_that_fails_is_not_disabled_by_a_clock_that_jumps(
    stepping: tuple[psycopg.Connection[Any], Step],
) -> None:
    db, step = stepping
    db.execute("select pgmb.create_endpoint('hook', 'https://example.org/')")
    fail = (
        "select pgmb.heartbeat(gen_random_uuid(), 'h', 1, array(select id from pgmb.endpoint), '{0}', '{1}',"
        " '{x}')"
    )
    for ahead in ("+0", "+1y", "+1s"):
        step(ahead)
        db.execute(fail)
    assert db.execute(
        "select e.state, e.failing_since <= clock_timestamp() from pgmb.endpoints e"
    ).fetchall() == [("active", True)]


@pytest.mark.parametrize("kind", ["ordered", "plain"])
def test_events_that_became_due_while_the_clock_was_ahead_come_when_it_is_right(
    stepping: tuple[psycopg.Connection[Any], Step], kind: str
) -> None:
    """One behind another of its key, and one whose consumer died: both were decided before."""
    db, step = stepping
    db.execute("select pgmb.create_queue('q', ordered => %s)", [kind == "ordered"])
    for number in (1, 2, 3):
        db.execute("select pgmb.publish('t', to_json(%s::int), key => 'k')", [number])
    if kind == "ordered":
        (first,) = db.execute("select lease from pgmb.receive('q', 1)").fetchall()
        step("+2s")
        assert receive(db) == (None, []), "those behind are set aside"
    else:
        lease, _ = receive(db)
        db.execute("select pgmb.retry(%s, after => '0')", [lease])
        assert receive(db, "1 s")[1] == [1, 2, 3], "its consumer dies"
    step("+1y")
    if kind == "ordered":
        db.execute("select pgmb.ack(%s)", first)
    lease = db.execute("select lease from pgmb.receive('q', 1)").fetchall()[0][0]
    step("+3s")
    db.execute("select pgmb.ack(%s)", [lease])
    assert db.execute("select pgmb.maintain()").fetchone() is not None
    assert db.execute("select * from pgmb.times_ahead()").fetchall() == []
    assert [event for event in retries(db) if (event.due_in or 0) > 60] == []
    got: list[Any] = []
    for seconds in range(3, 13):
        step(f"+{seconds}s")
        lease, part = receive(db)
        got += part
        if part:
            db.execute("select pgmb.ack(%s)", [lease])
    assert (sorted(got), retries(db)) == ([3] if kind == "ordered" else [2, 3], [])


def test_a_lease_given_in_a_transaction_from_before_the_clock_jumped_ends_in_time(
    stepping: tuple[psycopg.Connection[Any], Step],
) -> None:
    db, step = stepping
    db.execute("select pgmb.create_queue('q')")
    publish(db, 1)
    with db.transaction():
        db.execute("select 1")
        step("+1y")
        assert receive(db, "2 s")[1] == [1]
    step("+0")
    assert [kind for (kind,) in db.execute("select kind from pgmb.times_ahead()")] == ["leases"]
    db.execute("select pgmb.maintain()")
    step("+3s")
    db.execute("select pgmb.maintain()")
    assert receive(db)[1] == [1]


def test_a_stream_made_while_the_clock_was_ahead_rotates_when_it_is_right(
    stepping: tuple[psycopg.Connection[Any], Step],
) -> None:
    db, step = stepping
    step("+1y")
    db.execute("select pgmb.create_stream('early', rotate_every => '1 s')")
    step("+0")
    db.execute("select pgmb.maintain()")
    db.execute("select pgmb.publish('t', '1', stream => 'early')")
    step("+3s")
    db.execute("select pgmb.maintain()")
    rotated = "select count(*) from pgmb.segment where closed_at is not null"
    assert db.execute(rotated).fetchone() == (1,)


def test_small_corrections_of_the_clock_keep_nothing_waiting_that_an_hour_ahead_left(
    stepping: tuple[psycopg.Connection[Any], Step],
) -> None:
    db, step = stepping
    db.execute("select pgmb.create_queue('held', ordered => true)")
    db.execute("select pgmb.create_queue('retried')")
    db.execute("select pgmb.publish('t', '1', key => 'k')")
    db.execute("select pgmb.maintain()")
    step("+1h")
    db.execute("select pgmb.receive('held', 1, '15 s')")
    db.execute("select pgmb.retry(r.lease, after => '15 s') from pgmb.receive('retried') r")
    db.execute("select pgmb.publish('t', '2', delay => '15 s')")
    db.execute("select pgmb.maintain()")
    got: list[Any] = []
    # NTP takes two seconds back, again and again.
    for turn, seconds in enumerate((0, 4, 8, 6, 10, 8, 12, 10, 14, 12, 16, 14, 18, 16)):
        step(f"+{seconds}s")
        db.execute("select pgmb.maintain()")
        db.execute("select pgmb.tick()")
        for queue in ("held", "retried"):
            rows = db.execute("select payload from pgmb.receive(%s)", [queue]).fetchall()
            got += [(queue, payload) for (payload,) in rows]
        assert turn > 4 or not got, "not before 15 seconds have passed"
    assert sorted(got) == [("held", 1), ("held", 2), ("retried", 1), ("retried", 2)]


def test_a_key_taken_while_the_clock_was_ahead_for_a_moment_lasts_its_duration(
    stepping: tuple[psycopg.Connection[Any], Step],
) -> None:
    """maintain() saw an earlier step back, and not this one."""
    db, step = stepping
    for ahead in ("+3s", "+0", "+4m", "+8m"):
        step(ahead)
        db.execute("select pgmb.maintain()")
    step("+1h")
    take = "select pgmb.publish('t', '1', dedup_key => 'k', dedup_for => '5 minutes')"
    taken = db.execute(take).fetchone()
    for ahead in ("+8m", "+9m"):
        step(ahead)
        db.execute("select pgmb.maintain()")
        assert db.execute(take).fetchone() == taken


def test_keys_stages_and_failures_of_a_jump_that_maintenance_missed_last_their_duration(
    stepping: tuple[psycopg.Connection[Any], Step],
) -> None:
    """The clock jumps ahead and back between two calls of maintain()."""
    db, step = stepping
    db.execute("set pgmb.keep_stages = '5 minutes'")
    db.execute("select pgmb.create_endpoint('e', 'https://e.example/', '{#}')")
    fail = (
        "select pgmb.heartbeat(%s::uuid, 'h', 1, array[(select id from pgmb.endpoints where name = 'e')],"
        " '{0}', '{1}', '{x}', give_up_after => '5 minutes')"
    )
    db.execute("select pgmb.maintain()")
    step("+1h")
    take = "select pgmb.publish('t', '1', dedup_key => 'k', dedup_for => '5 minutes')"
    taken = db.execute(take).fetchone()
    db.execute("select pgmb.claim_stage('main', 'app', 1)")
    db.execute(fail, [f"{1:032x}"])
    stages = "select count(*) from pgmb.stage where app is not null"
    state = "select state from pgmb.endpoints where name = 'e'"
    for ahead in ("+0", "+4m"):
        step(ahead)
        db.execute("select pgmb.maintain()")
        db.execute(fail, [f"{1:032x}"])
        assert db.execute(take).fetchone() == taken
        assert db.execute(stages).fetchone() == (1,)
        assert db.execute(state).fetchone() == ("active",)
    step("+6m")
    db.execute("select pgmb.maintain()")
    db.execute(fail, [f"{1:032x}"])
    assert db.execute(take).fetchone() != taken
    assert db.execute(stages).fetchone() == (0,)
    assert db.execute(state).fetchone() == ("disabled",)


@pytest.mark.parametrize("maintained", ["2 s", "10 minutes"])
@pytest.mark.parametrize("earlier", ["+0", "+1y"])
def test_what_was_written_just_before_the_clock_went_back_waits_its_own_time(
    stepping: tuple[psycopg.Connection[Any], Step], earlier: str, maintained: str
) -> None:
    """That long after the last call of maintain(). The clock may have been further ahead before."""
    db, step = stepping
    for name, options in {"given": ", ordered => true", "extended": "", "retried": ""}.items():
        db.execute(f"select pgmb.create_queue('{name}'{options})".encode())
    db.execute("select pgmb.create_endpoint('hook', 'https://example.org/')")
    db.execute("select pgmb.publish('t', '1', key => 'k')")
    for ahead in (earlier, "+0", "+1h"):
        step(ahead)
        db.execute("select pgmb.maintain()")
    step({"2 s": "+3602s", "10 minutes": "+70m"}[maintained])
    db.execute("select pgmb.receive('given', 1, '5 s')")
    early = db.execute("select lease from pgmb.receive('extended', 1, '1 s')").fetchone()
    db.execute("select pgmb.extend(%s, '5 s')", early)
    db.execute("select pgmb.retry(r.lease, after => '5 s') from pgmb.receive('retried') r")
    db.execute(
        "select pgmb.settle_deliveries(r.lease, failed => array[r.seq], endpoints => array[e.id],"
        " after => '{5 s}', errors => '{x}') from pgmb.receive_deliveries('webhooks') r, pgmb.endpoint e"
    )
    db.execute("select pgmb.subscribe('group', '{#}', expires_after => '5 s')")
    db.execute("select pgmb.publish('t', '2', delay => '5 s')")
    take = "select pgmb.publish('t', '3', dedup_key => 'k', dedup_for => '5 s')"
    taken = db.execute(take).fetchone()
    written = {"deliveries", "delayed events", "leases", "retries", "subscriptions"}
    for seconds, left in ((2, written), (6, written), (8, set[str]())):
        step(f"+{seconds}s")
        db.execute("select pgmb.maintain()")
        assert {kind for (kind,) in db.execute("select kind from pgmb.times_ahead()")} == left, seconds
        assert (db.execute(take).fetchone() == taken) == bool(left), seconds
