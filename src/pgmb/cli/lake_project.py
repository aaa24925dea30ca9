"""pgmb lake project: declare typed tables of archived events, keep them up to date, see how they drift."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
import typer

from pgmb.cli import durations, output
from pgmb.cli.options import AsJson, Dsn, StorageOption, Stream, Yes, storage_options
from pgmb.cli.spark.progress import progress
from pgmb.cli.spark.session import Conf, Master, session
from pgmb.cli.terminal import confirm

if TYPE_CHECKING:
    from pgmb.lake.archive import Run
    from pgmb.lake.projection.declaration import Described
    from pgmb.lake.projection.projector import Projected, Projector

project = typer.Typer(help="Typed tables of archived events, from their JSON payloads.", no_args_is_help=True)

_EVERY = timedelta(seconds=30)
_COLUMNS = ("table", "stream", "topics", "segment", "of", "rows", "rescued", "dropped", "moved", "at")


class Bad(StrEnum):
    """What becomes of payloads that do not fit."""

    rescue = "rescue"
    drop = "drop"
    fail = "fail"


class Engine(StrEnum):
    """Which SQL a view is for."""

    duckdb = "duckdb"
    spark = "spark"


Name: TypeAlias = Annotated[str, typer.Argument(help="The projection.", metavar="TABLE")]
Names: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(help="Only these. By default all.", metavar="[TABLE]...", show_default=False),
]
Shown: TypeAlias = Callable[[str], AbstractContextManager[Any]]
OnSpark: TypeAlias = Annotated[
    bool, typer.Option("--spark/--no-spark", help="Run tasks on Spark, or in this process, without Java.")
]


def register(lake: typer.Typer, needed: Any) -> None:
    """Add the commands. `needed` explains what to install where imports fail."""

    @project.command()
    def add(
        topic: Annotated[list[str], typer.Argument(help="Patterns of topics.")],
        schema: Annotated[
            str,
            typer.Option(
                metavar="COLUMNS",
                help='The columns: "order bigint not null, total decimal(10,2), city string from a.city".',
            ),
        ],
        table: Annotated[str, typer.Option(help="The name of the table.")],
        dsn: Dsn = "",
        stream: Stream = "main",
        bad: Annotated[
            Bad, typer.Option(help="Keep payloads that do not fit in a column, leave them out, or stop.")
        ] = Bad.rescue,
        url: Annotated[
            str | None,
            typer.Option(
                help="Of the table.", show_default="that of the stream's table with _TABLE at its end"
            ),
        ] = None,
        replace: Annotated[
            bool, typer.Option("--replace", help="Replace another declaration: then run backfill.")
        ] = False,
        storage_option: StorageOption = None,
    ) -> None:
        """Declare a projection and create its table. Run it with: pgmb lake project run"""
        options = storage_options(storage_option)
        with needed():
            from pgmb.lake.projection.columns import parse_columns
            from pgmb.lake.projection.declaration import Declaration
        declared = Declaration(
            name=table, stream=stream, topics=topic, columns=parse_columns(schema), bad=bad, url=url
        )
        _declare(dsn, [declared], replace, options)

    @project.command()
    def apply(
        file: Annotated[Path, typer.Argument(help="A file in YAML.", exists=True, dir_okay=False)],
        dsn: Dsn = "",
        replace: Annotated[
            bool, typer.Option("--replace", help="Replace other declarations: then run backfill.")
        ] = False,
        storage_option: StorageOption = None,
    ) -> None:
        """Declare the projections of a file. What is declared as the file says stays as it is."""
        options = storage_options(storage_option)
        with needed():
            from pgmb.lake.projection.declaration import load
        _declare(dsn, load(file.read_text()), replace, options)

    @project.command()
    def run(
        table: Names = None,
        dsn: Dsn = "",
        follow: Annotated[
            bool, typer.Option("--follow/--once", help="Go on with what is archived later, or end.")
        ] = False,
        every: Annotated[
            timedelta | None,
            typer.Option(
                parser=durations.parse,
                metavar="DURATION",
                help="With --follow: how often to look.",
                show_default="30s",
            ),
        ] = None,
        spark: OnSpark = True,
        storage_option: StorageOption = None,
        master: Master = "local[*]",
        conf: Conf = None,
        as_json: AsJson = False,
    ) -> None:
        """Project what was archived since the last run. Prints a line for each commit."""
        options = storage_options(storage_option)
        with needed():
            from pgmb.lake.projection.projector import Projector
        names = _named(dsn, table)
        waiting = [name for name in names if Projector(dsn, name, _Idle(), options=options).waits()]
        if not follow and not waiting:
            output.note("Nothing to project: all that is archived is.")
            return
        with _runs(spark, master, conf) as (runner, shown):
            while True:
                for name in names if follow else waiting:
                    projector = Projector(dsn, name, runner, options=options)
                    with shown(f"Project {name}"):
                        done = _run(projector, False, as_json)
                    if not done and not follow:
                        output.note(f"Another projector works on {name}.")
                if not follow:
                    return
                time.sleep((every or _EVERY).total_seconds())

    @project.command()
    def backfill(
        table: Name,
        dsn: Dsn = "",
        spark: OnSpark = True,
        storage_option: StorageOption = None,
        master: Master = "local[*]",
        conf: Conf = None,
        as_json: AsJson = False,
    ) -> None:
        """Make all rows of a projection again, in one commit: after another declaration, for example."""
        options = storage_options(storage_option)
        with needed():
            from pgmb.lake.projection.projector import Projector
        with _runs(spark, master, conf) as (runner, shown), shown(f"Project {table}"):
            if not _run(Projector(dsn, table, runner, options=options), True, as_json):
                output.note(f"Nothing is archived, or another projector works on {table}.")

    @project.command("list")
    def list_(dsn: Dsn = "", as_json: AsJson = False) -> None:
        """Show projections: how far they are, what did not fit, and how payloads drift from the columns."""
        with needed():
            from pgmb.lake.projection.declaration import projections
        found = projections(dsn)
        if as_json:
            output.json([msgspec.structs.asdict(one) for one in found])
            return
        if not found:
            output.line("No projections. Declare one with: pgmb lake project add")
            return
        output.table("Projections", _COLUMNS, [_row(one) for one in found])
        drifts = [(one.name, each) for one in found for each in one.drift]
        if drifts:
            output.table(
                "Drift",
                ("table", "field", "change", "found", "since"),
                [(name, each.field, each.change, each.detail, each.since) for name, each in drifts],
            )

    @project.command()
    def drop(table: Name, dsn: Dsn = "", yes: Yes = False) -> None:
        """Forget a projection. The files of its table stay."""
        with needed():
            from pgmb.lake.projection.declaration import drop as forget
            from pgmb.lake.projection.declaration import find
        find(dsn, table)
        confirm(f"Forget projection {table}?", yes)
        output.line(f"Projection {table} is forgotten. Its files are at {forget(dsn, table)}.")

    @project.command()
    def vacuum(
        table: Name,
        dsn: Dsn = "",
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
    ) -> None:
        """Remove files that the table does not need: replaced ones, and those of killed projectors."""
        options = storage_options(storage_option)
        with needed():
            from pgmb.lake.projection.projector import Projector
        hours = int((timedelta(days=7) if keep is None else keep).total_seconds() // 3600)
        gone = Projector(dsn, table, _Idle(), options=options).vacuum(hours, dry_run=dry_run)
        for path in gone if dry_run else ():
            output.line(path)
        output.line(f"{table}: {len(gone):,} files {'to remove' if dry_run else 'removed'}.")

    @lake.command()
    def dbt(dsn: Dsn = "") -> None:
        """Print a sources.yml for dbt: a source for each stream, with the tables of its projections."""
        with needed():
            from pgmb.lake.catalog import dbt_sources
            from pgmb.lake.projection.declaration import projections
        output.line(dbt_sources(projections(dsn)).rstrip())

    @lake.command()
    def sql(
        table: Names = None,
        dsn: Dsn = "",
        engine: Annotated[Engine, typer.Option(help="For which SQL.")] = Engine.duckdb,
        pinned: Annotated[
            bool,
            typer.Option("--pinned", help="DuckDB: the files of the present version, without its extension."),
        ] = False,
        storage_option: StorageOption = None,
    ) -> None:
        """Print views of projections for DuckDB or Spark SQL."""
        options = storage_options(storage_option)
        with needed():
            from pgmb.lake.catalog import duckdb_view, spark_view
            from pgmb.lake.projection.declaration import find
            from pgmb.lake.projection.table import opened
        for name in _named(dsn, table):
            found = find(dsn, name)
            if engine == Engine.spark:
                output.line(spark_view(name, dsn))
                continue
            files = opened(found, options=options).file_uris() if pinned else None
            if files == []:
                output.note(f"Projection {name} has no rows yet, and no view.")
            else:
                output.line(duckdb_view(name, found.url, files))

    lake.add_typer(project, name="project")


def _declare(dsn: str, declared: Sequence[Any], replace: bool, options: Mapping[str, str]) -> None:
    from pgmb.lake.projection.table import declare

    for one in declared:
        url = declare(dsn, one, replace=replace, options=options)
        output.line(f"Projection {one.name} of stream {one.stream} is at {url}.")


def _named(dsn: str, names: Sequence[str] | None) -> list[str]:
    from pgmb.lake.projection.declaration import projections

    found = list(names or ()) or [one.name for one in projections(dsn)]
    if not found:
        output.fail("there are no projections", "Declare one with: pgmb lake project add")
    return found


class _Idle:
    """Runs nothing: for a look at what waits."""

    parallelism = 1

    def __call__(self, work: Any, tasks: Sequence[Any], result: Any) -> list[Any]:
        raise NotImplementedError


@contextmanager
def _runs(spark: bool, master: str, conf: list[str] | None) -> Generator[tuple[Run, Shown]]:
    """What runs tasks, and what shows their progress."""
    if not spark:
        from pgmb.lake.care import LocalRun

        yield LocalRun(), _unseen
        return
    from pgmb.lake.spark import SparkRun

    with session(master, conf) as started:
        yield SparkRun(started), lambda title: progress(started, title)


@contextmanager
def _unseen(_title: str) -> Generator[None]:
    yield


def _run(projector: Projector, rebuild: bool, as_json: bool) -> int:
    commits = 0
    for commits, done in enumerate(projector.run(rebuild=rebuild), 1):  # noqa: B007 - the count is returned
        if as_json:
            output.json({"projection": projector.name, **msgspec.structs.asdict(done)})
        else:
            output.line(_said(projector.name, done))
    return commits


def _said(name: str, done: Projected) -> str:
    what = "made rows of replaced files again" if done.renewed else f"projected up to segment {done.segment}"
    return (
        f"{name}: {what}, {done.rows:,} rows, {done.rescued:,} rescued, {done.dropped:,} dropped,"
        f" {done.files:,} new files"
    )


def _row(one: Described) -> tuple[Any, ...]:
    return (
        one.name, one.stream, one.patterns, one.segment, one.upto, one.rows, one.rescued, one.dropped,
        one.moved_at, one.url,
    )  # fmt: skip
