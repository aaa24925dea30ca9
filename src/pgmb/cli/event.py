"""pgmb event and pgmb workers: what became of an event, and who handles events."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated
from uuid import UUID

import typer

from pgmb import EventFate, connect
from pgmb.cli import moments, output
from pgmb.cli.options import AsJson, Dsn
from pgmb.errors import NotFound


def register(app: typer.Typer) -> None:
    app.command()(event)
    app.command()(workers)


def event(
    id: Annotated[UUID, typer.Argument(help="The event's id, as publish returned it.")],
    dsn: Dsn = "",
    around: Annotated[
        str | None,
        typer.Option(help="About when it was published, for an id that the publisher chose."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what became of an event: its state in every queue and at every endpoint."""
    with connect(dsn, max_size=1) as broker:
        found = broker.event_fate(id, None if around is None else _time(around))
    if as_json:
        output.json(found)
    if found.found == "unknown":
        missing = NotFound(f"there is no event {id} that this role may see")
        missing.advise(
            f"Of ids that a publisher chose, {found.looked or 0:,} events were looked at: pass --around TIME."
        )
        raise missing
    if not as_json:
        _print(found)


def _print(found: EventFate) -> None:
    document: dict[str, object] = {
        "stream": found.stream,
        "seq": None if found.seq is None else str(found.seq),
        "topic": found.topic,
        "key": found.key,
        "published": found.published_at,
        "due": found.due_at,
        "dropped": found.dropped_at,
        "lake": None if found.lake is None else found.lake.url,
        "payload": _payload(found),
    }
    output.record(f"Event {found.id}", {name: value for name, value in document.items() if value is not None})
    if found.where is not None:
        output.line(found.where)
    if found.consumers:
        rows = [(one.name, one.kind, one.state, one.told()) for one in found.consumers]
        output.table("Consumers", ("name", "kind", "state", ""), rows)
    elif found.found == "log":
        output.line("No queue of its stream that this role may consume.")
    if found.more:
        output.line("There are more consumers: see --json and pgmb.event_fate(max).")
    for one in found.consumers:
        output.attempts(f"Failed attempts at {one.name}", one.errors)


def _time(text: str) -> datetime:
    at = moments.parse(text).at
    if not isinstance(at, datetime):
        raise typer.BadParameter(f"--around must be a time or how long ago, got {text!r}")
    return at


def _payload(found: EventFate) -> str | None:
    if found.payload is None or found.bytes is None or found.bytes <= len(found.payload.encode()):
        return found.payload
    return f"{found.payload}… ({found.bytes:,} bytes)"


def workers(dsn: Dsn = "", as_json: AsJson = False) -> None:
    """List the processes that run handlers, and those that stopped without saying so."""
    with connect(dsn, max_size=1) as broker:
        found = broker.workers()
    if as_json:
        output.json(found)
        return
    if not found:
        output.line("No workers.")
        return
    rows = [
        (
            f"{one.host}:{one.pid}",
            one.application,
            one.role,
            "alive" if one.alive else "silent",
            one.started_at,
            one.heartbeat_at,
            ", ".join(one.queues),
        )
        for one in found
    ]
    output.table(
        "Workers", ("process", "application", "role", "state", "started", "heartbeat", "queues"), rows
    )
