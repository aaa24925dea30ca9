"""How large an event may be: at the tables themselves, whichever way it comes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import errors

import pgmb

if TYPE_CHECKING:
    from tests.conftest import Connect

MIB = 1 << 20
LARGEST_PAYLOAD = 48 * MIB
LARGEST_HEADERS = 16 * MIB

_PAYLOAD = "('\"' || repeat('x', {} - 2) || '\"')::json"


def text_of(size: int) -> str:
    """An SQL expression for a JSON string of `size` bytes."""
    return _PAYLOAD.format(size)


WAYS = {
    "insert": "insert into pgmb.log_main (topic, payload, headers) values ('a', '1', {})",
    "publish": "select pgmb.publish('a', '1', headers => {})",
    "publish_many": "select pgmb.publish_many('a', array['1'::json], {})",
    "columns": "select pgmb.publish_many(array['a'], array['1'::json], headers => array[{}])",
    "delayed": "select pgmb.publish('a', '1', headers => {}, delay => '1 day')",
    "delayed insert": "insert into pgmb.delayed (id, stream, due_at, topic, payload, headers)"
    " values (gen_random_uuid(), 'main', now(), 'a', '1', {})",
    "schedule": "insert into pgmb.schedule (name, cron, stream, topic, payload, headers)"
    " values ('s', '* * * * *', 'main', 'a', '1', {})",
}


@pytest.mark.parametrize("way", WAYS)
def test_headers_above_the_largest_are_refused(db: psycopg.Connection[Any], way: str) -> None:
    with pytest.raises(errors.CheckViolation, match="headers must have at most 16 MiB"):
        db.execute(WAYS[way].format(text_of(LARGEST_HEADERS + 1)))


def test_copy_into_the_log_and_into_a_stage_refuses_large_headers(db: psycopg.Connection[Any]) -> None:
    large = '"' + "x" * LARGEST_HEADERS + '"'
    stage = db.execute("select pgmb.claim_stage('main', 'app')").fetchone()
    assert stage is not None
    for table in ("log_main", f"stage_{stage[0]}"):
        with (
            pytest.raises(errors.CheckViolation, match="headers must have at most 16 MiB"),
            db.cursor().copy(f"copy pgmb.{table} (topic, payload, headers) from stdin") as copy,
        ):
            copy.write_row(("a", "1", large))


def test_compressed_headers_of_another_table_are_measured_as_text(db: psycopg.Connection[Any]) -> None:
    # Their stored size is a ninetieth of their text.
    db.execute(f"create table public.other as select {text_of(LARGEST_HEADERS + 1)} headers")
    with pytest.raises(errors.CheckViolation, match="headers must have at most 16 MiB"):
        db.execute(
            "insert into pgmb.log_main (topic, payload, headers) select 'a', '1', headers from public.other"
        )


def test_every_way_into_a_log_has_the_types_that_bound_events(db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.claim_stage('main', 'app')")
    columns = db.execute(
        "select c.relname::text, a.attname::text, a.atttypid::regtype::text from pg_attribute a"
        " join pg_class c on c.oid = a.attrelid"
        " where c.relnamespace = 'pgmb'::regnamespace and c.relkind in ('r', 'p')"
        " and a.attname in ('payload', 'headers')"
        " and c.relname ~ '^(log_|segment_|stage_|delayed$|schedule$)' and c.relname <> 'stage'"
    ).fetchall()
    assert {name.rstrip("0123456789_") for name, *_ in columns} == {
        "log_main",
        "segment",
        "stage",
        "delayed",
        "schedule",
    }
    for _, column, type_ in columns:
        assert type_ == f"pgmb.event_{column}"


@pytest.mark.minutes
def test_payload_and_headers_of_64_mib_are_delivered(db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.create_queue('q')")
    with pytest.raises(errors.CheckViolation, match="a payload must have at most 48 MiB"):
        db.execute(f"select pgmb.publish('a', {text_of(LARGEST_PAYLOAD + 1)})")
    db.execute(f"select pgmb.publish('a', {text_of(LARGEST_PAYLOAD)}, headers => {text_of(LARGEST_HEADERS)})")
    sizes = db.execute(
        "select length(payload::text), length(headers::text) from pgmb.receive('q')"
    ).fetchall()
    assert sizes == [(LARGEST_PAYLOAD, LARGEST_HEADERS)]


def test_max_event_bytes_bounds_payload_and_headers_together(dsn: str, db: psycopg.Connection[Any]) -> None:
    with pgmb.connect(dsn) as broker:
        broker.create_stream("s", max_event_bytes=2000)
        broker.publish("a", "x" * 1000, headers={"h": "y" * 900}, stream="s")
        with pytest.raises(pgmb.InvalidArgument, match="payload and headers must have at most 2000 bytes"):
            broker.publish("a", "x" * 1000, headers={"h": "y" * 1000}, stream="s")
        with pytest.raises(pgmb.InvalidArgument, match="payload and headers must have at most 2000 bytes"):
            broker.publish("a", "x" * 2000, stream="s", delay=60)
        with pytest.raises(pgmb.InvalidArgument, match="payload and headers must have at most 2000 bytes"):
            broker.publish_many("a", ["x" * 2000] * 3000, stream="s")
        with pytest.raises(pgmb.InvalidArgument, match="max_event_bytes must be between 1024 and 67108864"):
            broker.alter_stream("s", max_event_bytes=67108865)
        broker.alter_stream("s", max_event_bytes=-1)
        broker.publish("a", "x" * 5000, stream="s")
        # The next segments have it too.
        broker.alter_stream("s", max_event_bytes=1024)
        for _ in range(2):
            broker.rotate("s")
            with pytest.raises(
                pgmb.InvalidArgument, match="payload and headers must have at most 1024 bytes"
            ):
                broker.publish("a", "x" * 2000, stream="s")


def test_a_delayed_event_accepted_before_the_limit_fell_is_released(db: psycopg.Connection[Any]) -> None:
    db.execute(
        "select pgmb.create_stream('s', max_event_bytes => 5000), pgmb.create_queue('q', stream => 's')"
    )
    db.execute(f"select pgmb.publish('a', {text_of(4000)}, stream => 's', delay => '50 ms')")
    db.execute("select pgmb.alter_stream('s', max_event_bytes => 1024)")
    db.execute("select pg_sleep(0.1)")
    db.execute("select pgmb.tick('s')")
    assert len(db.execute("select from pgmb.receive('q')").fetchall()) == 1


def test_a_publisher_cannot_pass_the_limit_by_the_setting_of_releases(
    db: psycopg.Connection[Any], connect: Connect
) -> None:
    db.execute("select pgmb.create_stream('s', max_event_bytes => 1024)")
    db.execute("drop role if exists pgmb_test_large")
    db.execute("create role pgmb_test_large in role pgmb_publisher")
    try:
        db.execute("set role pgmb_test_large")
        db.execute("set pgmb.releasing = on")
        with pytest.raises(errors.CheckViolation, match="payload and headers must have at most 1024 bytes"):
            db.execute(f"insert into pgmb.log_s (topic, payload) values ('a', {text_of(2000)})")
    finally:
        db.execute("reset role")
        db.execute("drop role pgmb_test_large")
