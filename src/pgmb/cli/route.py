"""pgmb route test: who gets an event of a topic, and by which pattern."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from pgmb import connect
from pgmb._core.patterns import matches
from pgmb.app import loading
from pgmb.cli import output
from pgmb.cli.options import AsJson, Dsn, Stream

route = typer.Typer(help="Test which queues receive a topic.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    route.command("test")(route_test)
    # A group of one command would become that command.
    route.callback()(lambda: None)
    app.add_typer(route, name="route")


def route_test(
    topic: Annotated[str, typer.Argument(help="Dotted words, for example order.created.")],
    dsn: Dsn = "",
    stream: Stream = "main",
    app: Annotated[
        str | None, typer.Option("--app", metavar="MODULE:NAME", help="Also show the handlers of this app.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show which queues would receive this topic, by which pattern, and their handlers."""
    with connect(dsn, max_size=1) as broker:
        queues = [one for one in broker.queue_status() if one.stream == stream]
    rows: list[dict[str, Any]] = [
        {"queue": one.queue, "patterns": by, "paused": one.paused_at is not None}
        for one in queues
        if (by := [pattern for pattern in one.patterns if matches(pattern, topic)])
    ]
    if app is not None:
        declared = loading.load(app).queues
        for row in rows:
            handlers = declared[row["queue"]].handlers if row["queue"] in declared else []
            row["handlers"] = [one.name for one in handlers if any(matches(by, topic) for by in one.patterns)]
    if as_json:
        output.json({"topic": topic, "stream": stream, "queues": rows})
    elif not rows:
        output.line(f"No queue on stream {stream} gets {output.printable(topic)}.")
    else:
        columns = list(rows[0])
        output.table(
            f"{topic} on stream {stream}", columns, [[row[name] for name in columns] for row in rows]
        )
