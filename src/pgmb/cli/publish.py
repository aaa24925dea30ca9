"""pgmb publish: one event, or many from standard input."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Annotated, Any, BinaryIO
from uuid import UUID

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from pgmb import NewEvent, connect
from pgmb.cli import durations, output, route
from pgmb.cli.options import Dsn, Stream
from pgmb.errors import InvalidArgument


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """An event as a line of --events gives it."""

    topic: str
    payload: msgspec.Raw
    key: str | None = None
    headers: msgspec.Raw = msgspec.Raw(b"null")
    id: UUID | None = None
    dedup_key: str | None = None

    def event(self) -> NewEvent:
        headers = None if bytes(self.headers) == b"null" else self.headers
        return NewEvent(self.topic, self.payload, self.key, headers, self.id, self.dedup_key)


decode_line = msgspec.json.Decoder(_Line).decode


def register(app: typer.Typer) -> None:
    app.command()(publish)


def publish(
    topic: Annotated[
        str | None, typer.Argument(help="Dotted words, for example order.created.", show_default=False)
    ] = None,
    payload: Annotated[
        str | None,
        typer.Argument(help="JSON; - reads one payload per line from standard input.", show_default=False),
    ] = None,
    dsn: Dsn = "",
    key: Annotated[str | None, typer.Option(help="The ordering key.")] = None,
    headers: Annotated[str | None, typer.Option(help="JSON.")] = None,
    stream: Stream = "main",
    delay: Annotated[
        timedelta | None,
        typer.Option(parser=durations.parse, metavar="DURATION", help="Deliver the event after this time."),
    ] = None,
    dedup_key: Annotated[
        str | None, typer.Option(help="Publish nothing if this deduplication key was used recently.")
    ] = None,
    dedup_for: Annotated[
        timedelta | None,
        typer.Option(
            parser=durations.parse,
            metavar="DURATION",
            help="How long the deduplication key is kept.",
            show_default="1d",
        ),
    ] = None,
    events: Annotated[
        bool,
        typer.Option(
            "--events",
            help='Read whole events: {"topic", "payload", "key", "headers", "id", "dedup_key"} per line.',
        ),
    ] = False,
) -> None:
    """Publish one event and print its id, or many events from standard input, all or none."""
    _agree(
        topic,
        payload,
        events,
        single=any(one is not None for one in (key, delay, dedup_key)),
        headers=headers is not None,
    )
    window = timedelta(days=1) if dedup_for is None else dedup_for
    given = None if headers is None else _json(headers.encode(), "--headers")
    if topic is not None and payload is not None and payload != "-":
        document = _json(payload.encode("utf-8", "surrogateescape"), "the payload")
        with connect(dsn, max_size=1) as broker:
            event = broker.publish(
                topic,
                document,
                key=key,
                headers=given,
                stream=stream,
                delay=delay,
                dedup_key=dedup_key,
                dedup_for=window,
            )
            unread = sys.stderr.isatty() and not route.receivers(broker, topic, stream)
        output.line(str(event))
        if unread:
            output.note(
                f"No queue that you can see receives {topic}. A queue created later starts after this event."
            )
        return
    with connect(dsn, max_size=1) as broker, _Lines(sys.stdin.buffer) as lines:
        if topic is None:
            count = broker.publish_many(
                (_event(text, number) for number, text in lines), stream=stream, dedup_for=window
            )
        else:
            payloads = (_json(text, f"line {number}") for number, text in lines)
            count = broker.publish_many(topic, payloads, headers=given, stream=stream)
    output.line(str(count))


def _agree(topic: str | None, payload: str | None, events: bool, *, single: bool, headers: bool) -> None:
    many = events or payload == "-"
    if events and (topic is not None or headers):
        raise typer.BadParameter("with --events each line has a topic and headers of its own")
    if not events and (topic is None or payload is None):
        raise typer.BadParameter("give a TOPIC and a PAYLOAD, TOPIC - for payloads a line, or --events")
    if many and single:
        raise typer.BadParameter("--key, --delay and --dedup-key are for a single event")


def _json(text: bytes, where: str) -> msgspec.Raw:
    """JSON text, validated and then stored unchanged."""
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refused(where, text, error) from error
    return msgspec.Raw(text.strip())


def _event(text: bytes, number: int) -> NewEvent:
    try:
        line = decode_line(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refused(f"line {number}", text, error) from error
    _json(bytes(line.payload), f"line {number}")
    return line.event()


def _refused(where: str, text: bytes, error: Exception) -> InvalidArgument:
    shown = text.strip().decode("utf-8", "backslashreplace")
    refused = InvalidArgument(f"{where}: {error}: {shown if len(shown) <= 60 else shown[:57] + '...'}")
    refused.advise("JSON strings need double quotes: '\"hello\"'. Nothing was published.")
    return refused


class _Lines:
    """The lines of standard input, numbered, with a progress bar on the terminal while they are read."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        console = Console(stderr=True)
        # Where the input is typed, or the output is not watched, a bar would only be in the way.
        watched = console.is_terminal and not source.isatty()
        self._size = _size(source)
        columns: list[Any] = [SpinnerColumn(), TextColumn("{task.fields[count]:,} events")]
        if self._size:
            columns += [BarColumn(), TextColumn("{task.percentage:>3.0f} %")]
        self._bar = Progress(
            *columns, TimeElapsedColumn(), console=console, transient=True, disable=not watched
        )
        self._task = self._bar.add_task("publish", total=self._size, count=0)

    def __enter__(self) -> Iterable[tuple[int, bytes]]:
        self._bar.start()
        return self._read()

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _read(self) -> Iterator[tuple[int, bytes]]:
        count = seen = 0
        for number, text in enumerate(self._source, 1):
            seen += len(text)
            if text.strip():
                count += 1
                yield number, text
            if number % 1000 == 0:
                self._bar.update(self._task, completed=seen, count=count)
        self._bar.update(self._task, completed=seen, count=count)


def _size(source: BinaryIO) -> int | None:
    """How many bytes there are, if that is known: of a file, not of a pipe."""
    try:
        status = os.fstat(source.fileno())
    except (OSError, ValueError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) and status.st_size else None
