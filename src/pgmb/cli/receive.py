"""pgmb receive."""

from __future__ import annotations

from typing import Annotated

import typer

from pgmb import connect
from pgmb.cli import output
from pgmb.cli.options import Dsn, Queue


def register(app: typer.Typer) -> None:
    app.command()(receive)


def receive(
    queue: Queue,
    dsn: Dsn = "",
    max: Annotated[int, typer.Option(help="How many at most.", min=1)] = 1,
    ack: Annotated[bool, typer.Option("--ack/--no-ack", help="Settle them once they are printed.")] = True,
) -> None:
    """Receive events and print them, one JSON document a line."""
    with connect(dsn, max_size=1) as broker:
        lease = broker.receive(queue, max)
        for event in lease:
            output.json(output.event_document(event))
        if ack:
            lease.ack()
