"""Promise: when something is to happen is stored with the time of that decision, from the same clock.

Without it nothing tells that the time was written while the clock was ahead, and nothing corrects it.
"""

from __future__ import annotations

import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgmb
from harness.states import lease_durations, publish

SOURCES = Path(pgmb.__file__).parent / "sql"
UPDATE = re.compile(
    r"update pgmb\.(?:retry|delivery|delayed)\b.*?(?=;|\bupdate pgmb\.|\binsert into\b)", re.DOTALL
)
"""One update, with what follows it in the same statement up to the next that writes."""

# What the time of a decision is compared with is read from clock_timestamp().
DECISIONS = [
    ("claim", "at"),
    ("claim", "extended_at"),
    ("retry", "decided_at"),
    ("delivery", "decided_at"),
    ("delayed", "decided_at"),
]


def undecided(text: str) -> list[str]:
    """Updates that set a due time and not when it was decided."""
    return [
        one for one in UPDATE.findall(text) if re.search(r"\bdue_at = ", one) and "decided_at = " not in one
    ]


def test_every_update_of_a_due_time_says_when_it_was_decided() -> None:
    texts = {path.relative_to(SOURCES): path.read_text() for path in sorted(SOURCES.rglob("*.sql"))}
    assert sum(len(UPDATE.findall(text)) for text in texts.values()) > 10
    assert {str(path): found for path, text in texts.items() if (found := undecided(text))} == {}


def test_an_update_without_the_time_of_its_decision_is_found() -> None:
    good = "update pgmb.retry r set due_at = now, decided_at = now where r.id = 1;"
    bad = "with a as (update pgmb.delivery d set due_at = now where d.id = 1 returning d.id), b as ("
    assert len(undecided(bad + good + ")")) == 1
    assert undecided(good) == []


@pytest.mark.parametrize(("table", "column"), DECISIONS)
def test_the_time_of_a_decision_is_read_when_it_is_made(
    db: psycopg.Connection[Any], table: str, column: str
) -> None:
    """A transaction's own time may be long past, from before a step of the clock."""
    row = db.execute(
        "select pg_get_expr(d.adbin, d.adrelid) from pg_attribute a"
        " left join pg_attrdef d on (d.adrelid, d.adnum) = (a.attrelid, a.attnum)"
        " where a.attrelid = format('pgmb.%%I', %s::text)::regclass and a.attname = %s",
        [table, column],
    ).fetchone()
    assert row in {(None,), ("clock_timestamp()",)}


@pytest.mark.parametrize(
    "settings",
    [
        "ordered => false",
        "ordered => true",
        "fair_by => 'key'",
        "lanes => '{urgent}'",
        "filter => '$.payload >= 0'",
    ],
)
def test_a_lease_and_its_end_rest_on_one_reading_of_the_clock(
    db: psycopg.Connection[Any], settings: str
) -> None:
    """Of two readings, one may be before a step of the clock and one behind it."""
    db.execute(f"select pgmb.create_queue('q', {settings})".encode())
    receive = "select lease from pgmb.receive('q', 1, '7 min')"
    publish(db, 3, keys=("a", "b", "c"))
    for leases, how in enumerate(("release", "extend", "keep"), 1):
        ((lease,),) = db.execute(receive).fetchall()
        if how == "release":
            db.execute("select pgmb.release(%s)", [lease])
            db.execute(receive)
        elif how == "extend":
            db.execute("select pgmb.extend(%s, '7 min')", [lease])
        assert lease_durations(db) == [timedelta(minutes=7)] * leases
        time.sleep(0.06)
