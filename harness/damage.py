"""Damage stored events, as a failing disk does."""

from __future__ import annotations

from typing import Any

import psycopg


def damage(db: psycopg.Connection[Any], table: str) -> None:
    """Take away the chunks of the table's large values. The database cannot be used again."""
    row = db.execute(
        "select c.reltoastrelid::regclass::text from pg_class c where c.oid = %s::regclass", [table]
    ).fetchone()
    assert row is not None
    toast = row[0]
    db.execute("set allow_system_table_mods = on")
    db.execute("update pg_class set relkind = 'r' where oid = %s::regclass", [toast])
    db.execute(f"delete from {toast}")
    db.execute("update pg_class set relkind = 't' where oid = %s::regclass", [toast])
    db.execute("reset allow_system_table_mods")
    # Deleting a row deletes its chunks, and fails on chunks that are deleted already but not yet removed.
    db.execute(f"vacuum {toast}")


def publish_damaged(db: psycopg.Connection[Any], topic: str = "damaged", key: str | None = None) -> None:
    """Publish an event to `main`, which no large event follows, that cannot be read."""
    db.execute(
        "select pgmb.publish(%s, to_json(string_agg(md5(n::text), '')), key => %s)"
        " from generate_series(1, 1000) n",
        [topic, key],
    )
    damage(db, "pgmb.segment_1_0")
