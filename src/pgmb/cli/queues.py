"""pgmb queues: list, show, peek, create, alter, convert, bind, hand-over, pause, resume, purge, seek, drop"""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from typing import Annotated, Any, TypeAlias

import msgspec
import typer
from psycopg.errors import LockNotAvailable

from pgmb import Broker, Disagreement, NextEvent, QueueStatus, connect
from pgmb.cli import durations, filters, moments, output, policies, settings, status
from pgmb.cli.changes import change
from pgmb.cli.filters import Condition, Equals, FilterBy, Params
from pgmb.cli.options import AsJson, Dsn, Queue, Stream, Yes
from pgmb.cli.policies import (
    BackoffBase,
    BackoffFactor,
    BackoffJitter,
    BackoffMax,
    LeaseFor,
    MaxAttempts,
    MaxInFlight,
    MaxLength,
    Rps,
    Ttl,
    When,
)
from pgmb.cli.terminal import confirm
from pgmb.errors import InvalidArgument, QueueHeld, QueueNotFound

queues = typer.Typer(
    help="Queues: durable readers of a stream, with leases and retries.", no_args_is_help=True
)

_BETWEEN_ATTEMPTS_SECONDS = 0.1
_CONVERSION = "pgmb queues convert"
"""The reason of the pause in which a queue is converted."""
_PAYLOAD = 80
"""Characters of a payload in a table."""

Patterns: TypeAlias = Annotated[
    list[str], typer.Argument(help="Topics: * is one word, # any number of words.", show_default=False)
]


def register(app: typer.Typer) -> None:
    queues.command("list")(list_queues)
    for command in (show, peek, create, alter, convert, bind, hand_over, pause, resume, purge, seek, drop):
        queues.command()(command)
    app.add_typer(queues, name="queues")


def list_queues(dsn: Dsn = "", as_json: AsJson = False) -> None:
    """List queues with backlog, age, leases, retries and dead letters."""
    with connect(dsn, max_size=1) as broker:
        found = broker.queue_status()
        disagreements = broker.queue_disagreements()
    if as_json:
        output.json([{**msgspec.structs.asdict(one), **_disagreeing(one, disagreements)} for one in found])
        return
    output.console().print(status.queue_table(found))
    for one in disagreements:
        output.note(f"Queue {one.queue}: {one.message}. {one.hint}")


def show(
    queue: Queue,
    dsn: Dsn = "",
    depth: Annotated[bool, typer.Option("--depth", help="Count exactly. Reads all waiting events.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show one queue: settings and position."""
    with connect(dsn, max_size=1) as broker:
        given = settings.of_queue(broker, queue)
        standing = msgspec.structs.asdict(_standing(broker, queue))
        exactly = {"depth": broker.queue_depth(queue)} if depth else {}
    del given["stream_name"], standing["queue"]
    shown = {**given, **standing, **exactly}
    if as_json:
        output.json(shown)
    else:
        output.record(f"Queue {queue}", shown)


def peek(
    queue: Queue,
    dsn: Dsn = "",
    max: Annotated[int, typer.Option(help="How many events, at most 200.")] = 20,
    look: Annotated[int, typer.Option(help="How many numbers of the log to look at.")] = 10_000,
    topics: Annotated[bool, typer.Option("--topics", help="Count the events by topic.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a queue would deliver next, without leasing it: due retries, then fresh events."""
    with connect(dsn, max_size=1) as broker:
        found = broker.next_events(queue, max, look)
        standing = None if as_json else _standing(broker, queue)
    by_topic = Counter(one.topic for one in found.events).most_common()
    if as_json:
        output.json(
            {"topics": dict(by_topic), "looked": found.looked, "more": found.more} if topics else found
        )
        return
    rows = [
        (str(one.seq), one.topic, one.key, str(one.attempt), one.due_at, one.published_at, _beginning(one))
        for one in found.events
    ]
    if rows and topics:
        counts = [(topic, f"{events:,}") for topic, events in by_topic]
        output.table(f"Next in {queue}", ("topic", "events"), counts)
    elif rows:
        columns = ("seq", "topic", "key", "attempt", "due since", "published", "payload")
        output.table(f"Next in {queue}", columns, rows)
    elif not found.more:
        output.line("Nothing is due.")
    if found.more:
        output.line(f"Stopped before the end of the log, after {found.looked:,} of its numbers.")
    if standing is not None and (standing.leased_events or standing.retries):
        output.line(f"Leased: {standing.leased_events:,} events. Retries, due or not: {standing.retries:,}.")


def create(
    queue: Annotated[str, typer.Argument(help="A name of up to 100 characters.")],
    patterns: Patterns = ["#"],  # noqa: B006 - typer copies it
    dsn: Dsn = "",
    stream: Stream = "main",
    starting: Annotated[
        moments.Moment | None,
        typer.Option(parser=moments.parse, metavar="POINT", help=f"{moments.MEANT}; by default latest."),
    ] = None,
    lease_for: LeaseFor = None,
    max_attempts: MaxAttempts = None,
    backoff_base: BackoffBase = None,
    backoff_factor: BackoffFactor = None,
    backoff_max: BackoffMax = None,
    backoff_jitter: BackoffJitter = None,
    ordered: Annotated[
        bool, typer.Option("--ordered", help="Deliver events with the same key one at a time, in order.")
    ] = False,
    max_in_flight: MaxInFlight = None,
    rps: Rps = None,
    ttl: Ttl = None,
    max_length: MaxLength = None,
    when_full: When = None,
    lane: Annotated[
        list[str] | None, typer.Option(help="A pattern of urgent events. Repeat for lower priorities.")
    ] = None,
    fair_by: Annotated[
        str | None,
        typer.Option(
            metavar="TENANT", help="Serve tenants in turn. What names an event's: key, or header:NAME."
        ),
    ] = None,
    equals: Equals = None,
    filter: FilterBy = None,
    condition: Condition = None,
    param: Params = None,
) -> None:
    """Create a queue for these topics. Does nothing if it exists with the same settings."""
    given = policies.given(
        lease_for=lease_for,
        max_attempts=max_attempts,
        backoff_base=backoff_base,
        backoff_factor=backoff_factor,
        backoff_max=backoff_max,
        backoff_jitter=backoff_jitter,
        ordered=ordered or None,
        max_in_flight=max_in_flight,
        rps=rps,
        ttl=ttl,
        max_length=max_length,
        when_full=when_full,
        lanes=lane or None,
        fair_by=fair_by,
    )
    with connect(dsn, max_size=1) as broker:
        at = None if starting is None else starting.position(broker, stream)
        made = change(
            broker.create_queue,
            queue,
            patterns,
            stream=stream,
            starting=at,
            **given,
            **filters.given(equals, filter, condition, param),
        )
    output.line(f"Created queue {queue}." if made else f"Queue {queue} exists already; nothing changed.")


def alter(
    queue: Queue,
    dsn: Dsn = "",
    lease_for: LeaseFor = None,
    max_attempts: MaxAttempts = None,
    backoff_base: BackoffBase = None,
    backoff_factor: BackoffFactor = None,
    backoff_max: BackoffMax = None,
    backoff_jitter: BackoffJitter = None,
    max_in_flight: MaxInFlight = None,
    rps: Rps = None,
    ttl: Ttl = None,
    max_length: MaxLength = None,
    when_full: When = None,
) -> None:
    """Change single settings of a queue. To change its patterns, use pgmb queues bind."""
    given = policies.given(
        lease_for=lease_for,
        max_attempts=max_attempts,
        backoff_base=backoff_base,
        backoff_factor=backoff_factor,
        backoff_max=backoff_max,
        backoff_jitter=backoff_jitter,
        max_in_flight=max_in_flight,
        rps=rps,
        ttl=ttl,
        max_length=max_length,
        when_full=when_full,
    )
    if not given:
        refused = InvalidArgument("nothing to change: no setting was given")
        refused.advise("For example: pgmb queues alter NAME --lease-for 5m")
        raise refused
    with connect(dsn, max_size=1) as broker:
        change(broker.alter_queue, queue, **given)
    output.line(f"Changed queue {queue}.")


def convert(
    queue: Queue,
    dsn: Dsn = "",
    ordered: Annotated[
        bool, typer.Option("--ordered", help="Deliver events with the same key one at a time, in order.")
    ] = False,
    shards: Annotated[
        int | None, typer.Option(help="Shards of an ordered queue.", show_default=False)
    ] = None,
    lane: Annotated[
        list[str] | None, typer.Option(help="A pattern of urgent events. Repeat for lower priorities.")
    ] = None,
    fair_by: Annotated[
        str | None, typer.Option(metavar="TENANT", help="Serve tenants in turn: key, or header:NAME.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="None of these.")] = False,
    wait: Annotated[str, typer.Option(metavar="DURATION", help="How long to wait for leases to end.")] = "1m",
) -> None:
    """Make a queue ordered, prioritised, fair or plain, with all that waits in it.

    Pauses the queue and waits until its consumers have settled what they hold.
    """
    if sum((ordered, bool(lane), fair_by is not None, plain)) != 1:
        refused = InvalidArgument("say one of --ordered, --lane, --fair-by and --plain")
        refused.advise("For example: pgmb queues convert NAME --ordered")
        raise refused
    form = policies.given(ordered=ordered or None, shards=shards, lanes=lane or None, fair_by=fair_by)
    with connect(dsn, max_size=1) as broker:
        standing = settings.of_queue(broker, queue)
        # A pause of its own is one that a killed conversion left.
        paused = standing["paused_at"] is not None and standing["paused_reason"] != _CONVERSION
        # Otherwise the process ends at once and leaves the queue paused.
        ended: list[int] = []
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, frame: ended.append(number))
        try:
            if not paused:
                broker.pause(queue, _CONVERSION)
            _convert(broker, queue, form, time.monotonic() + durations.parse(wait).total_seconds(), ended)
        finally:
            if not paused:
                broker.resume(queue)
    output.line(f"Converted queue {queue}.")


def _convert(broker: Broker, queue: str, form: dict[str, Any], end: float, ended: list[int]) -> None:
    """Until it is done, `end` has come, or a signal is in `ended`."""
    while True:
        if ended:
            sys.exit(128 + ended[0])
        try:
            change(broker.convert_queue, queue, **form)
        except (QueueHeld, LockNotAvailable):
            if time.monotonic() > end:
                raise
            time.sleep(_BETWEEN_ATTEMPTS_SECONDS)
        else:
            return


def bind(
    queue: Queue,
    patterns: Patterns,
    dsn: Dsn = "",
    equals: Equals = None,
    filter: FilterBy = None,
    condition: Condition = None,
    param: Params = None,
    no_filter: Annotated[
        bool, typer.Option("--no-filter", help="Remove the filter. By default the queue keeps it.")
    ] = False,
) -> None:
    """Replace a queue's patterns, and its filter if one is given, from its current position on."""
    filtered = filters.given(equals, filter, condition, param)
    with connect(dsn, max_size=1) as broker:
        change(broker.bind, queue, patterns, **filtered, no_filter=no_filter)
    output.line(f"Queue {queue} gets {', '.join(patterns)}.")


def hand_over(
    queue: Queue,
    app: Annotated[str, typer.Argument(help="The name of the app, as in App(name=...).", show_default=False)],
    dsn: Dsn = "",
) -> None:
    """Hand a queue over to another app, or to an app that was renamed. Stop its workers first."""
    with connect(dsn, max_size=1) as broker:
        change(broker.hand_over, queue, app)
    output.line(f"Queue {queue} belongs to app {app}.")


def pause(
    queue: Queue,
    dsn: Dsn = "",
    reason: Annotated[str | None, typer.Option(help="A reason to show in the status.")] = None,
) -> None:
    """Stop delivery. Existing leases can still be settled."""
    with connect(dsn, max_size=1) as broker:
        change(broker.pause, queue, reason)
    output.line(f"Paused queue {queue}.")


def resume(queue: Queue, dsn: Dsn = "") -> None:
    """Resume delivery."""
    with connect(dsn, max_size=1) as broker:
        change(broker.resume, queue)
    output.line(f"Resumed queue {queue}.")


def purge(queue: Queue, dsn: Dsn = "", yes: Yes = False) -> None:
    """Skip all waiting events, retries and leases. Dead letters are kept."""
    with connect(dsn, max_size=1) as broker:
        found = _standing(broker, queue)
        waiting = f"up to {found.waiting:,} events and {found.retries:,} retries"
        confirm(f"Skip what waits in queue {queue}, {waiting}?", yes)
        change(broker.purge, queue)
    output.line(f"Purged queue {queue}.")


def seek(
    queue: Queue,
    to: Annotated[
        moments.Moment, typer.Option("--to", parser=moments.parse, metavar="POINT", help=f"{moments.MEANT}.")
    ],
    dsn: Dsn = "",
    yes: Yes = False,
) -> None:
    """Move a queue to a point in its stream. Drops leases and retries; keeps dead letters."""
    with connect(dsn, max_size=1) as broker:
        found = _standing(broker, queue)
        confirm(
            f"Move queue {queue} to {to}? Its {found.leases:,} leases and {found.retries:,} retries end.", yes
        )
        position = to.position(broker, found.stream)
        change(broker.seek, queue, position)
        beginning = to.named != "earliest" and position == broker.earliest(found.stream)
    output.line(f"Moved queue {queue} to {to}.")
    if beginning:
        output.note("No tick is that old, so the queue is at the earliest event. `pgmb serve` writes ticks.")


def drop(queue: Queue, dsn: Dsn = "", yes: Yes = False) -> None:
    """Drop a queue with its leases, retries and dead letters. The events stay in the log."""
    with connect(dsn, max_size=1) as broker:
        found = _standing(broker, queue)
        confirm(f"Drop queue {queue} with {found.retries:,} retries and {found.dead:,} dead letters?", yes)
        change(broker.drop_queue, queue)
    output.line(f"Dropped queue {queue}.")


def _beginning(event: NextEvent) -> str:
    shown = event.payload if len(event.payload) <= _PAYLOAD else event.payload[:_PAYLOAD]
    return shown if event.bytes <= len(shown.encode()) else f"{shown}… ({event.bytes:,} bytes)"


def _disagreeing(queue: QueueStatus, found: list[Disagreement]) -> dict[str, object]:
    return {"disagreements": [one for one in found if one.queue == queue.queue]}


def _standing(broker: Broker, queue: str) -> QueueStatus:
    found = next((one for one in broker.queue_status() if one.queue == queue), None)
    if found is None:
        missing = QueueNotFound(f"queue '{queue}' does not exist")
        missing.advise("pgmb queues list shows those that do.")
        raise missing
    return found
