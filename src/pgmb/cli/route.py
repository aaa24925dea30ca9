"""pgmb route test: who gets an event of a topic, and by which pattern."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from pgmb import Broker, connect
from pgmb._core.patterns import matches
from pgmb.app import loading
from pgmb.cli import output
from pgmb.cli.options import AsJson, Dsn, Stream
from pgmb.errors import PermissionDenied

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
    """Show which queues and endpoints would receive this topic, by which pattern, and their handlers."""
    with connect(dsn, max_size=1) as broker:
        rows = receivers(broker, topic, stream)
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


def receivers(broker: Broker, topic: str, stream: str) -> list[dict[str, Any]]:
    """The queues that receive a topic, as far as the caller may see them. A queue that endpoints share takes
    every topic; it counts only if one of its endpoints wants this one."""
    try:
        endpoints = broker.endpoints()
    except PermissionDenied:
        # Who may not see endpoints does not consume the queues that feed them.
        endpoints = []
    found: list[dict[str, Any]] = []
    for queue in broker.queue_status():
        by = [pattern for pattern in queue.patterns if matches(pattern, topic)]
        if queue.stream != stream or not by:
            continue
        fed = [one for one in endpoints if one.queue == queue.queue and one.patterns is not None]
        takers = {
            one.name: taken
            for one in fed
            if one.state != "disabled" and (taken := [by for by in one.patterns or () if matches(by, topic)])
        }
        if fed and not takers:
            continue
        if takers:
            by = sorted({pattern for taken in takers.values() for pattern in taken})
        found.append(
            {
                "queue": queue.queue,
                "patterns": by,
                "endpoints": list(takers),
                "paused": queue.paused_at is not None,
            }
        )
    return found
