"""What tables published, read back from the log."""

from __future__ import annotations

from typing import Any, NamedTuple

import psycopg


class Mutation(NamedTuple):
    topic: str
    key: str | None
    row: Any
    old: Any = None
    changed: Any = None


def mutations(db: psycopg.Connection[Any], stream: str = "main") -> list[Mutation]:
    """Every event of the stream, in the log's order; the log is empty afterwards."""
    rows = db.execute(f'select topic, key, payload, headers from pgmb."log_{stream}" order by seq').fetchall()
    db.execute(f'truncate pgmb."log_{stream}"')
    found = []
    for topic, key, payload, headers in rows:
        assert headers is None or set(headers) == {"old", "changed"}
        headers = headers or {}
        found.append(Mutation(topic, key, payload, headers.get("old"), headers.get("changed")))
    return found


def watch(db: psycopg.Connection[Any], table: str, **options: Any) -> None:
    given = "".join(f", {name} => %({name})s" for name in options)
    db.execute(f"select pgmb.push_table_mutations(%(tabl)s{given})", {"tabl": table, **options})
