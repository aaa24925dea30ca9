"""pgmb doctor: each problem is really produced, and named with its fix."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from harness.next_version import next_version
from harness.pgbouncer import PgBouncer
from harness.server import Server
from harness.states import age_leases
from pgmb import doctor, schema
from pgmb.doctor import Finding, Level, Limits, connection, security, server
from pgmb.doctor.finding import Look
from tests.cli.conftest import OpenTerminal, Run
from tests.conftest import Connect, FreshServer
from tests.migration.versions import become

AT_ONCE = Limits(
    pinned_for=timedelta(0),
    standing_for=timedelta(0),
    unkept_for=timedelta(0),
    unarchived_for=timedelta(0),
    held_for=timedelta(0),
    waiting_for=timedelta(0),
    expired=2,
)


def problems(db: psycopg.Connection[Any], limits: Limits = AT_ONCE) -> dict[str, Finding]:
    """The problems by check; every problem has its fix."""
    found = [finding for finding in doctor.examine(db, limits) if finding.problem]
    assert all(finding.fix for finding in found)
    # The shared server runs without fsync, which throwaway data does not need.
    return {finding.check: finding for finding in found if "fsync is off" not in finding.message}


def checked(db: psycopg.Connection[Any], check: str) -> Finding:
    return next(finding for finding in doctor.examine(db, AT_ONCE) if finding.check == check)


def look(*rows: dict[str, Any], limits: Limits = AT_ONCE, apart: float = 0.0) -> Look:
    now = datetime.now(UTC)
    return Look(list(rows), limits, 1, "/tmp", now, now + timedelta(seconds=apart))


# -- the server ----------------------------------------------------------------------------------------------


def test_a_healthy_server_and_one_setting_after_another_gone_wrong(
    fresh_server: FreshServer, install: Any, run: Run
) -> None:
    started = fresh_server(settings={"fsync": "on", "wal_level": "logical", "max_connections": 25})
    install(started.dsn())
    healthy = run("doctor", dsn=started.dsn())
    assert healthy.code == 0, healthy.out
    assert "fail" not in healthy.out
    started.configure({"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off"})
    started.configure({"autovacuum": "off"})
    with started.connect() as db:
        told = [finding.message for finding in doctor.examine(db) if finding.problem]
        assert [text.split(" is off")[0] for text in told] == [
            "fsync",
            "full_page_writes",
            "synchronous_commit",
            "autovacuum",
        ]
        db.execute("select pg_create_logical_replication_slot('left_behind', 'pgoutput')")
        assert "slot left_behind (inactive)" in problems(db)["old transactions"].message
        db.execute("select pg_drop_replication_slot('left_behind')")
        db.execute("drop owned by pgmb_publisher")
        db.execute("drop role pgmb_publisher")
        missing = problems(db)["roles"]
        assert "no role pgmb_publisher" in missing.message
        assert "create role pgmb_publisher nologin" in str(missing.fix)
        crowd = [started.connect() for _ in range(19)]
        assert "of 22 connections" in problems(db)["connections"].message
        for one in crowd:
            one.close()
    failing = run("doctor", "--fail-on", "fail", dsn=started.dsn())
    assert failing.code == 1
    assert "alter system set fsync = on" in failing.out
    started.configure({"fsync": "on", "full_page_writes": "on"})
    assert run("doctor", "--fail-on", "fail", dsn=started.dsn()).code == 0
    assert run("doctor", dsn=started.dsn()).code == 1
    started.stop("immediate")
    gone = run("doctor", dsn=started.dsn())
    assert gone.code == 3
    assert len(gone.err.splitlines()) == 2


def test_a_standby_says_what_it_is(fresh_server: FreshServer, install: Any) -> None:
    primary = fresh_server(name="primary")
    install(primary.dsn())
    with primary.standby() as standby:
        standby.wait_for_replay(primary)
        with standby.connect() as db:
            found = doctor.examine(db)
            assert next(one for one in found if one.check == "standby").level is Level.FAIL
            assert [one for one in found if one.level is Level.SKIP] == []


def test_versions_out_of_range() -> None:
    (old,) = server._version(look({"number": 140010, "version": "14.10"}))
    assert (old.level, old.fix is not None) == (Level.FAIL, True)
    (new,) = server._version(look({"number": 190000, "version": "19.0"}))
    assert new.level is Level.NOTE


def test_clocks_apart() -> None:
    for seconds, words in ((30, "30 s ahead"), (-30, "30 s behind")):
        (told,) = connection._clock(look({"now": datetime.now(UTC) + timedelta(seconds=seconds)}))
        assert words in told.message
    slow = look({"now": datetime.now(UTC) + timedelta(seconds=20)}, apart=60.0)
    assert list(connection._clock(slow)) == [], "an answer that took a minute proves nothing"


def test_a_full_disk_and_one_elsewhere(db: psycopg.Connection[Any]) -> None:
    (told,) = server._disk(look({"directory": "/"}, limits=Limits(disk=1.1)))
    assert (told.level, "keep-for" in str(told.fix)) == (Level.WARN, True)
    for row in ({"directory": None}, {"directory": "/no/such/place"}):
        (told,) = server._disk(look(row))
        assert told.level is Level.SKIP
    assert checked(db, "disk").level in (Level.OK, Level.WARN, Level.SKIP)


def test_an_old_snapshot_and_who_holds_it(db: psycopg.Connection[Any], connect: Connect) -> None:
    holder = connect(autocommit=False)
    holder.execute("set transaction isolation level repeatable read")
    holder.execute("select 'held' from pgmb.stream")
    told = problems(db)["old transactions"]
    assert f"session {holder.info.backend_pid} of postgres (idle in transaction)" in told.message
    assert "select 'held'" in told.message
    assert f"pg_terminate_backend({holder.info.backend_pid})" in str(told.fix)
    assert "old transactions" not in problems(db, Limits())
    holder.rollback()
    assert "old transactions" not in problems(db)


def test_a_session_that_is_idle_in_a_transaction_that_wrote(
    db: psycopg.Connection[Any], connect: Connect
) -> None:
    """It has no snapshot, but what it wrote under its transaction id keeps old rows alive as well."""
    holder = connect(autocommit=False)
    holder.execute("select pgmb.publish('t', '1')")
    told = problems(db)["old transactions"]
    assert f"session {holder.info.backend_pid} of postgres (idle in transaction)" in told.message
    found = db.execute(
        "select state, xids >= 1 from pgmb.xmin_holders where name = %s", [str(holder.info.backend_pid)]
    ).fetchall()
    assert found == [("idle in transaction", True)]
    holder.rollback()


def test_a_prepared_transaction(db: psycopg.Connection[Any]) -> None:
    name = f"left {uuid4()}"
    db.execute("begin")
    db.execute("select pgmb.publish('t', '1')")
    db.execute(f"prepare transaction '{name}'")
    try:
        told = problems(db)["old transactions"]
        assert name in told.message
        assert f"rollback prepared '{name}'" in str(told.fix)
    finally:
        db.execute(f"rollback prepared '{name}'")


def test_autovacuum_switched_off_for_a_table(db: psycopg.Connection[Any]) -> None:
    db.execute("alter table pgmb.claim set (autovacuum_enabled = false)")
    told = problems(db)["autovacuum"]
    assert told.fix == "alter table pgmb.claim reset (autovacuum_enabled);"
    db.execute(str(told.fix).encode())
    assert "autovacuum" not in problems(db)


def test_a_pooler_is_noticed(server: Server, db: psycopg.Connection[Any], run: Run) -> None:
    assert checked(db, "pooler").level is Level.OK
    with PgBouncer.start(server) as bouncer:
        outcome = run("doctor", "--json", dsn=bouncer.dsn(db.info.dbname))
        pooler = next(one for one in outcome.json if one["check"] == "pooler")
        assert pooler["level"] == "note"
        assert "poll" in pooler["message"]


# -- the installation ----------------------------------------------------------------------------------------


def test_a_database_without_the_schema(empty_dsn: str, run: Run) -> None:
    outcome = run("doctor", "--json", dsn=empty_dsn)
    assert outcome.code == 1
    told = {one["check"]: one for one in outcome.json}
    assert (told["schema"]["level"], told["schema"]["fix"]) == ("fail", "pgmb install")
    assert "backlog" not in told


def test_schemas_of_other_versions(
    dsn: str, db: psycopg.Connection[Any], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(monkeypatch, next_version(tmp_path), schema.VERSION + 1)
    old = problems(db)["schema version"]
    assert f"at version {schema.VERSION - 1}, this package installs {schema.VERSION}" in old.message
    assert old.fix == "pgmb upgrade"
    upgraded = run("upgrade", dsn=dsn)
    assert f"from version {schema.VERSION - 1} to {schema.VERSION}" in upgraded.out
    assert "schema version" not in problems(db)
    db.execute("update pgmb.installation set version = 99")
    assert "Upgrade the pgmb package" in str(problems(db)["schema version"].fix)
    db.execute("update pgmb.installation set version = %s", [schema.VERSION])
    db.execute("drop function pgmb.stream_health()")
    assert checked(db, "ticker").level is Level.SKIP
    assert "pgmb install" in str(checked(db, "ticker").fix)


def test_a_log_from_another_cluster(db: psycopg.Connection[Any]) -> None:
    db.execute("update pgmb.installation set system_identifier = 1")
    db.execute("update pgmb.lineage set written = written")
    assert "pgmb.rebase()" in str(problems(db)["cluster"].fix)


def test_indexes_that_are_twice_or_invalid(db: psycopg.Connection[Any]) -> None:
    db.execute("create index again on pgmb.dead (queue, id)")
    assert problems(db)["indexes"].fix == "drop index pgmb.again;"
    db.execute("drop index pgmb.again")
    db.execute("select pgmb.create_queue('a'), pgmb.create_queue('b')")
    with pytest.raises(psycopg.errors.UniqueViolation):
        db.execute("create unique index concurrently broken on pgmb.queue (stream)")
    assert "pgmb.broken is invalid" in problems(db)["indexes"].message


@pytest.fixture
def stranger(db: psycopg.Connection[Any]) -> Iterator[str]:
    """A role without any right in the test's database."""
    name = f"stranger_{uuid4().hex[:8]}"
    db.execute(f"create role {name} login")
    yield name
    db.execute(f"drop owned by {name}")
    db.execute(f"drop role {name}")


def test_what_a_role_may_not_look_at_is_said(
    db: psycopg.Connection[Any], connect: Connect, server: Server, stranger: str, run: Run
) -> None:
    dsn = server.dsn(db.info.dbname, stranger)
    told = problems(connect(dsn))["schema"]
    assert stranger in told.message
    db.execute(f"grant pgmb_publisher to {stranger}")
    outcome = run("doctor", "--json", dsn=dsn)
    levels = {one["check"]: one["level"] for one in outcome.json}
    assert (levels["roles"], levels["cluster"], levels["dead letters"]) == ("ok", "skip", "skip")
    assert levels["old transactions"] == levels["disk"] == "skip"
    assert "Traceback" not in outcome.err
    db.execute(f"grant pgmb_admin to {stranger}")
    levels = {one["check"]: one["level"] for one in run("doctor", "--json", dsn=dsn).json}
    assert [check for check, level in levels.items() if level == "skip"] == ["old transactions", "disk"]
    db.execute(f"revoke pgmb_admin, pgmb_publisher from {stranger}")
    db.execute("select pgmb.grant_publish('main', %s)", [stranger])
    assert "member of none" in problems(connect(dsn))["roles"].message


# -- maintenance ---------------------------------------------------------------------------------------------


def test_a_stream_whose_segment_is_missing_is_told(db: psycopg.Connection[Any]) -> None:
    # As restored from a dump that took longer than two rotations.
    db.execute("select setval('pgmb.seq_main', 5::bigint << 40)")
    told = problems(db)["segments"]
    assert "accepts no events" in told.message
    assert "pgmb.maintain()" in str(told.fix)
    db.execute("select pgmb.maintain()")
    assert "accepts no events" not in str(problems(db).get("segments"))
    db.execute("select pgmb.publish('t', '1')")


def test_what_ticker_and_janitor_leave_undone(db: psycopg.Connection[Any], connect: Connect) -> None:
    db.execute("select pgmb.alter_stream('main', rotate_every => '0 s', archive => true)")
    db.execute("select pgmb.publish('t', '1')")
    db.execute("select pgmb.publish('t', '2', delay => '1 ms')")
    db.execute("select pg_sleep(0.01)")
    assert {"ticker", "janitor", "delayed events"} <= set(problems(db))
    assert "pgmb serve" in str(problems(db)["janitor"].fix)
    writer = connect(autocommit=False)
    writer.execute("select pgmb.publish('t', '3')")
    db.execute("select pgmb.rotate()")
    told = problems(db)
    assert "janitor" not in told
    assert "closed but not sealed" in told["segments"].message
    db.execute("select pgmb.maintain()")
    assert "segments" in problems(db), "a writer is still at it"
    writer.commit()
    # The first call seals, and opens the segment that the writer held up; the second seals what that closed.
    db.execute("select pgmb.maintain()")
    db.execute("select pgmb.maintain()")
    told = problems(db)
    assert "segments" not in told
    assert "delayed events" not in told
    assert "not archived" in told["archive"].message
    db.execute("select pgmb.tick()")
    assert "ticker" not in problems(db)
    assert {"ticker", "janitor", "segments", "archive", "delayed events"}.isdisjoint(problems(db, Limits()))


def test_nobody_who_does_the_upkeep_is_told_within_a_minute(db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.lead(gen_random_uuid(), '{janitor}', 'host1', 7, 'pgmb work')")
    db.execute("select pgmb.maintain()")
    assert "upkeep" not in problems(db, Limits())
    db.execute("select setval('pgmb.maintained', last_value - 61000) from pgmb.maintained")
    told = problems(db, Limits())["upkeep"]
    assert re.search(r"did not run for 6\d s; process host1:7 \(pgmb work\) did it last", told.message)
    assert "pgmb work" in str(told.fix)


def test_a_schedule_whose_topic_nobody_takes(db: psycopg.Connection[Any]) -> None:
    db.execute(
        "select pgmb.create_schedule('daily', '0 0 * * *', 'report.due', '1', now() + interval '1 hour')"
    )
    db.execute("select pgmb.create_queue('q', '{report.*.done}')")
    db.execute("select pgmb.create_endpoint('e', 'https://e.example/', '{order.*}')")
    db.execute("select pgmb.create_stream('other'), pgmb.create_queue('o', '{#}', stream => 'other')")
    message = problems(db)["schedules"].message
    assert message.startswith("schedule daily publishes report.due to stream main, and no queue")
    for taken, undone in (
        ("pgmb.create_queue('r', '{report.#}')", "pgmb.drop_queue('r')"),
        ("pgmb.bind_endpoint('e', '{report.due}')", "pgmb.bind_endpoint('e', '{order.*}')"),
        ("pgmb.create_endpoint('own', 'https://e.example/', ordered => true)", "pgmb.drop_endpoint('own')"),
        ("pgmb.confirm('main', 'r', pgmb.position('main'))", "pgmb.forget('main', 'r')"),
        ("pgmb.pause_schedule('daily')", "pgmb.resume_schedule('daily', now() + interval '1 hour')"),
    ):
        db.execute(f"select {taken}".encode())
        assert "schedules" not in problems(db), taken
        db.execute(f"select {undone}".encode())
        assert "schedules" in problems(db), undone


def test_a_schedule_that_nobody_runs(db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.create_queue('q')")
    db.execute("select pgmb.create_schedule('daily', '0 0 * * *', 't', '1', now() - interval '1 hour')")
    assert "schedule daily is late" in problems(db)["schedules"].message
    db.execute("select pgmb.pause_schedule('daily')")
    assert "schedules" not in problems(db)


def test_claims_that_nobody_clears(db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.create_queue('q')")
    for _ in range(2):
        db.execute("select pgmb.publish('t', '1')")
        db.execute("select pgmb.ack(lease) from pgmb.receive('q', 1)")
    assert "queue q has settled is not cleared" in problems(db)["janitor"].message
    age_leases(db)
    db.execute("select pgmb.maintain()")
    assert "janitor" not in problems(db)


# -- readers -------------------------------------------------------------------------------------------------


def test_a_reader_that_holds_back_retention(db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.alter_stream('main', keep_for => '1 hour')")
    db.execute("select pgmb.confirm('main', 'it''s mine', pgmb.position())")
    db.execute("select pgmb.publish('t', '1')")
    db.execute("select pgmb.rotate()")
    # Sealed once no transaction that was there at the rotation is left, such as autovacuum's.
    deadline = time.monotonic() + 60
    while db.execute("select from pgmb.segment where last_published_at is not null").rowcount == 0:
        assert time.monotonic() < deadline
        db.execute("select pgmb.maintain()")
    assert "readers" not in problems(db)
    db.execute("update pgmb.segment set last_published_at = last_published_at - interval '90 minutes'")
    told = problems(db)["readers"]
    assert (
        "reader it's mine of stream main holds back retention for 30 min: 1 segment, 1 event" in told.message
    )
    assert "readers" not in problems(db, Limits()), "not for long"
    db.execute("update pgmb.segment set last_published_at = last_published_at - interval '1 hour'")
    assert "readers" in problems(db, Limits())
    db.execute("select pgmb.alter_stream('main', drop_unread => true)")
    assert "readers" not in problems(db)
    db.execute("select pgmb.maintain()")
    told = problems(db)["readers"]
    assert "what retention dropped" in told.message
    db.execute(str(told.fix).rpartition(": ")[2].encode())
    assert "readers" not in problems(db)


# -- queues --------------------------------------------------------------------------------------------------


def test_paused_queues_dead_letters_and_a_backlog(db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.create_queue('it''s', '{a}'), pgmb.create_queue('other', '{b}')")
    db.execute("select pgmb.publish('a', '1')")
    assert {"paused queues", "dead letters"}.isdisjoint(problems(db))
    assert "it's wait" in problems(db)["backlog"].message, "and not other, which gets nothing of it"
    db.execute("select pgmb.bury(lease, error => 'e') from pgmb.receive('it''s', 1)")
    told = problems(db)
    assert "backlog" not in told
    assert "1 dead letter" in told["dead letters"].message
    assert "dlq list 'it'\"'\"'s'" in str(told["dead letters"].fix)
    db.execute("select pgmb.pause('it''s', 'deploy')")
    assert "deploy" in problems(db)["paused queues"].message


def test_a_backlog_of_endpoints_is_a_matter_of_the_dispatcher(db: psycopg.Connection[Any]) -> None:
    """Who reads the queue of an endpoint starts no consumers, and does not drop it."""
    db.execute("select pgmb.create_endpoint('shares', 'https://example.com/', '{a}')")
    db.execute("select pgmb.create_endpoint('it''s', 'https://example.com/', '{a}', ordered => true)")
    db.execute("select pgmb.publish('a', '1')")

    def told() -> dict[str, tuple[str, str]]:
        found = [one for one in doctor.examine(db, AT_ONCE) if one.check == "backlog"]
        return {one.message.split(" wait ")[0]: (one.message, str(one.fix)) for one in found}

    own, shared = "events of queue endpoint/it's", "events of queue webhooks"
    assert told().keys() == {own, shared}
    for message, fix in told().values():
        assert message.endswith("and no dispatcher receives")
        assert fix == "Start pgmb serve, or pgmb dispatcher."
    db.execute("select pgmb.trip_endpoint(id, 'http_500') from pgmb.endpoint where name = 'it''s'")
    message, fix = told()[own]
    assert message.endswith(": endpoint it's is tripped")
    assert "pgmb endpoints attempts 'it'\"'\"'s'" in fix
    db.execute("select pgmb.receive('webhooks', 1), pgmb.publish('a', '2')")
    assert told()[shared][0].endswith(": its endpoints do not keep up")
    assert "consumers" not in str(told())


def test_leases_that_expire(db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.create_queue('q', lease_for => '10 ms', backoff_base => '1 hour')")
    db.execute("select pgmb.publish_many('t', '{1,2,3}'::json[])")
    db.execute("select pgmb.receive('q', 3)")
    db.execute("select pg_sleep(0.02)")
    assert "nobody took it over" in problems(db)["leases"].message
    db.execute("select pgmb.receive('q', 3)")
    told = problems(db)["leases"]
    assert "3 events of queue q are tried again" in told.message
    assert "--lease-for" in str(told.fix)
    assert "leases" not in problems(db, Limits())


# -- the command ---------------------------------------------------------------------------------------------


def test_it_finds_the_same_asynchronously(dsn: str, db: psycopg.Connection[Any]) -> None:
    async def ask() -> list[Finding]:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as other:
            return await doctor.aexamine(other, AT_ONCE)

    def shape(findings: list[Finding]) -> list[tuple[str, Level]]:
        return [(one.check, one.level) for one in findings]

    assert shape(asyncio.run(ask())) == shape(doctor.examine(db, AT_ONCE))


def test_times_that_a_wrong_clock_wrote_are_reported(db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.create_schedule('daily', '0 3 * * *', 't', '1', now() + interval '1 year')")
    db.execute("update pgmb.schedule set decided_at = now() + interval '364 days'")
    assert "1 schedules have times in the future" in problems(db)["times"].message
    db.execute("update pgmb.schedule set decided_at = now()")
    assert "times" not in problems(db)


def test_every_check_is_reported_once_and_looking_changes_nothing(db: psycopg.Connection[Any]) -> None:
    with db.transaction():
        names = [finding.check for finding in doctor.examine(db)]
        assert db.execute("select pg_current_xact_id_if_assigned()").fetchone() == (None,)
    assert list(dict.fromkeys(names)) == [check.name for check in doctor.CHECKS]


def test_a_terminal_gets_colours_and_columns(terminal: OpenTerminal) -> None:
    with terminal("doctor", columns=60) as shown:
        assert shown.finish() == 1
        assert "\x1b[" in shown.raw
        assert max(map(len, shown.text.splitlines())) <= 60
    with terminal("doctor", NO_COLOR="1") as shown:
        assert shown.finish() == 1
        assert "\x1b[3" not in shown.raw
        assert "→ alter system set fsync = on" in shown.text


def test_a_worker_that_fell_silent(db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.worker_heartbeat(gen_random_uuid(), 'host7', 4711, '{a,b}')")
    assert checked(db, "workers").level is Level.OK
    db.execute("update pgmb.worker set heartbeat_at = heartbeat_at - interval '3 minutes'")
    assert checked(db, "workers").message == "worker host7:4711 of a, b is silent for 3 min"


def test_workers_that_declare_a_queue_differently(db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.create_queue('q', '{a,old}')")
    for number, (app, rps) in enumerate((("shop", 5), ("mail", 7)), 1):
        worker = uuid4()
        db.execute(
            "select pgmb.worker_heartbeat(%s, 'host7', %s, '{q}', app => %s, shared => %s)",
            [worker, number, app, number == 1],
        )
        db.execute("update pgmb.worker set shared = true")
        db.execute(
            "select pgmb.declare_queue(%s, 'q', '{a}', jsonb_build_object('rps', %s::integer))", [worker, rps]
        )
    db.execute("update pgmb.worker set shared = false")
    found = [finding for finding in doctor.examine(db, AT_ONCE) if finding.check == "declarations"]
    apps = "apps that do not share their queues consume it"
    settings = "live workers declare different settings"
    assert [(finding.level, finding.message) for finding in found] == [
        (Level.WARN, f"queue q: {apps}: app mail on host7:2, app shop on host7:1"),
        (Level.WARN, f"queue q: {settings}: rps = 7 by app mail on host7:2, = 5 by app shop on host7:1"),
        (Level.WARN, "queue q: it is bound to patterns that no live worker declares: old"),
    ]
    assert all(finding.fix for finding in found)
    db.execute("delete from pgmb.worker where app = 'mail'")
    db.execute("select pgmb.prune_queue('q')")
    assert checked(db, "declarations").level is Level.OK


# -- endpoints -----------------------------------------------------------------------------------------------


def test_endpoints_that_fail_and_nobody_who_delivers(db: psycopg.Connection[Any]) -> None:
    for name in ("down", "gone", "well"):
        db.execute("select pgmb.create_endpoint(%s, 'https://example.com/')", [name])
    db.execute("select pgmb.trip_endpoint(id, 'http_500') from pgmb.endpoint where name = 'down'")
    db.execute("select pgmb.disable_endpoint(id, '410 Gone') from pgmb.endpoint where name = 'gone'")
    found = [finding.message for finding in doctor.examine(db, AT_ONCE) if finding.problem]
    assert "endpoint down is tripped: http_500" in found
    assert "endpoint gone is disabled: 410 Gone" in found
    assert "there are 2 endpoints and no dispatcher runs" in found
    db.execute("select pgmb.heartbeat(gen_random_uuid(), 'here', 1)")
    assert checked(db, "dispatchers").level is Level.OK


def test_what_remains_the_operators_affair(db: psycopg.Connection[Any]) -> None:
    name = sql.Identifier(db.info.dbname)
    open_to_all = checked(db, "who may connect")
    assert (open_to_all.level, "revoke connect" in str(open_to_all.fix)) == (Level.NOTE, True)
    db.execute(sql.SQL("revoke connect on database {} from public").format(name))
    assert checked(db, "who may connect").level is Level.OK
    locks = checked(db, "advisory locks")
    assert locks.level is Level.NOTE
    assert "every role may take any advisory lock" in locks.message
    assert checked(db, "owner").level is Level.NOTE
    assert "superuser" in checked(db, "owner").message
    assert checked(db, "encryption").level is Level.OK
    assert checked(db, "signatures").level is Level.OK
    db.execute("select pgmb.create_endpoint('plain', 'https://example.com/')")
    assert "1 endpoints have no secret" in checked(db, "signatures").message
    with db.transaction(force_rollback=True):
        db.execute("create role plain_owner; alter schema pgmb owner to plain_owner")
        assert checked(db, "owner").level is Level.OK


def test_connections_over_a_network_without_tls() -> None:
    far = {"remote": "192.0.2.7", "encrypted": False, "plain": 0}
    (told,) = security._tls(look(far))
    assert told.level is Level.WARN
    assert "192.0.2.7" in told.message
    assert list(security._tls(look({**far, "encrypted": True}))) == []
    assert list(security._tls(look({**far, "remote": None}))) == []
    (others,) = security._tls(look({**far, "remote": None, "plain": 3}))
    assert "3 other connections" in others.message


def test_streams_that_keep_events_for_longer_than_they_should(db: psycopg.Connection[Any]) -> None:
    assert checked(db, "retention").level is Level.OK
    db.execute("select pgmb.create_queue('forgotten')")
    db.execute("select pgmb.publish('t', '1')")
    db.execute("select pgmb.rotate()")
    db.execute("select pgmb.maintain()")
    db.execute("update pgmb.segment set last_published_at = last_published_at - interval '9 days'")
    held = problems(db, Limits())["retention"]
    assert "stream main keeps events for 2 d longer than its 7 d" in held.message
    db.execute("select pgmb.alter_stream('main', keep_for => '-1 s')")
    assert checked(db, "retention").level is Level.NOTE
