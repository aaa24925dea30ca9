"""pgmb tail: events as they are committed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from itertools import dropwhile, islice
from typing import Annotated

import typer

from pgmb import Event, connect
from pgmb.cli import filters, moments, output
from pgmb.cli.filters import Equals, FilterBy, Params
from pgmb.cli.options import Dsn, Stream
from pgmb.cli.terminal import interruptible


def register(app: typer.Typer) -> None:
    app.command()(tail)


def tail(
    patterns: Annotated[
        list[str] | None,
        typer.Argument(
            help="Topics: * is one word, # any number of words. By default all.", show_default=False
        ),
    ] = None,
    dsn: Dsn = "",
    stream: Stream = "main",
    since: Annotated[
        moments.Moment | None,
        typer.Option(parser=moments.parse, metavar="POINT", help=f"{moments.MEANT}; by default latest."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Wait for new events.")] = True,
    max: Annotated[int | None, typer.Option(help="End after this many events.", min=1)] = None,
    equals: Equals = None,
    filter: FilterBy = None,
    param: Params = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document per line.")] = False,
) -> None:
    """Print events as they are committed, until interrupted. Queues are not affected."""
    with interruptible(), connect(dsn, max_size=2) as broker:
        after = None if since is None else since.position(broker, stream)
        asked = filters.given(equals, filter, None, param)
        with broker.tail(*(patterns or ()), stream=stream, after=after, follow=follow, **asked) as events:
            for event in islice(dropwhile(_before(since), events), max):
                if as_json:
                    output.json(output.event_document(event))
                else:
                    output.line(_line(event))


def _before(since: moments.Moment | None) -> Callable[[Event], bool]:
    """Whether an event is older than what was asked for: ticks name times only now and then."""
    at = None if since is None else since.at
    return lambda event: isinstance(at, datetime) and event.published_at < at


def _line(event: Event) -> str:
    time = event.published_at.astimezone().strftime("%H:%M:%S.%f")[:-3]
    key = "" if event.key is None else f" [{event.key}]"
    return output.printable(f"{time} {event.topic}{key} {event.raw.decode()}")
