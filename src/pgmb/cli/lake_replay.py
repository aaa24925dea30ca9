"""pgmb lake replay and replays: send a part of a stream's history to one queue or stream."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import msgspec
import typer

from pgmb.cli import durations, filters, moments, output
from pgmb.cli.options import AsJson, Dsn, Stream, Yes
from pgmb.cli.terminal import confirm

if TYPE_CHECKING:
    from pgmb.lake.replay import Counted, Replay, Replayer, Slice

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:/\s*(s|sec|min|m|h))?")
_SECONDS = {None: 1, "s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600}
_COLUMNS = ("id", "from", "into", "events", "bytes", "begun", "moved", "ended")

Opened = Callable[[str, list[str] | None], "Replayer"]


def parse_rate(text: str) -> float:
    """Events per second: 500, 500/s, 30000/min."""
    found = _RATE.fullmatch(text.strip().lower())
    if found is None or float(found[1]) == 0:
        raise typer.BadParameter(f"not a rate: {text!r}. Write 500/s.")
    return float(found[1]) / _SECONDS[found[2]]


def parse_target(text: str) -> dict[str, str]:
    kind, colon, name = text.partition(":")
    if kind not in ("queue", "stream") or not colon or not name:
        raise typer.BadParameter(f"not a target: {text!r}. Write queue:NAME or stream:NAME.")
    return {f"into_{kind}": name}


def register(lake: typer.Typer, opened: Opened) -> None:
    """Add the commands. `opened` opens a replayer with options of the storage."""

    @lake.command()
    def replay(
        into: Annotated[
            str | None, typer.Option(metavar="queue:NAME|stream:NAME", help="Where the events go.")
        ] = None,
        dsn: Dsn = "",
        stream: Stream = "main",
        topic: Annotated[
            list[str] | None, typer.Option(help="Only topics that match this pattern. May be repeated.")
        ] = None,
        begin: Annotated[
            moments.Moment | None,
            typer.Option(
                "--from",
                parser=moments.parse,
                metavar="POINT",
                help=f"{moments.MEANT}.",
                show_default="earliest",
            ),
        ] = None,
        end: Annotated[
            moments.Moment | None,
            typer.Option(
                "--to",
                parser=moments.parse,
                metavar="POINT",
                help="The end, which is not included.",
                show_default="latest",
            ),
        ] = None,
        where: Annotated[
            str | None,
            typer.Option(help="A jsonpath predicate over topic, key, payload and headers."),
        ] = None,
        param: filters.Params = None,
        rate: Annotated[
            float | None,
            typer.Option(parser=parse_rate, metavar="N/s", help="Maximum number of events per second."),
        ] = None,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
        resume: Annotated[
            UUID | None, typer.Option(metavar="ID", help="Continue a replay that was interrupted.")
        ] = None,
        cancel: Annotated[
            UUID | None, typer.Option(metavar="ID", help="End a replay. What it has sent stays.")
        ] = None,
        storage_option: Annotated[
            list[str] | None,
            typer.Option(metavar="NAME=VALUE", help="An option of the storage.", show_default=False),
        ] = None,
        yes: Yes = False,
        as_json: AsJson = False,
    ) -> None:
        """Send events of the log and the lake to one queue or stream again, each once.

        Counts them first and asks. Events keep id, key and time, and get the header pgmb-replay.
        """
        if sum(one is not None for one in (into, resume, cancel)) != 1:
            raise typer.BadParameter("name one of --into, --resume and --cancel.")
        replayer = opened(dsn, storage_option)
        if cancel is not None:
            replayer.find(cancel)
            output.line(f"Replay {cancel} {'ended' if replayer.end(cancel) else 'had ended before'}.")
            return
        if resume is None:
            target = parse_target(into or "")
            asked = {"patterns": topic, **filters.given(None, where, None, param)}
            chosen = replayer.choose(
                stream, _point(begin, "earliest"), _point(end, "latest"), **target, **asked
            )
            if dry_run or not yes:
                found = replayer.count(chosen)
                if dry_run:
                    _show_count(chosen, found, as_json)
                    return
                if not as_json:
                    _show_count(chosen, found, as_json)
                confirm(f"Send {found.events:,} events to {into}?", yes)
            resume = replayer.start(chosen)
            output.note(f"Replay {resume}. To continue it: pgmb lake replay --resume {resume}")
        _run(replayer, resume, rate, as_json)

    @lake.command()
    def replays(dsn: Dsn = "", as_json: AsJson = False) -> None:
        """List replays, the newest first."""
        found = opened(dsn, None).replays()
        if as_json:
            output.json([msgspec.structs.asdict(one) for one in found])
        elif found:
            output.table("Replays", _COLUMNS, [_row(one) for one in found])
        else:
            output.line("No replays.")


def _run(replayer: Replayer, id: UUID, rate: float | None, as_json: bool) -> None:
    began = time.monotonic()
    before = replayer.find(id)
    if before.ended_at is not None:
        output.fail(f"replay {id} has ended", "Begin another: pgmb lake replay --into queue:NAME")
    events, size = before.events, before.bytes
    for done in replayer.run(id, rate):
        events, size = done.events, done.bytes
    seconds = time.monotonic() - began
    if as_json:
        output.json({"id": id, "events": events, "bytes": size, "seconds": round(seconds, 3)})
        return
    earlier = f", {before.events:,} of them before" if before.events else ""
    output.line(
        f"Sent {events:,} events of {size:,} bytes to {_target(before)}{earlier},"
        f" in {durations.show(timedelta(seconds=seconds))}."
    )


def _point(named: moments.Moment | None, left_out: str) -> Any:
    """A time or a position; None for the one that is meant if nothing is said."""
    if named is not None and named.at is None and named.named != left_out:
        raise typer.BadParameter("--from latest and --to earliest name no events.")
    return None if named is None else named.at


def _show_count(chosen: Slice, found: Counted, as_json: bool) -> None:
    if as_json:
        output.json({"events": found.events, "bytes": found.bytes, "into": _target(chosen)})
    else:
        output.line(f"{found.events:,} events of {found.bytes:,} bytes to {_target(chosen)}.")


def _target(chosen: Slice) -> str:
    return f"queue {chosen.into_queue}" if chosen.into_queue else f"stream {chosen.into_stream}"


def _row(one: Replay) -> tuple[Any, ...]:
    return (
        str(one.id),
        one.stream,
        _target(one),
        one.events,
        one.bytes,
        one.created_at,
        one.moved_at,
        one.ended_at,
    )
