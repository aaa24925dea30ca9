"""pgmb erase, and the list of erasures."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

import typer
from psycopg.rows import dict_row

from pgmb._core.connecting import connect
from pgmb.cli import durations, output
from pgmb.cli.options import AsJson, Dsn, StorageOption, Yes, storage_options
from pgmb.cli.terminal import confirm
from pgmb.erasure import ErasedTable, Eraser
from pgmb.errors import translated

_ERASURES = (
    "select id, begun_at, ended_at, role, reason, keys, streams, tables from pgmb.describe_erasures(%s)"
)
_WAIT = timedelta(minutes=10)


def register(app: typer.Typer) -> None:
    app.command()(erase)
    app.command()(erasures)


def erase(
    key: Annotated[list[str], typer.Option(help="The key of the events. May be repeated.")],
    dsn: Dsn = "",
    stream: Annotated[
        list[str] | None, typer.Option(help="Only these. By default all streams.", show_default=False)
    ] = None,
    reason: Annotated[
        str, typer.Option(help="Why. It is stored: leave out the key.", show_default=False)
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    wait: Annotated[
        timedelta | None,
        typer.Option(
            parser=durations.parse,
            metavar="DURATION",
            help="How long to wait for other transactions to end.",
            show_default="10m",
        ),
    ] = None,
    storage_option: StorageOption = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Erase all events of a key: log, retries, dead letters, delayed events, and the lake.

    Numbers, ids, topics and times stay; keys, payloads and headers are removed for good. If it is killed,
    run it again with the same keys: it continues.
    """
    eraser = Eraser(
        dsn,
        key,
        streams=stream,
        options=storage_options(storage_option),
        wait=(wait or _WAIT).total_seconds(),
        told=None if as_json else output.line,
    )
    if dry_run:
        _show(eraser.count(), as_json)
        return
    if not reason.strip():
        raise typer.BadParameter("--reason is required: it is stored with the erasure.")
    if not yes:
        found = eraser.count()
        _show(found, as_json=False)
        confirm(f"Erase the events of {len(key):,} key{'' if len(key) == 1 else 's'} for good?", yes)
    done = eraser.erase(reason)
    if as_json:
        output.json(done)
    else:
        _show(done.tables, as_json)
        output.line(f"Erasure {done.id} is complete.")


def erasures(
    dsn: Dsn = "",
    key: Annotated[str | None, typer.Option(help="Only those that erased this key.")] = None,
    as_json: AsJson = False,
) -> None:
    """List erasures. Keys are not stored; --key finds those of a key by its digest."""
    with connect(dsn, "pgmb cli") as database, translated(), database.cursor(row_factory=dict_row) as cursor:
        found: list[dict[str, Any]] = cursor.execute(_ERASURES, [key]).fetchall()
    if as_json:
        output.json(found)
    elif found:
        rows = [
            [
                *(row[name] for name in ("id", "begun_at", "ended_at", "role", "keys", "streams")),
                sum(table["events"] for table in row["tables"]),
                row["reason"],
            ]
            for row in found
        ]
        names = ("id", "begun", "ended", "role", "keys", "streams", "rows", "reason")
        output.table("Erasures", names, rows)
    else:
        output.line("No erasures.")


def _show(tables: list[ErasedTable], as_json: bool) -> None:
    if as_json:
        output.json(tables)
    elif tables:
        output.table("Rows", ("table", "rows", "files"), [(t.name, t.events, len(t.files)) for t in tables])
    else:
        output.line("No rows have such a key.")
