"""Functions that run with the owner's rights: each is known here, and gives hostile callers nothing."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

from harness.states import queue_names
from tests.contract.cast import Cast
from tests.contract.secret import SECRET, hide
from tests.contract.test_privileges import rows


@pytest.fixture(autouse=True)
def stage(db: psycopg.Connection[Any]) -> None:
    hide(db)


# Every function that runs with the owner's rights, by who may call it. One that is not here fails the test
# below: think of what a hostile caller could do with it first.
CONSUMER = [
    "ack",
    "assert_between",
    "between",
    "between_filtered",
    "between_group",
    "bury",
    "bury_unreadable",
    "claim_next",
    "claims_from",
    "confirm",
    "dead_letters",
    "declare_queue",
    "describe_broker",
    "describe_queues",
    "describe_readers",
    "describe_retention",
    "describe_sinks",
    "describe_streams",
    "describe_workers",
    "divide",
    "drop_dead",
    "earliest",
    "event_fate",
    "extend",
    "forget",
    "identify",
    "keep_subscriptions",
    "lake_between",
    "lake_health",
    "lake_segments",
    "newest",
    "newest_tick",
    "next_events",
    "passing",
    "passing_events",
    "pause",
    "pending_messages",
    "position",
    "position_at",
    "position_of",
    "projection_of",
    "queue_activity",
    "queue_depth",
    "queue_health",
    "queue_of",
    "queue_settings",
    "queue_declarations",
    "runs_other_code",
    "queue_disagreements",
    "receive",
    "receive_group",
    "redrive",
    "release",
    "resume",
    "resume_subscriptions",
    "retry",
    "seq_at",
    "stream_of",
    "stream_settings",
    "subscribe",
    "tick",
    "ticks",
    "unsubscribe",
    "worker_depart",
    "worker_heartbeat",
]
PUBLISHER = [
    "abandon_tasks",
    "attach_mutations",
    "begin_tasks",
    "cancel",
    "claim_stage",
    "claim_task",
    "describe_sinks",
    "finish_task",
    "holder_of_key",
    "publish_stage",
    "publish_tasks",
    "published_version",
    "task_published",
]
ADMIN = [
    "add_endpoint_secret",
    "alter_endpoint",
    "alter_queue",
    "alter_stream",
    "bind",
    "bind_endpoint",
    "browse",
    "browse_dead",
    "browse_event",
    "claim_deliveries",
    "claim_probe",
    "clear_keys",
    "clear_settled",
    "clear_stages",
    "cluster_health",
    "common_errors",
    "convert_queue",
    "create",
    "create_api_key",
    "create_endpoint",
    "create_lake",
    "create_projection",
    "create_queue",
    "create_schedule",
    "create_stream",
    "dead_lake_of",
    "declare_schedules",
    "depart",
    "adopt_archived",
    "archived_segments",
    "describe_lake_segments",
    "describe_fields",
    "describe_lakes",
    "describe_projections",
    "describe_replays",
    "detach_dropped",
    "digest_segment",
    "disable_endpoint",
    "describe_leaders",
    "dispatched_endpoints",
    "dispatched_queues",
    "drop_api_key",
    "drop_dead_letters",
    "drop_endpoint",
    "drop_endpoint_secret",
    "drop_projection",
    "drop_queue",
    "drop_schedule",
    "drop_segments",
    "drop_stream",
    "droppable",
    "due_schedules",
    "reschedule",
    "times_ahead",
    "end_probe",
    "close_for_erasure",
    "count_erasable",
    "describe_erasures",
    "end_erasure",
    "end_replay",
    "erase_lake_traces",
    "erase_segment",
    "erase_waiting",
    "erasure_streams",
    "expect_erased",
    "lake_erasures",
    "note_lake_erasure",
    "lead",
    "open_transactions",
    "record_erased",
    "resign",
    "rewrite_erased",
    "start_erasure",
    "writers_before_erasure",
    "endpoint_backlog",
    "endpoint_backlogs",
    "endpoint_totals",
    "end_session",
    "extend_claimed",
    "find_api_key",
    "find_dead",
    "find_session",
    "fire",
    "hold_api_key",
    "create_access_token",
    "grant_consume",
    "grant_publish",
    "grant_read",
    "hasten_retry",
    "heartbeat",
    "lake_of",
    "start_replay",
    "streams_to_tick",
    "lock_lake",
    "hand_over",
    "lock_projection",
    "log_attempts",
    "maintain",
    "pause_schedule",
    "plan_archive",
    "plan_dead",
    "probe_endpoint",
    "prune_queue",
    "purge",
    "queue_leases",
    "rebase",
    "receive_deliveries",
    "record",
    "orphaned_segments",
    "record_archived",
    "record_damage",
    "record_sound",
    "record_dead",
    "record_fields",
    "record_projection",
    "redrive_dead",
    "redrive_failed",
    "replay",
    "replay_events",
    "report_dead",
    "report_endpoints",
    "report_requests",
    "report_retries",
    "resend",
    "resume_schedule",
    "run_schedule",
    "retry_curve",
    "revoke_consume",
    "revoke_stream",
    "rotate",
    "sample",
    "schedules",
    "seal",
    "seek",
    "set_endpoint_state",
    "settle_claimed",
    "settle_deliveries",
    "stream_health",
    "stream_segments",
    "take_requests",
    "take_ticket",
    "throttle_endpoint",
    "trip_endpoint",
    "worker",
]
INTERNAL = ["publish_mutations", "refuse_full", "refuse_large", "refuse_void", "release_due"]
MATCHER = ["match"]
PARSER = ["parse"]

_DEFINERS = (
    "select p.proname::text, p.oid::regprocedure::text, p.prorettype = 'trigger'::regtype,"
    " array(select format_type(t, null) from unnest(p.proargtypes) with ordinality a (t, n) order by n)"
    " from pg_proc p where p.prosecdef and p.pronamespace = %s::regnamespace order by 2"
)


def test_every_definer_function_has_a_case_here(db: psycopg.Connection[Any], cast: Cast) -> None:
    assert {row[0] for row in rows(db, _DEFINERS, "pgmb")} == {*CONSUMER, *PUBLISHER, *ADMIN}
    assert {row[0] for row in rows(db, _DEFINERS, "pgmb_internal")} == set(INTERNAL)
    assert {row[0] for row in rows(db, _DEFINERS, "pgmb_condition")} == set(MATCHER)
    assert {row[0] for row in rows(db, _DEFINERS, "pgmb_parser")} == set(PARSER)
    for group, allowed in (("pgmb_consumer", CONSUMER), ("pgmb_publisher", PUBLISHER)):
        callable_ = rows(
            db,
            "select distinct p.proname::text from pg_proc p where p.prosecdef"
            " and p.pronamespace = any ('{pgmb,pgmb_internal,pgmb_condition}'::regnamespace[])"
            " and has_function_privilege(%s, p.oid, 'execute')",
            group,
        )
        assert {row[0] for row in callable_} == set(allowed)


INJECTED = "q'); insert into public.secret values ('taken'); --"
HOSTILE: dict[str, list[str]] = {
    "text": [INJECTED, "public.secret", "q", 'x" ; drop table public.secret; --', "main"],
    "text[]": ["{#}", json.dumps([INJECTED]).replace("[", "{").replace("]", "}")],
    "jsonb": [
        '{"payload": {"a": "\'); drop table public.secret; --"}}',
        '{"headers": {"x\' or true --": 1}}',
    ],
    "json": ["{}"],
    "json[]": ["{1,2}"],
    "uuid": ["00000000-0000-0000-0000-000000000000", "000001ff-0000-4000-8000-000000000000"],
    "uuid[]": ["{00000000-0000-0000-0000-000000000000}"],
    "regclass": ["public.secret", "pgmb.queue"],
    "bigint": ["1"],
    "bigint[]": ["{1,2}"],
    "integer": ["1", "-1"],
    "integer[]": ["{1}", "{}"],
    "interval": ["1 s"],
    "interval[]": ["{1 s}"],
    "bytea": ["x"],
    "bytea[]": ["{x}"],
    "xid8": ["1"],
    "boolean[]": ["{t}"],
    "real[]": ["{1}"],
    "double precision": ["1"],
    "double precision[]": ["{1}"],
    "boolean": ["true"],
    "timestamp with time zone": ["now"],
    "timestamp with time zone[]": ["{}"],
    "pg_snapshot": ["1:1000000000:"],
    'pgmb."position"': [""],
    "pgmb.document[]": ["{}"],
}


@pytest.mark.parametrize("group", ["stranger", "pgmb_publisher", "pgmb_consumer"])
def test_hostile_arguments_gain_nothing(db: psycopg.Connection[Any], cast: Cast, group: str) -> None:
    """Each definer function, with texts made to break out of what it puts together."""
    plain = cast.acting(cast.role("plain", *([] if group == "stranger" else [group])))
    plain.execute("set statement_timeout = '60s'; set standard_conforming_strings = off")
    # Who may publish may have stages.
    relations = (
        "select count(*) from pg_class where relname !~ '^stage_[0-9]+$'"
        " and relnamespace <> 'pg_toast'::regnamespace"
    )
    before = rows(db, relations), rows(db, "select count(*) from pg_proc")
    allowed = {"stranger": [], "pgmb_publisher": PUBLISHER, "pgmb_consumer": CONSUMER}[group]
    called = 0
    for schema in ("pgmb", "pgmb_internal", "pgmb_condition"):
        for name, signature, trigger, types in rows(db, _DEFINERS, schema):
            if trigger:
                continue
            most = max((len(HOSTILE[kind]) for kind in types), default=1)
            for nth in range(most):
                values = [HOSTILE[kind][nth % len(HOSTILE[kind])] or None for kind in types]
                arguments = ", ".join(f"%s::{kind}" for kind in types)
                function = f'{schema}."{name}"'
                mine = schema == "pgmb" and name in allowed
                try:
                    got: Any = plain.execute(f"select * from {function}({arguments})", values).fetchall()
                    denied = False
                except psycopg.Error as error:
                    got, denied = str(error), error.sqlstate == "42501"
                assert mine or denied, (group, signature, got)
                assert SECRET not in str(got), (signature, values)
                called += 1
    assert called > 100
    assert rows(db, "select text from public.secret") == [(SECRET,)]
    assert (rows(db, relations), rows(db, "select count(*) from pg_proc")) == before
    assert len(queue_names(db)) == 1
