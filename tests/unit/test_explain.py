"""The plans of the hot statements, as they run inside receive, ack and between.

auto_explain shows every nested statement to the session. Tables were never analyzed and are not vacuumed;
plans cached while the log was empty must be as good as those made when it is full. At the end, the plans of
all statements that the services repeat, as the server logs them.
"""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import psycopg
import pytest

import pgmb
from harness.explain import Explained, Plan, nodes
from harness.server import Server
from harness.serving import serving
from harness.states import (
    add_dead,
    add_deliveries,
    add_leases_of_retries,
    add_retries,
    add_retries_of_keys,
    add_settlements,
    age_waiting,
    analyze_waiting,
    sweep_at_once,
)
from harness.waiting import until, until_true
from pgmb._core import statements
from pgmb._core.lease import LeaseNumbers
from tests.app.stage import working
from tests.server.asking import make_key

# Costs are measured: rows that other tests left would count.
pytestmark = pytest.mark.new_database

HOT = re.compile(
    r"^(segment_\d+_\d+|claim|retry|delayed|settlement|generation|shortened|noted_lease|noted_key)$"
)
WALK = re.compile(r"^segment_")


def offences(plans: list[tuple[str, Plan]]) -> list[str]:
    """Scans of hot tables that are no index or tid scan, and sorts of what a walk of the log brings."""
    found = []
    for text, plan in plans:
        for node in nodes(plan):
            relation = node.get("Relation Name", "")
            kind = node["Node Type"]
            if HOT.match(relation):
                if kind in ("ModifyTable", "LockRows"):
                    continue
                if kind not in ("Index Scan", "Index Only Scan", "Tid Scan"):
                    found.append(f"{kind} on {relation}: {text}")
                elif kind != "Tid Scan" and not node.get("Index Cond") and node["Actual Rows"] > 1:
                    # The whole index: bounded only by a limit above it or an aggregate's first row.
                    found.append(f"unbounded {kind} on {relation}: {text}")
            if kind in ("Sort", "Incremental Sort") and "straggler" not in text:
                walked = [child for child in nodes(node) if WALK.match(child.get("Relation Name", ""))]
                if walked and not any("xid" in str(child.get("Index Cond")) for child in walked):
                    found.append(f"{kind} over the walk: {text}")
    return found


def read_too_much(plans: list[tuple[str, Plan]], limit: int) -> list[str]:
    """Scans of hot tables that looked at many more rows than were asked for."""
    found = []
    for text, plan in plans:
        for node in nodes(plan):
            if HOT.match(node.get("Relation Name", "")) and node["Node Type"] != "ModifyTable":
                touched = (node.get("Actual Rows", 0) + node.get("Rows Removed by Filter", 0)) * node.get(
                    "Actual Loops", 1
                )
                if touched > limit:
                    found.append(f"{touched} rows of {node['Relation Name']}: {text}")
    return found


@pytest.fixture
def log(db: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    """Nothing is ever analyzed or vacuumed behind the test's back."""
    for (table,) in db.execute(
        "select c.oid::regclass::text from pg_class c where c.relnamespace = 'pgmb'::regnamespace"
        " and c.relkind = 'r'"
    ).fetchall():
        db.execute(f"alter table {table} set (autovacuum_enabled = off)")
    db.execute("select pgmb.create_queue('q')")
    db.execute("select pgmb.create_queue('wild', '{a.*}')")
    db.execute("select pgmb.create_queue('exact', '{a.1,a.2}')")
    return db


def fill(db: psycopg.Connection[Any], events: int = 20_000) -> None:
    db.execute(
        "insert into pgmb.log_main (topic, payload) select 'a.' || g %% 7, '1' from generate_series(1, %s) g",
        [events],
    )


CALLS = (
    "select lease, seq from pgmb.receive('q', 50)",
    "select lease, seq from pgmb.receive('wild', 50)",
    "select lease, seq from pgmb.receive('exact', 50)",
)


def exercise(session: Explained, expected: int, limit: int) -> None:
    """Every hot call once: no plan is bad, and none reads much more than it returns."""
    for call in CALLS:
        rows = session.run(call)
        assert len(rows) == expected
        plans = list(session.plans)
        assert len(plans) > 3, "auto_explain shows nothing"
        if expected:
            assert any(WALK.match(n.get("Relation Name", "")) for _, p in plans for n in nodes(p)), (
                "no walk seen"
            )
            lease, seqs = rows[0][0], [seq for _, seq in rows]
            session.run("select pgmb.ack(%s, %s)", lease, seqs[:3])
            plans += session.plans
            session.run("select pgmb.retry(%s, %s, '1 hour', 'no')", lease, seqs[3:5])
            plans += session.plans
            session.run("select pgmb.extend(%s)", lease)
            plans += session.plans
            session.run("select pgmb.ack(%s)", lease)
            plans += session.plans
        assert offences(plans) == []
        assert read_too_much(plans, limit) == []


def test_plans_made_on_an_empty_log_stay_good_when_it_is_full(
    log: psycopg.Connection[Any], connect: Any
) -> None:
    session = Explained(connect())
    for _ in range(8):  # plpgsql turns to generic plans after five
        exercise(session, 0, 100)
    fill(log)
    for _ in range(3):
        exercise(session, 50, 1000)


def test_plans_made_on_a_full_log_are_good(log: psycopg.Connection[Any], connect: Any) -> None:
    fill(log)
    session = Explained(connect())
    for _ in range(8):
        exercise(session, 50, 1000)


def test_plans_are_good_with_many_retries_and_delays_and_claims(
    log: psycopg.Connection[Any], connect: Any
) -> None:
    session = Explained(connect())
    exercise(session, 0, 100)
    fill(log)
    log.execute(
        "insert into pgmb.delayed (id, stream, due_at, topic, payload) select gen_random_uuid(), 'main',"
        " now() + interval '1 hour', 'a.1', '1' from generate_series(1, 20000)"
    )
    for queue in ("q", "wild", "exact"):
        add_retries(log, 6666, queue, due="0 s", step="3 minutes", topic="a.1")
    for _ in range(3):
        exercise(session, 50, 1000)
    age_waiting(log, "10 hours")
    rows = session.run("select lease, seq from pgmb.receive('q', 50)")
    assert len(rows) == 50
    plans = list(session.plans)
    session.run("select pgmb.ack(%s)", rows[0][0])
    plans += session.plans
    assert offences(plans) == []
    assert read_too_much(plans, 2000) == []
    log.execute(
        "update pgmb.delayed set due_at = now() where ctid = any (array(select ctid from"
        " pgmb.delayed limit 5))"
    )
    sweep_at_once(log)
    session.run("select lease, seq from pgmb.receive('q', 50)")
    assert offences(session.plans) == []


@pytest.mark.parametrize("analyzed", [False, True], ids=["never analyzed", "analyzed while empty"])
@pytest.mark.parametrize("tried", [False, True], ids=["behind others", "suspects"])
def test_of_an_ordered_queue_few_waiting_events_are_read(
    log: psycopg.Connection[Any], connect: Any, tried: bool, analyzed: bool
) -> None:
    log.execute("select pgmb.create_queue('ordered', ordered => true, shards => 1)")
    if analyzed:
        analyze_waiting(log)
    session = Explained(connect())
    for _ in range(8):  # plans are made while the table is small
        add_retries_of_keys(log, 1, "ordered", suspects=tried, topic="a.1")
        ((lease,),) = session.run("select lease from pgmb.receive('ordered', 100)")
        session.run("select pgmb.ack(%s)", lease)
    add_retries_of_keys(log, 4000, "ordered", suspects=tried, topic="a.1")
    rows = session.run("select lease, key from pgmb.receive('ordered', 100)")
    assert len(rows) == (1 if tried else 100)
    assert offences(session.plans) == []
    assert read_too_much(session.plans, 3000) == []


def test_of_events_that_come_alone_one_is_locked(log: psycopg.Connection[Any], connect: Any) -> None:
    add_retries_of_keys(log, 4000, "q", suspects=True, topic="a.1")
    session = Explained(connect())
    assert len(session.run("select lease from pgmb.receive('q', 100)")) == 1
    locked = [
        node["Actual Rows"]
        for _, plan in session.plans
        for node in nodes(plan)
        if node["Node Type"] == "LockRows"
    ]
    assert set(locked) == {1}


def test_takeover_and_stragglers_are_found_by_index(log: psycopg.Connection[Any], connect: Any) -> None:
    session = Explained(connect())
    exercise(session, 0, 100)
    late: psycopg.Connection[Any] = connect(autocommit=False)
    late.execute("select pgmb.publish('a.1', '1')")
    fill(log)
    while rows := log.execute("select distinct lease from pgmb.receive('q', 10000)").fetchall():
        log.execute("select pgmb.ack(%s)", rows[0])
    late.commit()
    assert len(session.run("select lease from pgmb.receive('q', 50, '1 ms')")) == 1
    assert offences(session.plans) == []
    assert read_too_much(session.plans, 100) == []
    log.execute("select pg_sleep(0.06)")
    rows = session.run("select attempt from pgmb.receive('q')")
    assert rows == [(2,)]
    assert offences(session.plans) == []
    assert read_too_much(session.plans, 100) == []


def test_events_of_publishers_at_work_are_walked_not_searched_by_transaction(
    log: psycopg.Connection[Any], connect: Any
) -> None:
    """Each batch is opened while a transaction has numbers below its end and has not committed."""
    session = Explained(connect())
    publishers: list[psycopg.Connection[Any]] = [connect(autocommit=False) for _ in range(2)]
    publish = "select pgmb.publish_many('a.1', array_fill('1'::json, array[50]))"
    got: list[int] = []
    sought = 0
    publishers[0].execute(publish)
    for turn in range(12):
        publishers[(turn + 1) % 2].execute(publish)
        publishers[turn % 2].commit()
        rows = session.run("select seq from pgmb.receive('q', 50)")
        got += [seq for (seq,) in rows]
        assert len(rows) == 50
        assert offences(session.plans) == []
        assert read_too_much(session.plans, 300) == []
        sought += any("straggler" in text for text, _ in session.plans)
    assert len(set(got)) == 600
    assert sought <= 1


def test_the_fate_of_an_event_is_found_by_index(log: psycopg.Connection[Any], connect: Any) -> None:
    """Wherever it stands: waiting, leased, retried, dead, done, or under an id that its publisher chose."""
    session = Explained(connect())
    ids = [row[0] for row in log.execute("select pgmb.publish('a.1', '1') from generate_series(1, 4)")]
    rows = log.execute("select lease, seq from pgmb.receive('q', 4)").fetchall()
    log.execute("select pgmb.ack(%s, %s)", [rows[0][0], [rows[0][1]]])
    log.execute("select pgmb.retry(%s, %s, '1 hour', 'no')", [rows[0][0], [rows[1][1]]])
    log.execute("select pgmb.bury(%s, %s, 'no')", [rows[0][0], [rows[2][1]]])
    add_retries(log, 20_000, topic="a.1")
    add_dead(log, 20_000, topic="a.1")
    fill(log)
    ((chosen,),) = log.execute("select pgmb.publish('a.1', '1', id => gen_random_uuid())").fetchall()
    found = re.compile(r"^(segment_\d+_\d+|claim|retry|dead|delivery|attempt|delayed|settlement|binding)$")
    for event, expected in zip(
        [*ids, chosen], ("done", "retrying", "dead", "leased", "waiting"), strict=True
    ):
        fate = session.run("select pgmb.event_fate(%s)", event)[0][0]
        assert {one["name"]: one["state"] for one in fate["consumers"]}["q"] == expected
        assert offences(session.plans) == []
        # Of one that the publisher chose, as many are looked at as were asked for.
        assert read_too_much(session.plans, 20_000 if event == chosen else 10) == []
        scans = [
            (node["Node Type"], text)
            for text, plan in session.plans
            for node in nodes(plan)
            if found.match(node.get("Relation Name", "")) and node["Node Type"] == "Seq Scan"
        ]
        assert scans == []


@pytest.mark.parametrize("filled_first", [False, True])
def test_between_walks_the_index_and_stops_at_its_page(
    log: psycopg.Connection[Any], connect: Any, filled_first: bool
) -> None:
    session = Explained(connect())
    start = log.execute("select pgmb.position()::text").fetchone()
    assert start is not None
    if filled_first:
        fill(log)
    for _ in range(8):
        session.run(
            "select seq from pgmb.between('main', %s::pgmb.position, pgmb.position(), 0, 20)", start[0]
        )
        assert offences(session.plans) == []
    if not filled_first:
        fill(log)
    for place in (0, 8000, 19000):
        rows = session.run(
            "select seq from pgmb.between('main', %s::pgmb.position, pgmb.position(), %s, 20)",
            start[0],
            place,
        )
        assert len(rows) == 20
        assert offences(session.plans) == []
        assert read_too_much(session.plans, 100) == []


def claim(size: int, start: int | None = None) -> statements.Statement:
    """From the first queue, whose claims are not known."""
    lease = LeaseNumbers(queue=1, claim=0, token=7)
    opens = start is not None
    return statements.claim(lease, size, None, None, stream=1, segment=0, start=start or 0, opens=opens)


def planned(session: Explained) -> int:
    """How often PostgreSQL planned the statement for its values: five times, then it keeps a plan for all."""
    (times,) = session.run(
        "select custom_plans from pg_prepared_statements where strpos(statement, 'pgmb.claim_next') > 0"
    )
    return int(times[0])


@pytest.mark.parametrize("analyzed", [False, True])
def test_the_statement_that_claims_walks_the_index(
    log: psycopg.Connection[Any], connect: Any, analyzed: bool
) -> None:
    """The client plans it once a segment is past its first numbers, by the settings of its session."""
    log.execute("insert into pgmb.log_main (topic, payload) select 'a', '1' from generate_series(1, 5000)")
    if analyzed:
        log.execute("analyze pgmb.segment_1_0")
    assert len(log.execute("select from pgmb.receive('q', 4096)").fetchall()) == 4096
    session = Explained(connect())
    for size in (1, 3, 20, 100):
        for _ in range(7):  # a generic plan from the sixth on
            statement = claim(size)
            assert len(session.run(statement.text, *statement.parameters)) == size
            assert offences(session.plans) == []
            assert read_too_much(session.plans, 200) == []
    assert planned(session) == 5
    fill(log, 40_000)
    assert len(log.execute("select from pgmb.receive('q', 5000)").fetchall()) == 36
    assert len(log.execute("select from pgmb.receive('q', 10)").fetchall()) == 10
    for size in (1, 20, 500, 10000):
        statement = claim(size)
        assert len(session.run(statement.text, *statement.parameters)) == size
        assert offences(session.plans) == []
        assert read_too_much(session.plans, size + 200) == []
        assert all("JIT" not in plan for _, plan in session.plans)
    with connect() as fresh:
        other = Explained(fresh)
        assert len(other.run(statement.text, *statement.parameters)) == 10000
        assert offences(other.plans) == []


def claimed(session: Explained, size: int, start: int) -> list[Any]:
    """What the statement claims. It refuses while a transaction of autovacuum is under way, for example."""
    statement = claim(size, start)
    rows: list[Any] = []

    def is_claimed() -> bool:
        rows[:] = session.run(statement.text, *statement.parameters)
        return rows[0][-1] is not None

    until_true(is_claimed)
    return rows


@pytest.mark.parametrize("analyzed", [False, True])
def test_the_statement_that_opens_a_batch_walks_the_index(
    log: psycopg.Connection[Any], connect: Any, analyzed: bool
) -> None:
    def publish(events: int) -> None:
        log.execute(
            "insert into pgmb.log_main (topic, payload) select 'a', '1' from generate_series(1, %s)", [events]
        )

    publish(4200)
    if analyzed:
        log.execute("analyze pgmb.segment_1_0")
    assert len(log.execute("select from pgmb.receive('q', 5000)").fetchall()) == 4200
    session, start = Explained(connect()), 4200
    for size in (1, 3, 20, 100):
        for _ in range(7):  # a generic plan from the sixth on
            publish(size)
            assert len(claimed(session, size, start)) == size
            start += size
            assert offences(session.plans) == []
            assert read_too_much(session.plans, 250) == []
    publish(100_000)
    fresh = Explained(connect())
    for one in (session, *[fresh] * 12):
        statement = claim(500, start)
        assert len(one.run(statement.text, *statement.parameters)) == 500
        start += 500
        assert offences(one.plans) == []
        assert read_too_much(one.plans, 1200) == []
        assert all("JIT" not in plan for _, plan in one.plans)
    assert planned(fresh) == 5


def test_the_guard_itself_sees_a_bad_plan(log: psycopg.Connection[Any], connect: Any) -> None:
    """A guard that never fails guards nothing."""
    fill(log)
    session = Explained(connect())
    session.run("select count(*) from pgmb.segment_1_0")
    assert offences(session.plans) != []
    session.connection.execute("set enable_seqscan = off; set enable_indexscan = off")
    session.run("select seq, payload::text from pgmb.segment_1_0 where seq > 10 order by seq")
    assert offences(session.plans) != []
    assert read_too_much(session.plans, 1000) != []


# Tables that grow by what an administrator creates, not with traffic or time.
SETTINGS = {
    *(
        "installation",
        "clock",
        "lineage",
        "lock_secret",
        "stream",
        "segment",
        "history",
        "lake",
        "archived",
        "reader",
    ),
    *("lake_projection", "lake_field", "leader"),
    *(
        "queue",
        "binding",
        "generation",
        "queue_grant",
        "queue_view",
        "owner",
        "declaration",
        "recent_code",
        "leader",
        "maintenance_failure",
        "schedule",
        "api_key",
        "dispatcher",
        "worker",
    ),
    *("endpoint", "endpoint_secret", "endpoint_activity", "subscription", "shape", "condition"),
    *("stage", "ledger_task", "erasure", "erasure_stream", "erasure_table"),
}
ROWS = 12_000
# Figures are counted up to 10,000 rows (pgmb.queue_status).
FEW_ROWS = 10_500
# These pass all leases in flight: no index tells settled ones apart, because it would cost each ack.
PASS_LEASES = re.compile(
    r"lease_counts\.queue and c\.expires_at|with old as materialized \(\s+select c\.ctid"
)

GROWN = """
insert into pgmb.log_main (topic, payload) select 'none', '1' from generate_series(1, :rows);
insert into pgmb.dedup (stream, key, id, expires_at)
  select 'main', 'k' || n, gen_random_uuid(), now() + interval '1 day' from generate_series(1, :rows) n;
insert into pgmb.attempt (endpoint, attempt, seconds)
  select (select id from pgmb.endpoint), 1, 0 from generate_series(1, :rows);
insert into pgmb.audit (actor, action) select 'a', 'b' from generate_series(1, :rows);
insert into pgmb.access_token (digest, api_key, kind, scopes, expires_at)
  select sha256(n::text::bytea), (select min(id) from pgmb.api_key), 'ticket', '{inspect}',
    now() + interval '1 day' from generate_series(1, :rows) n;
insert into pgmb.dead_batch (stream, number, events, digest)
  select 1, n, 0, '' from generate_series(1, :rows) n;
insert into pgmb.lake_replay (stream, into_stream, after, upto, last, ended_at)
  select 1, 1, pgmb.earliest(), pgmb.earliest(), 0, now() from generate_series(1, :rows);
insert into pgmb.ledger (app, stream, role) select 'app ' || n, 1, 'r' from generate_series(1, :rows) n;
insert into pgmb.ledger_version (app, stream, version, events)
  select 'app', 1, n, 1 from generate_series(1, :rows) n;
insert into pgmb.delayed (id, stream, due_at, topic, payload)
  select gen_random_uuid(), 'main', now() + interval '1 day', 't', '1' from generate_series(1, :rows);
insert into pgmb.tick (stream, id, at, position)
  select t.stream, t.id - n, t.at - n * interval '1 second', t.position
  from pgmb.tick t, generate_series(1, :rows) n where t.stream = 1;
"""


def logged_plans(text: str) -> list[tuple[str, Plan]]:
    """The plans that auto_explain wrote to the server's log."""
    found = []
    for block in re.findall(r"duration: [\d.]+ ms  plan:\n((?:\t.*\n)+)", text):
        document = json.loads(re.sub(r"^\t", "", block, flags=re.MULTILINE))
        found.append((document["Query Text"], document["Plan"]))
    return found


def scans(plans: list[tuple[str, Plan]], grows: set[str]) -> dict[str, str]:
    """Statements that read most of a table that grows, and which one."""
    found = {}
    for text, plan in plans:
        for node in nodes(plan):
            relation = node.get("Relation Name", "")
            grown = "log_main" if WALK.match(relation) else relation
            removed = ("Rows Removed by Filter", "Rows Removed by Index Recheck")
            rows = node.get("Actual Rows", 0) + sum(node.get(one, 0) for one in removed)
            if grown == "claim" and PASS_LEASES.search(text):
                continue
            if grown in grows and rows * node.get("Actual Loops", 1) > FEW_ROWS:
                found[text] = f"{node['Node Type']} on {relation}"
    return found


@pytest.mark.parametrize("analyzed", [False, True], ids=["never analyzed", "analyzed"])
async def test_no_statement_that_a_service_repeats_scans_a_table_that_grows(
    dsn: str, db: psycopg.Connection[Any], server: Server, analyzed: bool
) -> None:
    """The statements are those that the services run here, whatever they are."""
    tables = (
        "select c.relname from pg_class c"
        " where c.relnamespace = 'pgmb'::regnamespace and c.relkind in ('r', 'p')"
    )
    grows = {name for (name,) in db.execute(tables.encode()) if name not in SETTINGS and not WALK.match(name)}
    db.execute("select pgmb.create_queue('busy', '{some}')")
    db.execute("select pgmb.create_queue('q', '{wanted}')")
    db.execute("select pgmb.create_endpoint('e', 'https://endpoint.invalid/', '{wanted}')")
    db.execute("select pgmb.publish('some', '1')")
    db.execute("select pgmb.tick()")
    key = make_key(dsn, "k", "read:main", "inspect")
    for statement in filter(str.strip, GROWN.replace(":rows", str(ROWS)).split(";\n")):
        db.execute(statement.encode())
    add_retries(db, ROWS, "busy", due="1 day")
    add_dead(db, ROWS, "busy")
    add_deliveries(db, ROWS, queue="busy", due="1 day")
    add_settlements(db, ROWS)
    add_leases_of_retries(db, ROWS, "busy")
    for table in grows:
        count = db.execute(f"select count(*) from pgmb.{table}".encode()).fetchone()
        assert count is not None
        assert count[0] >= ROWS, f"fill {table}"
    if analyzed:
        db.execute("analyze")
    # For the sessions that the services open now.
    database = psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]
    settings = {
        "session_preload_libraries": "auto_explain",
        "auto_explain.log_min_duration": "0",
        "auto_explain.log_nested_statements": "on",
        "auto_explain.log_format": "json",
        "auto_explain.log_analyze": "on",
        "auto_explain.log_timing": "off",
    }
    db.execute("load 'auto_explain'")
    for name, value in settings.items():
        db.execute(f"alter database {database} set {name} = {value}".encode())
    began = len(server.log.read_text(errors="replace"))
    seen: list[str] = []
    app = pgmb.App(dsn)
    app.on("wanted", queue="q")(lambda event: seen.append("worker"))
    with serving(dsn, "serve") as served:
        async with working(app) as broker, httpx.AsyncClient(base_url=served.url) as client:
            client.headers["Authorization"] = f"Bearer {key}"
            async with client.stream("GET", "/v1/streams/main/events?topic=wanted", timeout=60) as events:
                lines = events.aiter_lines()
                await anext(lines)
                for _ in range(8):  # PostgreSQL turns to generic plans after five
                    await broker.publish("wanted", 1)
                    async for line in lines:
                        if line.startswith("data:"):
                            break
                for path in ("/readyz", "/metrics", "/v1/queues", "/v1/streams"):
                    (await client.get(path)).raise_for_status()
            done = (
                "select s.last_value > 0, (select count(*) from pgmb.attempt where error is not null) > 0"
                " from pgmb.maintained s"
            )
            await until(lambda: db.execute(done.encode()).fetchone() == (True, True) and len(seen) >= 8)
    plans = logged_plans(server.log.read_text(errors="replace")[began:])
    texts = "\n".join(text for text, _ in plans)
    for repeated in (
        "receive_any",
        "streams_to_tick",
        "maintain()",
        "receive_deliveries",
        "newest_tick",
        "due_schedules",
    ):
        assert repeated in texts, "a service that did nothing shows nothing"
    found = scans(plans, grows)
    assert found == {}, "\n".join(f"{how}: {text}" for text, how in found.items())
