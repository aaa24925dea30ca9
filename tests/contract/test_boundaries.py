"""Promise: the boundary of a batch, a snapshot with a number, is made in one place.

The sequence must be read after the snapshot: otherwise an event that the snapshot shows can have a number
above the boundary, and the next batch counts it as read. `pgmb_internal.boundary` keeps that order. Every
other function that takes a snapshot, or sets the batch of a queue's position, is listed with the reason.
"""

from __future__ import annotations

import re
from typing import Any

import psycopg
import pytest

from faults.queue import dropping
from pgmb import schema

SNAPSHOTS = {
    "pgmb_internal.snapshot": "what the others call",
    "pgmb_internal.boundary": "the constructor: the snapshot, then the sequence",
    "pgmb_internal.take_position": "a position: the sequence, an xid, then the snapshot; a lower bound",
    "pgmb.receive": "the order of boundary() written out: every receive would pay for the call",
    "pgmb.claim_next": "compares the caller's snapshot with the present one; the sequence comes after",
    "pgmb_internal.make_tick": "asks whether open transactions have ended; calls take_position()",
    "pgmb.streams_to_tick": "asks whether open transactions have ended",
    "pgmb.describe_readers": "counts late events at or below a given position",
    "pgmb_internal.snapshot_with_own": "a view's: what the statement shows, without a number",
    "pgmb.pending_messages": "reads all that snapshot_with_own() shows, without a number",
    "pgmq.unread": "reads all that snapshot_with_own() shows, without a number",
    "pgmq.count_unread": "counts all that the statement shows; numbers are the old position's",
    "pgmb_internal.is_same_lineage": "compares transaction ids",
    "pgmb_internal.fate": "completes a transaction id to 64 bits",
    "pgmb_internal.unused_xid": "looks for a transaction id",
    "pgmb_internal.unfinished_upto": "lists transactions",
}
POSITIONS = {
    "pgmb_internal.open_batch": "the next batch of a queue, by boundary()",
    "pgmb_internal.at_position": "an empty batch at a position that take_position() or a tick made",
    "pgmb_internal.note_pair": "where the batch after this one starts: a number and a later transaction id",
    "pgmb_internal.write_claim": "writes the position that open_batch() or at_position() made",
    "pgmb.receive": "open_batch() and write_claim() written out for the short way",
    "pgmb.claim_next": "the batch of a caller's snapshot, refused unless its numbers have no gap",
    "pgmb_internal.rebased_position": "the log has one transaction id: numbers alone divide it",
    "pgmb_internal.pending": "open_batch() up to a snapshot that is given; writes no claim",
    "pgmb_internal.why_skipped": "reads a position that the queue had; writes no claim",
}

_TAKES_SNAPSHOT = re.compile(r"\bpg_current_snapshot\b|pgmb_internal\.snapshot\b|\bwith_own\b|_with_own\(")
_SETS_BATCH = re.compile(
    r"insert into pgmb\.claim\b"
    r"|\b\w+\.(?:done_snapshot|batch_snapshot|batch_seq|batch_next|done_seq|done_next|upto)\s*:="
)


def matching(db: psycopg.Connection[Any], pattern: re.Pattern[str]) -> set[str]:
    """The installed functions whose code matches, comments apart."""
    rows = db.execute(
        "select n.nspname || '.' || p.proname, p.prosrc from pg_proc p"
        " join pg_namespace n on n.oid = p.pronamespace where n.nspname ~ '^pgm[bq]'"
    ).fetchall()
    return {name for name, code in rows if pattern.search(re.sub(r"--[^\n]*", "", code))}


@pytest.fixture
def installed(db: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    schema.install(db, compat=("pgmq",))
    return db


def test_no_other_function_takes_a_snapshot_or_sets_a_batch(installed: psycopg.Connection[Any]) -> None:
    assert matching(installed, _TAKES_SNAPSHOT) == SNAPSHOTS.keys()
    assert matching(installed, _SETS_BATCH) == POSITIONS.keys()


@pytest.mark.parametrize(
    "code",
    [
        "begin base.batch_snapshot := pgmb_internal.snapshot(); return base; end",
        "begin base.upto := pgmb_internal.last_seq('main'); return base; end",
        "begin insert into pgmb.claim select base.*; return base; end",
    ],
)
def test_the_rule_catches_another_boundary(db: psycopg.Connection[Any], code: str) -> None:
    db.execute(
        "create function pgmb_internal.added(base pgmb.claim) returns pgmb.claim language plpgsql as $$"
        + code
        + "$$"
    )
    assert "pgmb_internal.added" in matching(db, _SETS_BATCH)


@pytest.mark.once
def test_the_first_drop_of_a_session_loses_none_of_the_newest_events(dsn: str) -> None:
    result = dropping.run(dsn, cycles=12)
    assert result.holds, str(result)
