"""pgmb tail: events as they are committed."""

from __future__ import annotations

from datetime import datetime
from itertools import islice
from typing import Annotated, Any

import typer

from pgmb import Broker, Event, LakeAccess, connect
from pgmb.cli import filters, moments, output
from pgmb.cli.filters import Equals, FilterBy, Params
from pgmb.cli.options import Dsn, StorageOption, Stream, storage_options
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
        typer.Option(
            "--since",
            "--from",
            parser=moments.parse,
            metavar="POINT",
            help=f"{moments.MEANT}; by default latest.",
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Wait for new events.")] = True,
    max: Annotated[int | None, typer.Option(help="End after this many events.", min=1)] = None,
    equals: Equals = None,
    filter: FilterBy = None,
    param: Params = None,
    lake: Annotated[
        bool, typer.Option("--lake/--no-lake", help="Read archived history, or only what the log has.")
    ] = True,
    storage_option: StorageOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document per line.")] = False,
) -> None:
    """Print events as they are committed, until interrupted. Queues are not affected."""
    with interruptible(), connect(dsn, max_size=2) as broker:
        asked = filters.given(equals, filter, None, param)
        with broker.tail(
            *(patterns or ()),
            stream=stream,
            follow=follow,
            lake=lake and LakeAccess(options=storage_options(storage_option)),
            **_beginning(broker, stream, since),
            **asked,
        ) as events:
            for event in islice(events, max):
                if as_json:
                    output.json(output.event_document(event))
                else:
                    output.line(_line(event))


def _beginning(broker: Broker, stream: str, since: moments.Moment | None) -> dict[str, Any]:
    if since is None:
        return {}
    return (
        {"since": since.at} if isinstance(since.at, datetime) else {"after": since.position(broker, stream)}
    )


def _line(event: Event) -> str:
    time = event.published_at.astimezone().strftime("%H:%M:%S.%f")[:-3]
    key = "" if event.key is None else f" [{event.key}]"
    return output.printable(f"{time} {event.topic}{key} {event.raw.decode()}")
