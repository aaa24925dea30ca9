"""Promise: after an erasure the events of a key have no key, payload and headers, and their values are in no
file of the database. Numbers, ids, topics and times stay, and readers go on."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from typing import Any

import psycopg
import pytest

import pgmb
from harness.segments import fill, seal
from harness.sessions import Sessions
from harness.states import add_deliveries_of_keys, retries_waiting
from harness.traces import in_database
from pgmb import schema
from pgmb.doctor import examine
from pgmb.erasure import Eraser
from pgmb.errors import Conflict, PermissionDenied
from tests.contract.cast import Cast

pytestmark = [pytest.mark.new_database]

DB = psycopg.Connection[Any]

KEYS = ["person-4711", "person-0815"]
SECRETS = [*KEYS, "Name of Customer", "mail@example.org", "failed for a customer"]

START_REPLAY = "select pgmb.start_replay('main', pgmb.earliest(), pgmb.position(), 1, into_stream => 'main')"


def value(db: DB, statement: str, *given: Any) -> Any:
    row = db.execute(statement.encode(), given).fetchone()
    return None if row is None else row[0]


def secret(n: int) -> dict[str, Any]:
    """A payload; every third is stored outside of its row, and too random to be compressed."""
    noise = random.Random(n).randbytes(5000 if n % 3 == 0 else 20).hex()
    return {"name": "Name of Customer", "noise": noise, "mail": "mail@example.org"}


def erase(dsn: str, keys: list[str] | None = None, **options: Any) -> dict[str, int]:
    done = Eraser(dsn, keys or KEYS, **options).erase("request 17")
    return {table.name: table.events for table in done.tables}


def publish(broker: pgmb.Broker, events: int) -> None:
    for n in range(events):
        broker.publish("customer.changed", secret(n), key=KEYS[n % 2], headers={"mail": "mail@example.org"})


def all_events(db: DB, stream: str = "main") -> list[Any]:
    return db.execute(
        "select seq, xid::text, id, topic, published_at, key, payload::text, headers::text"
        f' from pgmb."log_{stream}" order by seq'.encode()
    ).fetchall()


def everything(db: DB, dsn: str) -> None:
    """Events of the keys in every place that keeps events, and others beside them."""
    fill(db, 100)
    with pgmb.connect(dsn, max_size=1) as broker:
        for name in ("plain", "ordered", "later"):
            broker.create_queue(name, ["customer.#"], ordered=name == "ordered")
        publish(broker, 12)
        for name in ("plain", "ordered"):
            lease = broker.receive(name, 12)
            assert lease
            seqs = [event.seq for event in lease.events]
            lease.bury(seqs[:2], "failed for a customer")
            if name == "plain":
                lease.retry(seqs[2:4], 3600, "failed for a customer")
            lease.retry(None, 0, "failed for a customer")
            # Where the keys begin in an ordered queue is remembered with its position.
            broker.receive(name, 12)
        broker.publish("customer.later", secret(1), key=KEYS[0], delay=3600)
        broker.publish("customer.once", secret(2), key=KEYS[1], dedup_key="mail@example.org")
        broker.publish("other.once", {}, dedup_key=KEYS[0])
        broker.create_endpoint("hook", "https://example.org/hook", ["customer.#"])
    db.execute(
        "insert into pgmb.attempt (endpoint, event_id, attempt, seconds, detail, response)"
        " select p.id, coalesce(e.id, pgmb.derive_id(e.seq, e.published_at, s.salt)), 1, 0,"
        " 'Name of Customer', 'mail@example.org' from pgmb.endpoint p, pgmb.log_main e, pgmb.stream s"
        " where e.key = any (%s) and s.name = 'main'",
        [KEYS],
    )
    add_deliveries_of_keys(db, KEYS, queue="plain", error="failed for a customer")
    for app in ("held", "free"):
        stage = value(db, "select pgmb.claim_stage('main', %s, 1)", app)
        db.execute(
            f"insert into pgmb.stage_{stage} (topic, key, payload) values ('t', 'other', '1'),"
            " ('customer.staged', %s, '{\"name\": \"Name of Customer\"}')".encode(),
            [KEYS[0]],
        )
    db.execute("select pgmb.abandon_tasks('main', 'free', 1)")
    db.execute("analyze")


def test_nothing_is_left_of_a_key_in_the_files_of_the_database(dsn: str, db: DB) -> None:
    everything(db, dsn)
    seal(db)
    with pgmb.connect(dsn, max_size=1) as broker:
        publish(broker, 6)
    before, found = all_events(db), in_database(db, SECRETS)
    # Statistics never have them; the other tables do.
    assert {"pgmb.segment_1_0", "pgmb.dead", "pgmb.retry", "pgmb.delayed"} <= found.keys()
    assert "pg_statistic" not in found
    counts = erase(dsn)
    assert in_database(db, SECRETS) == {}
    after = all_events(db)
    erasure = value(db, "select id from pgmb.erasure")
    assert [row[:5] for row in after] == [row[:5] for row in before]
    gone = 0
    for was, now in zip(before, after, strict=True):
        if was[5] in KEYS:
            gone += 1
            assert now[5:] == (None, "null", f'{{"pgmb-erased":"{erasure}"}}')
        else:
            assert now == was
    assert gone == 12 + 1 + 6
    assert sum(count for name, count in counts.items() if name.startswith("pgmb.segment_")) == gone
    assert {name: count for name, count in counts.items() if "segment" not in name} == {
        "pgmb.attempt": 13, "pgmb.claim": 1, "pgmb.dead": 4, "pgmb.dedup": 2, "pgmb.delayed": 1,
        "pgmb.delivery": 13, "pgmb.retry": 20, "pgmb.stage": 1,
    }  # fmt: skip
    dead = db.execute("select key, payload::text, error from pgmb.dead").fetchall()
    assert dead == [(None, "null", None)] * 4
    # What was staged is published with as many events as were written.
    assert value(db, "select pgmb.publish_tasks('main', 'held', 1, '{0}', '{1}', '{2}')") == 2
    assert erase(dsn) == {}, "there is nothing left to erase"


async def worked(app: pgmb.App, db: DB, queues: list[str]) -> None:
    """Run workers until all queues are empty."""
    stop = asyncio.Event()
    working = asyncio.create_task(app.work(stop, queues=queues))
    deadline = time.monotonic() + 60
    while value(
        db,
        "select sum(waiting + leased_events + retries) from pgmb.queue_status where queue = any (%s)",
        queues,
    ):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    stop.set()
    await working


def test_consumers_skip_what_was_erased_and_readers_get_tombstones(dsn: str, db: DB) -> None:
    app = pgmb.App(dsn)
    seen: list[Any] = []

    @app.on("customer.#", queue="handled")
    def handle(payload: dict[str, Any]) -> None:
        seen.append(payload["name"])

    app.on("customer.#", queue="by hand")(handle)

    @app.on("customer.#", queue="together", batch=10)
    def handle_all(payloads: list[dict[str, Any]]) -> None:
        seen.extend(payload["name"] for payload in payloads)

    with pgmb.connect(dsn, max_size=1) as broker:
        for name in ("handled", "by hand", "together", "received"):
            broker.create_queue(name, ["customer.#"])
        start = broker.position()
        publish(broker, 4)
        broker.publish("customer.new", {"name": "Max"}, key="person-1")
        leased = broker.receive("received", 3)
        assert leased
        erase(dsn)
        assert leased.ack() == 3
        rest = broker.receive("received", 10)
        assert rest
        assert [(event.erased, event.payload) for event in rest.events] == [
            (True, None),
            (False, {"name": "Max"}),
        ]
        assert rest.retry(None, 0) == 2
        again = broker.receive("received", 10)
        assert again
        assert [event.erased for event in again.events] == [True, False]
        tailed = list(broker.tail("customer.#", after=start, follow=False))
        assert [(event.key, event.erased) for event in tailed] == [(None, True)] * 4 + [("person-1", False)]
    asyncio.run(worked(app, db, ["handled", "together"]))
    assert app.handle("by hand", 10) == 5
    assert seen == ["Max", "Max", "Max"]
    assert retries_waiting(db) == retries_waiting(db, "received")


def test_other_streams_and_later_events_are_left_alone(dsn: str, db: DB) -> None:
    db.execute("select pgmb.create_stream('other')")
    with pgmb.connect(dsn, max_size=1) as broker:
        for stream in ("main", "other"):
            broker.publish("t", secret(1), key=KEYS[0], stream=stream)
        counted = Eraser(dsn, KEYS, streams=["other"]).count()
        assert [(table.name, table.events) for table in counted] == [("pgmb.log_other", 1)]
        assert len(all_events(db)) == 1
        assert list(erase(dsn, streams=["other"])) == ["pgmb.segment_2_0"]
        assert [row[5] for row in all_events(db)] == [KEYS[0]]
        assert [row[5] for row in all_events(db, "other")] == [None]
        broker.publish("t", secret(1), key=KEYS[0], stream="other")
        assert [row[5] for row in all_events(db, "other")] == [None, KEYS[0]]


def test_an_erasure_waits_for_transactions_that_may_hold_the_event(dsn: str, db: DB, connect: Any) -> None:
    """One that published and has not committed, one whose snapshot shows old rows, one that moves a row."""
    with pgmb.connect(dsn, max_size=1) as broker:
        broker.create_queue("q", ["#"])
        publish(broker, 2)
        lease = broker.receive("q", 2)
        assert lease
        lease.bury(None, "failed for a customer")
    db.execute("select pgmb.maintain()")
    writer, reader, mover = (connect(autocommit=False) for _ in range(3))
    writer.execute("select pgmb.publish('t', '\"Name of Customer\"', %s)", [KEYS[0]])
    reader.execute("set transaction isolation level repeatable read")
    assert reader.execute("select count(key) from pgmb.log_main").fetchone() == (2,)
    mover.execute("select pgmb.redrive('q')")
    with pytest.raises(Conflict, match="it may still publish: process"):
        Eraser(dsn, KEYS, wait=0.1).erase("request 17")
    writer.commit()
    with pytest.raises(Conflict, match="open since before: process"):
        Eraser(dsn, KEYS, wait=0.1).erase("request 17")
    done: list[Any] = []
    running = threading.Thread(target=lambda: done.append(erase(dsn)))
    running.start()
    deadline = time.monotonic() + 60
    for open_one in (reader, mover):
        assert not done
        assert time.monotonic() < deadline
        open_one.commit()
    running.join(60)
    assert done
    assert value(db, "select count(*) from pgmb.erasure where ended_at is not null") == 1
    assert retries_waiting(db) == 0
    assert [row[5] for row in all_events(db)] == [None] * 3
    assert in_database(db, SECRETS) == {}


@pytest.mark.parametrize("first", ["replay", "erasure"])
def test_an_erasure_and_a_replay_that_begin_together_exclude_each_other(
    db: DB, sessions: Sessions, first: str
) -> None:
    db.execute("select pgmb.tick()")
    starts = {
        "replay": START_REPLAY,
        "erasure": "select pgmb.start_erasure('{somebody}', 'request 17')",
    }
    one, other = sessions.open("one", "other")
    one.run("begin")
    one.run(starts.pop(first))
    (start,) = starts.values()
    starting = other.start(start).blocked()
    one.run("commit")
    with pytest.raises(psycopg.Error, match="is not finished") as refused:
        starting.result()
    assert refused.value.sqlstate == "MB004"


def test_the_record_holds_no_key_and_finds_one(dsn: str, db: DB) -> None:
    with pgmb.connect(dsn, max_size=1) as broker:
        publish(broker, 4)
    erase(dsn)
    rows = db.execute(
        "select reason, role, keys, streams, ended_at > begun_at, tables from pgmb.describe_erasures()"
    )
    ((reason, role, keys, streams, ended, tables),) = rows.fetchall()
    assert (reason, keys, streams, ended) == ("request 17", 2, ["main"], True)
    assert role == value(db, "select session_user")
    assert tables == [{"name": "pgmb.segment_1_0", "events": 4, "files": []}]
    for key, found in ((KEYS[0], 1), (KEYS[1], 1), ("person-1", 0)):
        assert value(db, "select count(*) from pgmb.describe_erasures(%s)", key) == found
    dumped = json.dumps(value(db, "select jsonb_agg(e) from pgmb.erasure e"))
    assert not [key for key in KEYS if key in dumped]
    for keys, reason in (([], "r"), (KEYS, " "), (KEYS, f"of {KEYS[0]}"), ([None], "r")):
        with pytest.raises(psycopg.Error) as refused:
            db.execute("select pgmb.start_erasure(%s::text[], %s)", [keys, reason])
        assert refused.value.sqlstate == "MB005"


def test_one_erasure_at_a_time_and_none_beside_a_replay(dsn: str, db: DB, connect: Any) -> None:
    other = connect()
    assert value(other, "select pgmb.start_erasure(%s, 'r')", ["a"]) == value(
        other, "select pgmb.start_erasure(%s, 'r')", ["a"]
    ), "a repeated command continues"
    with pytest.raises(Conflict, match="another session erases"):
        erase(dsn)
    with pytest.raises(psycopg.Error, match="an erasure of stream main is not finished"):
        db.execute(START_REPLAY)
    assert value(db, "select count(*) from pgmb.erasure") == 1
    assert value(other, "select pgmb.start_erasure(%s, 'r', '{main}')", ["a"]) is not None
    assert value(db, "select count(*) from pgmb.erasure") == 2, "of one stream, that is another erasure"
    db.execute("delete from pgmb.erasure where not all_streams")
    other.close()
    db.execute("update pgmb.erasure set begun_at = begun_at - interval '1 hour'")
    (verdict,) = [one for one in examine(db) if one.check == "erasures"]
    assert (verdict.level, "Run pgmb erase again" in (verdict.fix or "")) == ("warn", True)
    erase(dsn, ["a"])
    assert [one.level for one in examine(db) if one.check == "erasures"] == ["ok"]
    db.execute(START_REPLAY)
    with pytest.raises(Conflict, match="a replay of the stream is not finished"):
        erase(dsn)


def test_an_erasure_waits_for_a_session_that_is_about_to_end(dsn: str, db: DB, connect: Any) -> None:
    """As that of a command that failed, and was run again at once."""
    other, done = connect(), list[Any]()
    other.execute("select pgmb.start_erasure('{a}', 'r')")
    running = threading.Thread(target=lambda: done.append(erase(dsn)))
    running.start()
    waiting = (
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event = 'PgSleep'"
    )
    while not value(db, waiting):
        time.sleep(0.01)
    other.close()
    running.join(60)
    assert done


def test_only_admins_erase(dsn: str, db: DB, cast: Cast) -> None:
    with pgmb.connect(dsn, max_size=1) as broker:
        publish(broker, 2)
    for group in ("pgmb_consumer", "pgmb_publisher"):
        with pytest.raises(PermissionDenied):
            erase(cast.acting(cast.role(group, group)).info.dsn)
    assert [row[5] for row in all_events(db)] == KEYS
    # Tables belong to the owner: an admin writes them again all the same.
    assert erase(cast.acting(cast.role("admin", "pgmb_admin")).info.dsn) == {"pgmb.segment_1_0": 2}
    assert in_database(db, SECRETS) == {}


@pytest.mark.once(18)
def test_messages_of_pgmq_are_erased_by_their_group(empty_dsn: str) -> None:
    schema.install(empty_dsn, compat=["pgmq"])
    group = '{"x-pgmq-group": "person-4711"}'
    with psycopg.connect(empty_dsn, autocommit=True) as db:
        db.execute("select pgmq.create('q')")
        for delay in (0, 0, 3600):
            db.execute("select pgmq.send('q', '{\"name\": \"Name of Customer\"}', %s, %s)", [group, delay])
        db.execute("select pgmq.send('q', '{\"name\": \"Max\"}')")
        (first,) = db.execute("select msg_id from pgmq.read('q', 0, 1)").fetchall()
        db.execute("select pgmq.archive('q', %s::bigint)", first)
        db.execute("analyze")
        erase(empty_dsn)
        assert in_database(db, SECRETS) == {}
        left = [message for (message,) in db.execute("select message from pgmq.read('q', 0, 10)") if message]
        assert left == [{"name": "Max"}]
