"""Projections for other tools: sources of dbt, and views for DuckDB and Spark SQL. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from psycopg.conninfo import conninfo_to_dict, make_conninfo

_EVENT: Final = {
    "event_seq": ("bigint", "The number of the event in its stream"),
    "event_id": ("string", "The id of the event"),
    "event_topic": ("string", "The topic of the event"),
    "event_key": ("string", "The key of the event"),
    "event_published_at": ("timestamp", "When the event was published"),
}
_RESCUE: Final = {
    "rescued": ("string", "The payload, if it does not fit the columns"),
    "rescue_reason": ("string", "Why it does not fit"),
    "event_date": ("date", "The UTC date of event_published_at, by which the table is partitioned"),
}


def dbt_sources(projections: Iterable[Any]) -> str:
    """The file sources.yml of dbt: a source per stream, with a table per projection."""
    streams: dict[str, list[dict[str, Any]]] = {}
    for one in projections:
        streams.setdefault(one.stream, []).append(
            {
                "name": one.name,
                "description": f"Events {', '.join(one.patterns)} of stream {one.stream}, projected by pgmb",
                "config": {
                    # dbt-duckdb reads the table from here.
                    "meta": {"external_location": f"delta_scan({_literal(_location(one.url))})"},
                    "loaded_at_field": "event_published_at",
                },
                "columns": [
                    *(_described(name, kind, text) for name, (kind, text) in _EVENT.items()),
                    *({"name": column.name, "data_type": column.type} for column in one.columns),
                    *(_described(name, kind, text) for name, (kind, text) in _RESCUE.items()),
                ],
            }
        )
    sources = [{"name": stream, "tables": tables} for stream, tables in streams.items()]
    return msgspec.yaml.encode({"version": 2, "sources": sources}).decode()


def _described(name: str, kind: str, text: str) -> dict[str, Any]:
    column: dict[str, Any] = {"name": name, "data_type": kind, "description": text}
    if name in ("event_seq", "event_id"):
        column["data_tests"] = ["unique", "not_null"]
    return column


def duckdb_view(name: str, url: str, files: Sequence[str] | None = None) -> str:
    """A view for DuckDB: of the newest version, by its extension for Delta, or of these files."""
    source = (
        f"delta_scan({_literal(_location(url))})"
        if files is None
        else "read_parquet([" + ", ".join(map(_literal, files)) + "], hive_partitioning = true)"
    )
    return f"create or replace view {_name(name)} as\nselect * from {source};"


def spark_view(name: str, dsn: str) -> str:
    """A view for Spark SQL. A password is left out: give it by PGPASSWORD or a password file."""
    parts = {key: value for key, value in conninfo_to_dict(dsn).items() if key != "password"}
    url = make_conninfo("", **parts)
    return (
        f"create or replace temporary view `{name}` using pgmb\n"
        f"options (url {_escaped(url)}, projection {_escaped(name)});"
    )


def _location(url: str) -> str:
    return url if urlsplit(url).scheme else f"file://{url}"


def _name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _escaped(text: str) -> str:
    """A literal of Spark SQL, in which a backslash escapes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
