"""A transaction that writes much and commits late is read in one pass, wherever a reader met it."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from tests.conftest import Connect

# Costs are measured: rows that other tests left would count.
pytestmark = pytest.mark.new_database

EVENTS = 20_000


def reads(db: psycopg.Connection[Any]) -> int:
    """How many index entries of the log were looked at so far."""
    db.execute("select pg_stat_force_next_flush()")
    ((number,),) = db.execute(
        "select coalesce(sum(idx_tup_read), 0) from pg_stat_user_indexes where relname like 'segment%'"
    ).fetchall()
    return int(number)


def late(connect: Connect, meet: str) -> tuple[psycopg.Connection[Any], str]:
    """A log in which one large transaction was half written when somebody took their position."""
    reader, writer = connect(), connect(autocommit=False)
    half = f"select pgmb.publish_many('a', array(select to_json(n) from generate_series(1, {EVENTS // 2}) n))"
    writer.execute(half)
    taken = reader.execute(meet).fetchall()[0][0]
    writer.execute(half)
    writer.commit()
    return reader, taken


@pytest.mark.parametrize("settle", ["ack", "retry"])
def test_a_queue_reads_it_once(connect: Connect, settle: str) -> None:
    db, _ = late(connect, "select pgmb.create_queue('q', max_attempts => 1)")
    before = reads(db)
    got: list[int] = []
    while rows := db.execute("select lease, payload from pgmb.receive('q', 500)").fetchall():
        got += [payload for _, payload in rows]
        db.execute(f"select pgmb.{settle}(%s)", [rows[0][0]])
    assert len(got) == EVENTS
    assert got == [*range(1, EVENTS // 2 + 1)] * 2
    # What fails is read once more, by its number, to be copied.
    assert (reads(db) - before) / EVENTS < (20 if settle == "ack" else 30)


def test_pages_between_positions_read_it_once(connect: Connect) -> None:
    db, taken = late(connect, "select pgmb.position()::text")
    before = reads(db)
    page = "select seq from pgmb.between(%s, %s::pgmb.position, %s::pgmb.position, %s, 500)"
    upto = db.execute("select pgmb.position()::text").fetchall()[0][0]
    seqs: list[int] = [0]
    while rows := db.execute(page, ["main", taken, upto, seqs[-1]]).fetchall():
        seqs += [seq for (seq,) in rows]
    assert len(seqs) == EVENTS + 1
    assert seqs == sorted(seqs)
    assert (reads(db) - before) / EVENTS < 20
