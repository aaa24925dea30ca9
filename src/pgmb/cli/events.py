"""pgmb publish, receive."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
import typer

from pgmb import connect
from pgmb.cli import output
from pgmb.cli.options import Dsn, Stream
from pgmb.errors import InvalidArgument
from pgmb.types import Event


def register(app: typer.Typer) -> None:
    app.command()(publish)
    app.command()(receive)


def publish(
    topic: Annotated[str, typer.Argument(help="Dotted words, for example order.created.")],
    payload: Annotated[str, typer.Argument(help="JSON; - reads one event a line from standard input.")],
    dsn: Dsn = "",
    key: Annotated[str | None, typer.Option(help="The ordering key.")] = None,
    headers: Annotated[str | None, typer.Option(help="JSON.")] = None,
    stream: Stream = "main",
    delay: Annotated[float | None, typer.Option(help="Seconds until it is delivered.")] = None,
) -> None:
    """Publish an event and print its id, or many and print how many."""
    with connect(dsn, max_size=1) as broker:
        given = None if headers is None else _json(headers)
        if payload != "-":
            event = broker.publish(topic, _json(payload), key=key, headers=given, stream=stream, delay=delay)
            output.line(str(event))
        elif key is not None or delay is not None:
            raise InvalidArgument("--key and --delay are for a single event")
        else:
            lines = (_json(line) for line in sys.stdin if line.strip())
            output.line(str(broker.publish_many(topic, lines, headers=given, stream=stream)))


def receive(
    queue: Annotated[str, typer.Argument(help="The queue.")],
    dsn: Dsn = "",
    max: Annotated[int, typer.Option(help="At most so many.")] = 1,
    ack: Annotated[bool, typer.Option("--ack/--no-ack", help="Settle them once they are printed.")] = True,
) -> None:
    """Receive events and print them, one JSON document a line."""
    with connect(dsn, max_size=1) as broker:
        lease = broker.receive(queue, max)
        for event in lease:
            output.json(_document(event))
        if ack:
            lease.ack()


def _json(text: str) -> msgspec.Raw:
    """JSON as it was given: PostgreSQL checks it and stores it to the letter."""
    return msgspec.Raw(text.strip().encode())


def _document(event: Event) -> dict[str, object]:
    return {
        "seq": event.seq,
        "id": event.id,
        "topic": event.topic,
        "key": event.key,
        "payload": msgspec.Raw(event.raw),
        "headers": event.headers,
        "published_at": event.published_at,
        "attempt": event.attempt,
        "stream": event.stream,
    }
