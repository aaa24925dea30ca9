"""pgmb lake verify, compact, vacuum, adopt, and what `pgmb lake status` says of segments that are held up."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
import typer
from psycopg.rows import dict_row

from pgmb._core.connecting import connect
from pgmb.cli import durations, moments, output
from pgmb.cli.options import AsJson, Dsn, StorageOption, Stream
from pgmb.cli.spark.session import Conf
from pgmb.errors import translated

if TYPE_CHECKING:
    from pgmb.lake.care import Keeper

Opened: TypeAlias = Callable[..., AbstractContextManager["Keeper"]]

_SEGMENTS = "select stream, segment, state, since, reason from pgmb.describe_lake_segments()"
_BYTES = re.compile(r"(\d+)\s*(kb|mb|gb)?")
_UNITS = {None: 1, "kb": 1024, "mb": 1024**2, "gb": 1024**3}
_KEEP = timedelta(days=7)


def parse_bytes(text: str) -> int:
    found = _BYTES.fullmatch(text.strip().lower())
    if found is None or int(found[1]) == 0:
        raise typer.BadParameter(f"not a size: {text!r}. Write 256MB.")
    return int(found[1]) * _UNITS[found[2]]


def register(lake: typer.Typer, opened: Opened) -> None:
    """Add the commands. `opened` opens the keeper of a stream, with options of the storage."""

    @lake.command()
    def verify(
        dsn: Dsn = "",
        stream: Stream = "main",
        since: Annotated[
            moments.Moment | None,
            typer.Option(
                parser=moments.parse,
                metavar="TIME",
                help="Only segments closed since a time (2026-01-31T10:00), or how long ago (7d).",
                show_default="all",
            ),
        ] = None,
        storage_option: StorageOption = None,
        master: Annotated[
            str | None,
            typer.Option(
                help="Read the files with Spark, on this master.",
                show_default="in this process, several files at once",
            ),
        ] = None,
        conf: Conf = None,
        as_json: AsJson = False,
    ) -> None:
        """Read the files of archived segments again. Exits with 1 if one is missing or damaged.

        A damaged segment that the log still has is kept there: pgmb lake archive --repair writes it again.
        """
        begin = _time(since)
        with opened(dsn, stream, storage_option, master, conf) as keeper:
            found = keeper.verify(begin)
        if as_json:
            output.json(found)
        else:
            output.line(f"{stream}: {found.segments:,} segments with {found.events:,} events are sound.")
            for one in found.damaged:
                kept = "the log keeps it" if one.kept else "the log has dropped it"
                output.line(f"{stream}: segment {one.segment} is damaged, {kept}: {one.failure}")
        if found.damaged:
            fix = (
                "Run pgmb lake archive --repair."
                if any(one.kept for one in found.damaged)
                else "Restore the files of the table."
            )
            output.fail(f"{len(found.damaged)} segments of stream {stream} are damaged", fix)

    @lake.command()
    def compact(
        dsn: Dsn = "",
        stream: Stream = "main",
        target: Annotated[
            int | None,
            typer.Option(
                parser=parse_bytes, metavar="SIZE", help="The size of a file.", show_default="256MB"
            ),
        ] = None,
        storage_option: StorageOption = None,
        as_json: AsJson = False,
    ) -> None:
        """Join small files of the table. Readers go on; pgmb lake vacuum removes the old files."""
        with opened(dsn, stream, storage_option) as keeper:
            done = keeper.compact(target or 256 * _UNITS["mb"])
        if as_json:
            output.json(done)
        elif done.replaced:
            output.line(
                f"{stream}: joined {done.replaced:,} files of {done.replaced_bytes:,} bytes"
                f" to {done.files:,} of {done.bytes:,}."
            )
        else:
            output.line(f"{stream}: no small files to join.")

    @lake.command()
    def vacuum(
        dsn: Dsn = "",
        stream: Stream = "main",
        keep: Annotated[
            timedelta | None,
            typer.Option(
                parser=durations.parse,
                metavar="DURATION",
                help="Keep the files of versions that are younger: readers may use them.",
                show_default="7d",
            ),
        ] = None,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the files.")] = False,
        storage_option: StorageOption = None,
        as_json: AsJson = False,
    ) -> None:
        """Remove files that the table does not need: replaced ones, and those of killed archivers."""
        hours = int((_KEEP if keep is None else keep).total_seconds() // 3600)
        with opened(dsn, stream, storage_option) as keeper:
            gone = keeper.vacuum(hours, dry_run=dry_run)
        if as_json:
            output.json(gone)
            return
        for path in gone if dry_run else ():
            output.line(path)
        output.line(f"{stream}: {len(gone):,} files {'to remove' if dry_run else 'removed'}.")

    @lake.command()
    def adopt(
        dsn: Dsn = "", stream: Stream = "main", storage_option: StorageOption = None, as_json: AsJson = False
    ) -> None:
        """Rebuild the manifest: record segments that the table holds and the database does not know of."""
        with opened(dsn, stream, storage_option) as keeper:
            done = keeper.adopt()
        if as_json:
            output.json(msgspec.structs.asdict(done))
        else:
            output.line(f"{stream}: adopted {len(done.segments):,} segments.")
            for number, reason in done.refused.items():
                output.line(f"{stream}: segment {number} is not adopted: {reason}")
        if done.refused:
            output.fail(
                f"{len(done.refused)} segments of stream {stream} are not adopted", "Restore the table."
            )


def held_up(dsn: str) -> list[dict[str, Any]]:
    """Segments that are not archived or not dropped, with the reason."""
    with connect(dsn, "pgmb cli") as database, translated(), database.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(_SEGMENTS).fetchall()


def show_held_up(rows: list[dict[str, Any]]) -> None:
    if rows:
        names = ("stream", "segment", "state", "since", "reason")
        output.table("Segments", names, [[row[name] for name in names] for row in rows])


def fail_behind(lakes: list[dict[str, Any]], segments: list[dict[str, Any]], most: timedelta) -> None:
    """Exit with 1 if the lake of a stream is further behind, or a table damaged. Names the first reason."""
    damaged = [row for row in segments if row["state"] == "damaged"]
    behind = [one for one in lakes if one["lag"] is not None and one["lag"] > most]
    if behind:
        worst = max(behind, key=lambda one: one["lag"])
        waiting = [
            row
            for row in segments
            if row["stream"] == worst["stream"] and row["state"] in ("closed", "sealed")
        ]
        reason = f"segment {waiting[0]['segment']} {waiting[0]['reason']}" if waiting else (
            "its segment is open: no janitor rotates it, or rotate_every is longer"
        )  # fmt: skip
        output.fail(
            f"the lake of stream {worst['stream']} is {durations.show(worst['lag'])} behind: {reason}",
            "See pgmb lake status.",
        )
    if damaged:
        output.fail(
            f"segment {damaged[0]['segment']} of stream {damaged[0]['stream']}: {damaged[0]['reason']}",
            "Restore the files of the table.",
        )


def _time(named: moments.Moment | None) -> Any:
    if named is None or named.named == "earliest":
        return None
    if named.at is None or not hasattr(named.at, "tzinfo"):
        raise typer.BadParameter("--since is a time (2026-01-31T10:00), or how long ago (7d).")
    return named.at
