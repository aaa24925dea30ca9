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
    max: Annotated[int, typer.Option(help="Maximum number.", min=1)] = 1,
    ack: Annotated[
        bool, typer.Option("--ack/--no-ack", help="Acknowledge events after printing them.")
    ] = True,
) -> None:
    """Receive events and print each as a line of JSON."""
    with connect(dsn, max_size=1) as broker:
        lease = broker.receive(queue, max)
        for event in lease:
            output.json(output.event_document(event))
        if ack:
            lease.ack()
