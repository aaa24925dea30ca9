"""pgmb schedules: list, create, drop, pause, resume, run."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, TypeAlias

import msgspec
import typer

from pgmb import connect
from pgmb.cli import output
from pgmb.cli.changes import change
from pgmb.cli.options import AsJson, Dsn, Stream, Yes
from pgmb.cli.terminal import confirm

schedules = typer.Typer(help="Schedules: recurring events (cron).", no_args_is_help=True)

Name: TypeAlias = Annotated[str, typer.Argument(help="The schedule.")]


class Missed(StrEnum):
    LAST = "last"
    ALL = "all"


def register(app: typer.Typer) -> None:
    schedules.command("list")(list_schedules)
    for command in (create, drop, pause, resume, run):
        schedules.command()(command)
    app.add_typer(schedules, name="schedules")


def list_schedules(dsn: Dsn = "", as_json: AsJson = False) -> None:
    """List schedules with their next and last run."""
    with connect(dsn, max_size=1) as broker:
        found = broker.schedules()
    if as_json:
        output.json(found)
        return
    columns = ("name", "cron", "timezone", "topic", "stream", "next_at", "last_at", "paused_at")
    rows = [[getattr(one, column) for column in columns] for one in found]
    output.table("Schedules", [column.replace("_", " ") for column in columns], rows)


def create(
    name: Name,
    cron: Annotated[str, typer.Argument(help="Five fields, '0 3 * * *'; or six, seconds first.")],
    topic: Annotated[str, typer.Argument(help="Dotted words, for example report.due.")],
    payload: Annotated[str, typer.Argument(help="JSON.")] = "null",
    dsn: Dsn = "",
    timezone: Annotated[str, typer.Option(help="The time zone, for example Europe/Berlin.")] = "UTC",
    key: Annotated[str | None, typer.Option(help="The ordering key.")] = None,
    headers: Annotated[str | None, typer.Option(help="JSON, an object.")] = None,
    stream: Stream = "main",
    missed: Annotated[Missed, typer.Option(help="Which missed due times to publish.")] = Missed.LAST,
) -> None:
    """Create a schedule, or change an existing one."""
    with connect(dsn, max_size=1) as broker:
        made = change(
            broker.create_schedule,
            name,
            cron,
            topic,
            msgspec.Raw(payload.strip().encode()),
            timezone=timezone,
            key=key,
            headers=None if headers is None else msgspec.Raw(headers.strip().encode()),
            stream=stream,
            missed=missed.value,
        )
        next_at = next(one.next_at for one in broker.schedules() if one.name == name)
    done = "Created" if made else "Updated"
    output.line(f"{done} schedule {output.printable(name)}, due next at {output.cell(next_at)}.")


def drop(name: Name, dsn: Dsn = "", yes: Yes = False) -> None:
    """Drop a schedule."""
    with connect(dsn, max_size=1) as broker:
        confirm(f"Drop schedule {name}?", yes)
        dropped = change(broker.drop_schedule, name)
    output.line(f"Dropped schedule {name}." if dropped else f"There is no schedule {name}.")


def pause(name: Name, dsn: Dsn = "") -> None:
    """Stop a schedule until it is resumed."""
    with connect(dsn, max_size=1) as broker:
        change(broker.pause_schedule, name)
    output.line(f"Paused schedule {name}.")


def resume(name: Name, dsn: Dsn = "") -> None:
    """Resume a schedule from now. Missed times are not published."""
    with connect(dsn, max_size=1) as broker:
        change(broker.resume_schedule, name)
    output.line(f"Resumed schedule {name}.")


def run(name: Name, dsn: Dsn = "") -> None:
    """Publish a schedule's event now and print its id. The next due time stays."""
    with connect(dsn, max_size=1) as broker:
        output.line(str(change(broker.run_schedule, name)))
