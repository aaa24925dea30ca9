"""pgmb lake: init, archive, status. Arrow, Delta and Spark are loaded only where a command needs them."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from psycopg.rows import dict_row

from pgmb import connect as broker_of
from pgmb._core.connecting import connect
from pgmb.cli import durations, lake_care, lake_project, lake_replay, lake_report, moments, output
from pgmb.cli.options import AsJson, Dsn, StorageOption, Stream, storage_options
from pgmb.cli.spark.progress import progress
from pgmb.cli.spark.session import UNTOLD, Conf, Master, session
from pgmb.errors import translated

if TYPE_CHECKING:
    from pgmb.lake.archive import Archived, Archiver
    from pgmb.lake.care import Keeper
    from pgmb.lake.dead import DeadArchived
    from pgmb.lake.replay import Replayer
    from pgmb.lake.report.figures import Figures

lake = typer.Typer(
    help="Archive streams to open tables, verified before they are dropped.", no_args_is_help=True
)

_EVERY = timedelta(seconds=10)
_LAKES = (
    "select stream, url, keep_hot, archived, events, verified_at, waiting, waiting_bytes, waiting_for, lag,"
    " dead_waiting, dead_waiting_for from pgmb.describe_lakes()"
)
_STATUS = {
    "stream": "stream",
    "archived": "archived",
    "events": "events",
    "verified_at": "verified",
    "waiting": "waiting",
    "waiting_bytes": "bytes",
    "waiting_for": "for",
    "lag": "lag",
    "dead_waiting": "dead letters waiting",
    "keep_hot": "kept in the log",
    "url": "table",
}


def register(app: typer.Typer) -> None:
    for command in (init, archive, status, offsets):
        lake.command()(command)
    lake_care.register(lake, _keeper)
    lake_replay.register(lake, _replayer)
    lake_project.register(lake, _needed)
    lake_report.register(lake, _figures)
    app.add_typer(lake, name="lake")


def init(
    url: Annotated[str, typer.Argument(help="Of the table: a folder, s3://bucket/folder, and the like.")],
    dsn: Dsn = "",
    stream: Stream = "main",
    keep_hot: Annotated[
        timedelta | None,
        typer.Option(
            parser=durations.parse_or_off,
            metavar="DURATION|off",
            help="How long the log keeps archived events. By default as the stream's --keep-for.",
        ),
    ] = None,
    dead: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Of the table of dead letters.", show_default="URL_dead"),
    ] = None,
    keep_dead: Annotated[
        timedelta | None,
        typer.Option(
            parser=durations.parse_or_off,
            metavar="DURATION|off",
            help="How long the database keeps archived dead letters. By default without limit.",
        ),
    ] = None,
    storage_option: StorageOption = None,
) -> None:
    """Create the tables of a stream. From then on its log keeps events until they are archived."""
    options = storage_options(storage_option)
    with _needed():
        from pgmb.lake import archive
    made = archive.init(dsn, stream, url, keep_hot, options, dead_url=dead, keep_dead=keep_dead)
    output.line(f"Stream {stream} is archived to {made}.")


def archive(
    dsn: Dsn = "",
    stream: Annotated[
        list[str] | None,
        typer.Option(help="Only these. By default all that have a lake.", show_default=False),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow/--once", help="Go on with what is sealed later, or end.")
    ] = False,
    every: Annotated[
        timedelta | None,
        typer.Option(
            parser=durations.parse,
            metavar="DURATION",
            help="With --follow: how often to look.",
            show_default="10s",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be archived.")] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Write files again that are not as the log.")
    ] = False,
    storage_option: StorageOption = None,
    master: Master = "local[*]",
    conf: Conf = None,
    as_json: AsJson = False,
) -> None:
    """Archive sealed segments with Spark and verify them. Prints a line for each commit."""
    options = storage_options(storage_option)
    with _needed():
        from pgmb.lake.archive import Archiver
        from pgmb.lake.spark import SparkRun
    streams = _streams(dsn, stream)
    if dry_run:
        _show_plan(dsn, streams, as_json)
        return
    dead = [_archive_dead(dsn, name, options, repair, as_json) for name in streams]
    if not follow and not any(_planned(dsn, name) for name in streams):
        if not any(dead):
            _nothing(as_json)
        return
    with session(master, conf) as spark:
        run = SparkRun(spark)
        archivers = [(name, Archiver(dsn, name, run, url=dsn or UNTOLD, options=options)) for name in streams]
        while True:
            for name, archiver in archivers:
                if _planned(dsn, name):
                    with progress(spark, f"Archive {name}"):
                        done = _archived(name, archiver, repair, as_json)
                    if not done and not follow:
                        output.note(f"Another archiver works on stream {name}.")
            if not follow:
                return
            time.sleep((every or _EVERY).total_seconds())
            for name in streams:
                _archive_dead(dsn, name, options, repair, as_json)


def status(
    dsn: Dsn = "",
    max_lag: Annotated[
        timedelta | None,
        typer.Option(
            parser=durations.parse,
            metavar="DURATION",
            help="Exit with 1 if an event is not archived for longer, or a table is damaged.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show streams with a lake: what is archived, and why segments are not archived or dropped."""
    found, segments = _lakes(dsn), lake_care.held_up(dsn)
    if as_json:
        for one in found:
            one["segments"] = [row for row in segments if row["stream"] == one["stream"]]
        output.json(found)
    elif found:
        rows = [[one[name] for name in _STATUS] for one in found]
        output.table("Lakes", list(_STATUS.values()), rows)
        lake_care.show_held_up(segments)
    else:
        output.line("No stream has a lake. Create one with: pgmb lake init URL")
    if max_lag is not None:
        lake_care.fail_behind(found, segments, max_lag)


def offsets(
    at: Annotated[
        moments.Moment,
        typer.Option("--at", parser=moments.parse, metavar="POINT", help=f"{moments.MEANT}."),
    ],
    dsn: Dsn = "",
    stream: Stream = "main",
) -> None:
    """Print Spark's startingOffsets for a point in a stream. No event after that point is left out.

    Times are known to the second or so, and not before the oldest segment of the log: add startingTimestamp.
    """
    with broker_of(dsn, max_size=1) as broker:
        output.json({stream: str(at.position(broker, stream))})


def _archived(stream: str, archiver: Archiver, repair: bool, as_json: bool) -> int:
    commits = 0
    for commits, done in enumerate(archiver.archive(repair=repair), 1):  # noqa: B007 - the count is returned
        _show(stream, done, as_json)
    return commits


def _show(stream: str, done: Archived, as_json: bool) -> None:
    if as_json:
        output.json({"stream": stream, **msgspec.structs.asdict(done)})
        return
    first, last = done.segments[0], done.segments[-1]
    segments = f"segment {first}" if first == last else f"segments {first} to {last}"
    files = f"{done.files:,} files of {done.bytes:,} bytes"
    earlier = ", committed by an earlier run" if done.adopted else ""
    output.line(f"{stream}: verified {segments}, {done.events:,} events, {files}{earlier}")


def _archive_dead(
    dsn: str, stream: str, options: Mapping[str, str], repair: bool, as_json: bool
) -> list[DeadArchived]:
    """Archive dead letters, which takes no Spark."""
    from pgmb.lake.dead import DeadArchiver

    batches: list[DeadArchived] = []
    for done in DeadArchiver(dsn, stream, options=options).archive(repair=repair):
        batches.append(done)
        if as_json:
            output.json({"stream": stream, **msgspec.structs.asdict(done)})
        else:
            earlier = ", committed by an earlier run" if done.adopted else ""
            output.line(f"{stream}: verified {done.dead_letters:,} dead letters{earlier}")
    return batches


def _show_plan(dsn: str, streams: Sequence[str], as_json: bool) -> None:
    rows = [
        {"stream": name, "segment": one.segment, "bytes": one.bytes, "sealed_at": one.sealed_at}
        for name in streams
        for one in _planned(dsn, name)
    ]
    if as_json:
        output.json(rows)
    elif rows:
        names = ["stream", "segment", "bytes", "sealed_at"]
        output.table(
            "To archive",
            [name.replace("_", " ") for name in names],
            [[row[n] for n in names] for row in rows],
        )
    else:
        _nothing(as_json)


def _nothing(as_json: bool) -> None:
    if not as_json:
        output.line("Nothing to archive: no sealed segment and no dead letter waits.")


def _streams(dsn: str, named: Sequence[str] | None) -> list[str]:
    known = [one["stream"] for one in _lakes(dsn)]
    if missing := [name for name in named or () if name not in known]:
        output.fail(f"stream {missing[0]} has no lake", "Create one with: pgmb lake init URL --stream NAME")
    if not known:
        output.fail("no stream has a lake", "Create one with: pgmb lake init URL")
    return list(named) if named else known


def _planned(dsn: str, stream: str) -> Sequence[Any]:
    from pgmb.lake.archive import plan

    with connect(dsn, "pgmb cli") as database, translated():
        return plan(database, stream)


def _lakes(dsn: str) -> list[dict[str, Any]]:
    with connect(dsn, "pgmb cli") as database, translated(), database.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(_LAKES).fetchall()


@contextmanager
def _keeper(
    dsn: str,
    stream: str,
    storage_option: list[str] | None,
    master: str | None = None,
    conf: list[str] | None = None,
) -> Generator[Keeper]:
    """With a master, its tasks run on Spark."""
    options = storage_options(storage_option)
    with _needed():
        from pgmb.lake.care import Keeper
    if master is None:
        yield Keeper(dsn, stream, options=options)
        return
    with _needed():
        from pgmb.lake.spark import SparkRun
    with session(master, conf) as spark, progress(spark, f"Verify {stream}"):
        yield Keeper(dsn, stream, run=SparkRun(spark), options=options)


def _replayer(dsn: str, storage_option: list[str] | None) -> Replayer:
    options = storage_options(storage_option)
    with _needed():
        from pgmb.lake.replay import Replayer
    return Replayer(dsn, options=options)


def _figures(
    dsn: str, asked: Mapping[str, Any], options: Mapping[str, str], master: str, conf: list[str] | None
) -> Figures:
    with _needed():
        from pgmb.lake.report.gather import Asked, gather
    with session(master, conf) as spark, progress(spark, "Report"):
        return gather(spark, dsn, Asked(**asked), url=dsn or UNTOLD, options=options)


@contextmanager
def _needed() -> Generator[None]:
    try:
        import_module("deltalake")
        yield
    except ImportError as error:
        output.fail(f"this needs Delta, Spark and Arrow: {error}", 'Install them: pip install "pgmb[lake]".')
