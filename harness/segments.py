"""Segments of a log with events of all kinds, sealed when a test wants it."""

from __future__ import annotations

from typing import Any

import psycopg


def fill(db: psycopg.Connection[Any], events: int, *, stream: str = "main", base: int = 0) -> None:
    """Publish events of several topics and keys: with and without key, headers and an id, large ones too."""
    db.execute(
        f"""
        insert into pgmb."log_{stream}" (id, topic, key, payload, headers)
        select case when g %% 50 = 0 then gen_random_uuid() end, 'order.' || (g %% 7),
          case when g %% 3 > 0 then 'ключ-' || g %% 11 end,
          json_build_object('n', g, 'text', repeat('é', case when g %% 97 = 0 then 2000 else g %% 20 end)),
          case when g %% 5 = 0 then json_build_object('trace', md5(g::text)) end
        from generate_series(%s::int, %s::int) g
        """.encode(),
        [base + 1, base + events],
    )


def seal(db: psycopg.Connection[Any], stream: str = "main") -> int:
    """Close the open segment and seal it: its number."""
    row = rotated(db, stream)
    assert row[0] is not None, "a transaction keeps the next segment from being opened"
    db.execute("select pgmb.seal(%s)", [stream])
    return int(row[0]) - 1


def rotated(db: psycopg.Connection[Any], stream: str) -> tuple[Any, ...]:
    """What pgmb.rotate returns. Asks again while autovacuum has the log: it gives way only after a second."""
    for patience in reversed(range(10)):
        try:
            row: tuple[Any, ...] | None = db.execute("select pgmb.rotate(%s)", [stream]).fetchone()
        except psycopg.errors.LockNotAvailable:
            if not patience:
                raise
        else:
            assert row is not None
            return row
    raise AssertionError
