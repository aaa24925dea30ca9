"""pgmb streams: list, show, create, alter, drop."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, TypeAlias

import msgspec
import typer

from pgmb import connect
from pgmb.cli import durations, output, settings, status
from pgmb.cli.changes import change
from pgmb.cli.options import AsJson, Dsn, StreamName, Yes
from pgmb.cli.terminal import confirm

streams = typer.Typer(
    help="Streams: named logs of events, each with its own retention.", no_args_is_help=True
)

Name: TypeAlias = Annotated[str, typer.Argument(help="Letters, digits, and _ . - inside; at most 40.")]
RotateEvery: TypeAlias = Annotated[
    timedelta | None,
    typer.Option(
        parser=durations.parse_or_off, metavar="DURATION|off", help="Open a new segment at this interval."
    ),
]
RotateEvents: TypeAlias = Annotated[
    int | None, typer.Option(help="Open a new segment after this many events.")
]
KeepFor: TypeAlias = Annotated[
    timedelta | None,
    typer.Option(
        parser=durations.parse_or_off,
        metavar="DURATION|off",
        help="Drop segments older than this. [default of a new stream: 7d]",
    ),
]
DropUnread: TypeAlias = Annotated[
    bool | None,
    typer.Option(
        "--drop-unread/--no-drop-unread",
        help="Also drop segments that a queue has not read.",
        show_default=False,
    ),
]
MaxEventBytes: TypeAlias = Annotated[
    int | None,
    typer.Option(
        help="Refuse events with more bytes of payload and headers; default 64 MiB, -1 restores it."
    ),
]
Archive: TypeAlias = Annotated[
    bool | None,
    typer.Option("--archive/--no-archive", help="Keep segments until they are archived.", show_default=False),
]


def register(app: typer.Typer) -> None:
    streams.command("list")(list_streams)
    for command in (show, create, alter, drop):
        streams.command()(command)
    app.add_typer(streams, name="streams")


def list_streams(dsn: Dsn = "", as_json: AsJson = False) -> None:
    """List streams with events, segments, rates and size."""
    with connect(dsn, max_size=1) as broker:
        found = broker.stream_status()
    if as_json:
        output.json(found)
    else:
        output.console().print(status.stream_table(found))


def show(name: StreamName, dsn: Dsn = "", as_json: AsJson = False) -> None:
    """Show one stream: settings and state."""
    with connect(dsn, max_size=1) as broker:
        given = settings.of_stream(broker, name)
        found = next((one for one in broker.stream_status() if one.stream == name), None)
        readers = [one.queue for one in broker.queue_status() if one.stream == name]
    standing = {} if found is None else msgspec.structs.asdict(found)
    standing.pop("stream", None)
    shown = {**given, **standing, "queues": readers}
    if as_json:
        output.json(shown)
    else:
        output.record(f"Stream {name}", shown)


def create(
    name: Name,
    dsn: Dsn = "",
    rotate_every: RotateEvery = None,
    rotate_events: RotateEvents = None,
    keep_for: KeepFor = None,
    drop_unread: DropUnread = None,
    archive: Archive = None,
    max_event_bytes: MaxEventBytes = None,
) -> None:
    """Create a stream. Does nothing if it exists."""
    with connect(dsn, max_size=1) as broker:
        existed = any(one.stream == name for one in broker.stream_status())
        change(
            broker.create_stream,
            name,
            rotate_every=rotate_every,
            rotate_events=rotate_events,
            keep_for=keep_for,
            drop_unread=bool(drop_unread),
            archive=bool(archive),
            max_event_bytes=max_event_bytes,
        )
    output.line(f"Stream {name} exists already; nothing changed." if existed else f"Created stream {name}.")


def alter(
    name: StreamName,
    dsn: Dsn = "",
    rotate_every: RotateEvery = None,
    rotate_events: RotateEvents = None,
    keep_for: KeepFor = None,
    drop_unread: DropUnread = None,
    archive: Archive = None,
    max_event_bytes: MaxEventBytes = None,
) -> None:
    """Change single settings of a stream: rotation, retention, the size of events."""
    with connect(dsn, max_size=1) as broker:
        change(
            broker.alter_stream,
            name,
            rotate_every=rotate_every,
            rotate_events=rotate_events,
            keep_for=keep_for,
            drop_unread=drop_unread,
            archive=archive,
            max_event_bytes=max_event_bytes,
        )
    output.line(f"Changed stream {name}.")


def drop(name: StreamName, dsn: Dsn = "", yes: Yes = False) -> None:
    """Drop a stream with all its events. Fails while queues read it."""
    with connect(dsn, max_size=1) as broker:
        count = next((one.events for one in broker.stream_status() if one.stream == name), 0)
        confirm(f"Drop stream {name} with its {count:,} events?", yes)
        change(broker.drop_stream, name)
    output.line(f"Dropped stream {name}.")
