"""A restricted operation of PostgreSQL that runs functions of pgmb is refused with a hint.

What the owner of a table tries in such operations is in tests/adversary/test_any_table_owner.py.
"""

from __future__ import annotations

from typing import Any

import psycopg
import pytest


def test_a_materialized_view_of_pgmb_is_refused_with_a_hint(db: psycopg.Connection[Any]) -> None:
    """Nothing tells whose definition it is. A view, or a table that is filled by the caller, works."""
    db.execute("select pgmb.create_queue('q')")
    with pytest.raises(psycopg.Error, match="cannot tell which role calls") as refusal:
        db.execute("create materialized view depths as select queue, waiting from pgmb.queue_status")
    assert refusal.value.sqlstate == "MB042"
    db.execute("create table depths as select queue, waiting from pgmb.queue_status")
    assert db.execute("select queue from depths").fetchall() == [("q",)]
