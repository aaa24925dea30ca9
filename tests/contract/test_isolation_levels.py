"""Promise: every function says which isolation levels it supports, and raises MB029 in the others.

A function that decides by looking at rows that other sessions change needs a fresh snapshot in every
statement: it refuses REPEATABLE READ and SERIALIZABLE. Publishing, reading between positions and functions
that only show something work at every level. docs/explanation/isolation.md has the same table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest

from harness import boundary
from harness.postgres import Server, create_database, drop_database
from harness.sessions import Sessions
from harness.states import take_snapshot

PAGE = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "isolation.md"
STRICTER = ("repeatable read", "serializable")

ENDPOINT = "(select id from pgmb.endpoint where name = 'e')"
SUBSCRIPTION = "(select id from pgmb.subscription limit 1)"
LEASE = "current_setting('test.lease')::uuid"
RUN = "'00000000-0000-0000-0000-000000000001'"
DIGEST = "decode(repeat('00', 32), 'hex')"
NOW = "clock_timestamp()"
ERASURE = "(select id from pgmb.describe_erasures()), '{k}'"
BETWEEN = "'main', pgmb.earliest(), pgmb.position_at('main', 'infinity')"

# A call of each function, by the function's name. In READ COMMITTED each of them succeeds.
ANY_LEVEL = {
    "create_stream": "'another'",
    "alter_stream": "'main', keep_for => '1 day'",
    "publish": "'t', '1', delay => '1 hour', dedup_key => 'k'",
    "publish_many": "'t', array['1']::json[]",
    "cancel": "gen_random_uuid()",
    "send": "gen_random_uuid(), 't', '{}'::jsonb",
    "published_version": "'main', 'app'",
    "task_published": "'main', 'app', 1, 0",
    "create_schedule": "'another', '* * * * *', 't', '1', now()",
    "drop_schedule": "'s'",
    "pause_schedule": "'s'",
    "resume_schedule": "'s', now()",
    "run_schedule": "'s'",
    "schedules": "",
    "due_schedules": "",
    "times_ahead": "",
    "reschedule": "'s', now(), now()",
    "fire": "'s', now() - interval '1 hour', now()",
    "push_table_mutations": "'public.watched'",
    "stop_table_mutations": "'public.watched'",
    "table_mutations": "",
    "position": "",
    "earliest": "",
    "position_at": "'main', now()",
    "newest_tick": "",
    "ticks": "'main', '{0}'",
    "position_of": "'main', (select max(id) from pgmb.tick)",
    "between": BETWEEN,
    "assert_between": BETWEEN,
    "between_filtered": BETWEEN,
    "passing_events": "'main', '{}', '$.a == 1'",
    "between_group": f"'g', {BETWEEN}",
    "forget": "'main', 'r'",
    "identify": "'main'",
    "newest": "'main'",
    "divide": f"{BETWEEN}, 0, 10",
    "matches": "'a.*', 'a.b'",
    "describe_broker": "",
    "describe_retention": "",
    "lake_health": "",
    "endpoint_backlog": ENDPOINT,
    "endpoint_backlogs": "",
    "endpoint_totals": "",
    "stream_of": "'q'",
    "pause": "'q'",
    "resume": "'q'",
    "subscribe": "'g', '{a}'",
    "unsubscribe": "gen_random_uuid()",
    "resume_subscriptions": "'g'",
    "ack": LEASE,
    "retry": LEASE,
    "bury": LEASE,
    "release": LEASE,
    "extend": LEASE,
    "claim_next": "1, 1, 7, null, null, null, true, 0, 0, pg_current_snapshot()",
    "claims_from": "'q'",
    "dead_letters": "'q'",
    "redrive": "'q'",
    "drop_dead": "'q'",
    "alter_endpoint": "'e', rps => 5",
    "set_endpoint_state": "'e', 'paused'",
    "add_endpoint_secret": "'e', '\\x00'",
    "drop_endpoint_secret": "'e'",
    "claim_deliveries": "",
    "settle_claimed": "gen_random_uuid(), '{}'",
    "extend_claimed": "array[gen_random_uuid()]",
    "depart": RUN,
    "trip_endpoint": f"{ENDPOINT}, 'it fails'",
    "throttle_endpoint": f"{ENDPOINT}, '1 s', 'it asked for time'",
    "end_probe": f"{ENDPOINT}, true",
    "claim_probe": ENDPOINT,
    "hasten_retry": ENDPOINT,
    "disable_endpoint": f"{ENDPOINT}, 'it is gone'",
    "log_attempts": ", ".join(["'{}'"] * 10),
    "dispatched_endpoints": "",
    "dispatched_queues": "",
    "redrive_failed": "'e'",
    "droppable": "",
    "lake_of": "'archived'",
    "dead_lake_of": "'archived'",
    "lake_between": "'archived', pgmb.earliest('archived'), pgmb.earliest('archived')",
    "lake_segments": "'archived', 0, 1",
    "seq_at": "'archived', now()",
    "passing": "'{1}', '{t}', '{null}', array['1']::json[], array[null]::json[]",
    "plan_archive": "'archived'",
    "lock_lake": "'archived'",
    "describe_lakes": "",
    "describe_replays": "",
    "report_dead": "now(), now()",
    "report_endpoints": "now(), now()",
    "report_requests": "now(), now()",
    "report_retries": "",
    "archived_segments": "'archived'",
    "orphaned_segments": "'archived'",
    "describe_lake_segments": "",
    "end_replay": "gen_random_uuid()",
    "count_erasable": "'{k}'",
    "describe_erasures": "",
    "erasure_streams": "gen_random_uuid()",
    "lake_erasures": "'archived'",
    "open_transactions": "'10'",
    "writers_before_erasure": "gen_random_uuid(), 'archived'",
    "projection_of": "'p'",
    "describe_projections": "",
    "describe_fields": "'p'",
    "lock_projection": "'p'",
    "drop_projection": "'p'",
    "grant_publish": "'main', 'pgmb_consumer'",
    "grant_read": "'main', 'pgmb_publisher'",
    "grant_consume": "'q', 'pgmb_publisher'",
    "revoke_stream": "'main', 'pgmb_consumer'",
    "revoke_consume": "'q', 'pgmb_consumer'",
    "create_api_key": f"'another', {DIGEST}, '{{inspect}}'",
    "drop_api_key": "'k'",
    "end_session": DIGEST,
    "record": "'somebody', 'something'",
    "browse": "",
    "browse_event": "'main', 1",
    "find_dead": "'q'",
    "browse_dead": "'{1}'",
    "redrive_dead": "'{1}'",
    "drop_dead_letters": "'{1}'",
    "common_errors": "'{1}'",
    "stream_segments": "'main'",
    "queue_leases": "'q'",
    "retry_curve": "'q'",
    "sample": "",
    "event_fate": "gen_random_uuid()",
    "worker_heartbeat": "gen_random_uuid(), 'host', 1, '{q}'",
    "worker_depart": "gen_random_uuid()",
    "queue_declarations": "'q'",
    "runs_other_code": "'q', 'code'",
    "queue_disagreements": "",
    "describe_workers": "",
    "describe_leaders": "",
    "resign": RUN,
    "describe_queues": "",
    "describe_streams": "",
    "describe_readers": "",
    "describe_sinks": "",
    "queue_depth": "'q'",
    "next_events": "'q'",
    "cluster_health": "",
    "stream_health": "",
    "queue_health": "",
    "queue_activity": "",
    "queue_settings": "'q'",
    "stream_settings": "'main'",
    "worker": "'w', 'https://worker.example/'",
    "as_jsonb": "'{}'",
    "pending_messages": "'q'",
    "serialise_record_for_event": "0, 'INSERT', row(1)",
    "stream_id": "'main'",
    "derive_id": "1, now(), 1",
    "fresh_id": "",
    "claim_key": "'main', 'k', gen_random_uuid(), '1 day'",
    "holder_of_key": "'main', 'k'",
    "attach_mutations": "'public.watched', 'insert', 'main'",
    "table_topic": "'public', 'watched'",
    "compile_patterns": "'{a.*}'",
    "fields_object": "'{}', '[]'",
    "streams_to_tick": "",
    "queue_of": LEASE,
}
READ_COMMITTED = {
    "receive": "'q'",
    "bury_unreadable": "'q', 'damaged', 0",
    "receive_any": "'{q}'",
    "receive_group": "'g'",
    "receive_deliveries": "'webhooks'",
    "settle_deliveries": "current_setting('test.deliveries')::uuid",
    "drop_stream": "'unread'",
    "claim_stage": "'main', 'app', 1",
    "publish_stage": "'main', pgmb.claim_stage('main', 'app', 1), 'app', 1, 0",
    "clear_stages": "",
    "publish_tasks": "'main', 'app', 1, '{}', '{}', '{}'",
    "abandon_tasks": "'main', 'app', 1",
    "begin_tasks": f"'main', 'app', 1, {RUN}",
    "claim_task": f"'main', 'begun', 1, 0, {RUN}",
    "finish_task": "'main', 'begun', 1, 0, 0, 0",
    "clear_keys": "",
    "tick": "",
    "confirm": "'main', 'r', pgmb.position()",
    "create_queue": "'another'",
    "alter_queue": "'q', max_attempts => 3",
    "convert_queue": "'g', true",
    "bind": "'q', '{a}'",
    "declare_queue": "null, 'q', '{a}'",
    "declare_schedules": "null, '{}'",
    "hand_over": "'q', 'shop'",
    "prune_queue": "'q'",
    "drop_queue": "'q'",
    "seek": "'q', pgmb.earliest()",
    "purge": "'q'",
    "keep_subscriptions": f"array[{SUBSCRIPTION}]",
    "create_endpoint": "'another', 'https://another.example/'",
    "bind_endpoint": "'e', '{a}'",
    "drop_endpoint": "'e'",
    "heartbeat": f"{RUN}, 'host', 1",
    "take_requests": f"array[{ENDPOINT}], '{{1}}'",
    "probe_endpoint": f"{ENDPOINT}, '1 s'",
    "resend": "'e', array[gen_random_uuid()]",
    "replay": "'e', '-infinity'",
    "rotate": "",
    "seal": "",
    "drop_segments": "",
    "detach_dropped": "",
    "clear_settled": "",
    "maintain": "",
    "lead": f"{RUN}, '{{janitor}}', 'host', 1, 'program'",
    "rebase": "",
    "plan_dead": "'archived'",
    "record_dead": "'archived', 1, 0, sha256(''), 1",
    "create_lake": "'main', '/lake/main'",
    "digest_segment": "'archived', 0",
    "record_archived": "'archived', 0, 0, sha256(''), 1",
    "record_damage": "'archived', 0, 'a file is missing'",
    "record_sound": "'archived', '{0}'",
    "adopt_archived": "'archived', 7, 1, 0, sha256(''), 1",
    "start_replay": f"{BETWEEN}, 10, 'q'",
    "start_erasure": "'{k}', 'requested', '{archived}'",
    "close_for_erasure": "(select id from pgmb.describe_erasures()), 'archived'",
    "erase_segment": f"{ERASURE}, 'archived'",
    "erase_waiting": ERASURE,
    "rewrite_erased": "(select id from pgmb.describe_erasures())",
    "end_erasure": "gen_random_uuid()",
    "erase_lake_traces": f"{ERASURE}, 'archived', '{{}}'",
    "expect_erased": f"{ERASURE}, 'archived', '{{}}', '{{}}', '{{}}'",
    "record_erased": f"{ERASURE}, 'archived', '{{}}', '{{}}', 1",
    "note_lake_erasure": f"{ERASURE}, 'archived', '/lake', '{{}}', '{{}}'",
    "replay_events": "(select id from pgmb.describe_replays()), 0, 1, " + ", ".join(["'{}'"] * 7),
    "create_projection": """'other', 'archived', '{#}', '[{"name": "a", "type": "int"}]'""",
    "record_projection": "'p', 1, 0, 1, 1, 0, 0, 0",
    "record_fields": "'p', 1, '{a}', '{number}', '{1}', '{1}', array[now()], array[now()]",
    "find_api_key": DIGEST,
    "create_access_token": f"1, 'ticket', {DIGEST}, '{{inspect}}', '1 hour'",
    "find_session": DIGEST,
    "hold_api_key": "1",
    "take_ticket": DIGEST,
    "create": f"'made', 'a.*', 3, {ENDPOINT}",
}

SETTING = [
    "create table public.watched (id int primary key)",
    "select pgmb.create_stream('unread')",
    "select pgmb.create_stream('archived'), pgmb.create_lake('archived', '/lake/archived')",
    "select pgmb.plan_dead('archived', empty => true)",
    "select pgmb.rotate('archived')",
    "select pgmb.seal('archived')",
    "select pgmb.create_queue('q'), pgmb.create_queue('g'), pgmb.subscribe('g', '{t}')",
    "select pgmb.create_schedule('s', '* * * * *', 't', '1', now() - interval '1 hour')",
    "select pgmb.create_endpoint('e', 'https://endpoint.example/')",
    "select pgmb.create_api_key('k', decode(repeat('11', 32), 'hex'), '{inspect}')",
    f"select pgmb.begin_tasks('main', 'begun', 1, {RUN})",
    "select pgmb.publish('t', '1')",
    "select pgmb.tick()",
    f"select pgmb.start_replay({BETWEEN}, 10, 'g')",
    "select pgmb.start_erasure('{k}', 'requested', '{archived}')",
    "select pgmb.close_for_erasure(id, 'archived') from pgmb.describe_erasures()",
    """select pgmb.create_projection('p', 'archived', '{#}', '[{"name": "a", "type": "int"}]')""",
    # A segment that was dropped, and is not in the manifest.
    "insert into pgmb.segment (stream, number, dropped_at) values (pgmb.stream_id('archived'), 7, now())",
]


@pytest.fixture(scope="module")
def caller(server: Server, template: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection to a database with one of everything; its transactions are rolled back."""
    name = create_database(server, template)
    with psycopg.connect(server.dsn(name), autocommit=True) as connection:
        for statement in SETTING:
            connection.execute(cast("Any", statement))
        for setting, function, queue in (
            ("test.lease", "receive", "q"),
            ("test.deliveries", "receive_deliveries", "webhooks"),
        ):
            connection.execute(
                cast("Any", f"select set_config(%s, min(lease::text), false) from pgmb.{function}(%s)"),
                [setting, queue],
            )
        yield connection
    drop_database(server, name)


def call(caller: psycopg.Connection[Any], level: str, function: str, arguments: str) -> None:
    """Call a function in a transaction of that level whose snapshot was taken earlier, and roll back."""
    with caller.transaction(force_rollback=True):
        caller.execute(cast("Any", f"set transaction isolation level {level}"))
        take_snapshot(caller)
        caller.execute(cast("Any", f'select * from pgmb."{function}"({arguments})'))


def test_every_public_function_has_its_levels_listed_here() -> None:
    assert {*ANY_LEVEL} & {*READ_COMMITTED} == set()
    assert {*ANY_LEVEL, *READ_COMMITTED} == boundary.documented()


def test_the_documentation_lists_the_same_functions() -> None:
    listed: dict[str, set[str]] = {"any": set(), "read committed": set()}
    rows = [line.split("|")[1:-1] for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    for _, anywhere, committed in rows[1:]:
        listed["any"] |= set(re.findall(r"`(\w+)`", anywhere))
        listed["read committed"] |= set(re.findall(r"`(\w+)`", committed))
    assert listed == {"any": {*ANY_LEVEL}, "read committed": {*READ_COMMITTED}}


@pytest.mark.parametrize("function", sorted(READ_COMMITTED))
def test_a_function_that_looks_at_others_rows_refuses_an_old_snapshot(
    caller: psycopg.Connection[Any], function: str
) -> None:
    call(caller, "read committed", function, READ_COMMITTED[function])
    for level in STRICTER:
        with pytest.raises(psycopg.Error) as refusal:
            call(caller, level, function, READ_COMMITTED[function])
        assert refusal.value.sqlstate == "MB029", refusal.value
        assert "READ COMMITTED" in (refusal.value.diag.message_hint or "")


@pytest.mark.parametrize("function", sorted(ANY_LEVEL))
def test_the_others_work_at_every_isolation_level(caller: psycopg.Connection[Any], function: str) -> None:
    for level in ("read uncommitted", "read committed", *STRICTER):
        call(caller, level, function, ANY_LEVEL[function])


@pytest.mark.parametrize("step", ["maintain", "seal"])
def test_an_event_committed_after_a_janitors_snapshot_is_not_dropped(sessions: Sessions, step: str) -> None:
    """A seal that does not see it would take the segment for one that every queue has passed."""
    admin, writer, janitor = sessions.open("admin", "writer", "janitor")
    admin.run("select pgmb.create_queue('q')")
    admin.run("select pgmb.alter_stream('main', keep_for => '0 s')")
    writer.run("begin")
    writer.run("select pgmb.publish('t', '1')")
    admin.run("select pgmb.rotate()")
    janitor.run("begin isolation level repeatable read")
    take_snapshot(janitor)
    writer.run("commit")
    refused = ""
    try:
        janitor.run(f"select pgmb.{step}()")
    except psycopg.Error as error:
        refused = error.sqlstate or ""
    janitor.run("commit")
    admin.run("select pgmb.maintain()")
    assert admin.run("select payload from pgmb.receive('q')") == [(1,)]
    assert refused == "MB029"
