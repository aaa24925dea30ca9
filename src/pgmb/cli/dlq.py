"""pgmb dlq: list, show, redrive, drop dead letters."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
import typer

from pgmb import Broker, DeadLetter, connect
from pgmb.cli import output
from pgmb.cli.changes import change
from pgmb.cli.options import AsJson, Dsn, Queue, Yes
from pgmb.cli.terminal import confirm
from pgmb.errors import NotFound

dlq = typer.Typer(
    help="Dead letters: events that failed for good, with their last error.", no_args_is_help=True
)

Topic: TypeAlias = Annotated[str | None, typer.Option(help="Only topics that match this pattern.")]
Error: TypeAlias = Annotated[
    str | None, typer.Option(help="Only errors that contain this text; with %, a LIKE pattern.")
]
Ids: TypeAlias = Annotated[list[int] | None, typer.Option("--id", help="Only this id. May be repeated.")]

_PAGE_EVENTS = 1000


def register(app: typer.Typer) -> None:
    dlq.command("list")(list_dead)
    for command in (show, redrive, drop):
        dlq.command()(command)
    app.add_typer(dlq, name="dlq")


def list_dead(
    queue: Queue,
    dsn: Dsn = "",
    topic: Topic = None,
    error: Error = None,
    after: Annotated[int, typer.Option(help="Start after the dead letter with this id.")] = 0,
    max: Annotated[int, typer.Option(help="Maximum number.", min=1)] = 100,
    as_json: AsJson = False,
) -> None:
    """List dead letters, oldest first."""
    with connect(dsn, max_size=1) as broker:
        found = broker.dead_letters(queue, topic, _like(error), after, max)
    if as_json:
        output.json([_document(letter) for letter in found])
        return
    if not found:
        output.line("No dead letters.")
        return
    rows = [
        (str(letter.id), letter.died_at, letter.event.topic, letter.event.key, letter.attempt, letter.error)
        for letter in found
    ]
    output.table(f"Dead letters of {queue}", ("id", "died", "topic", "key", "attempts", "error"), rows)
    if len(found) == max:
        output.line(f"There may be more: --after {found[-1].id}")


def show(
    queue: Queue,
    id: Annotated[int, typer.Argument(help="Its id, as `dlq list` shows it.")],
    dsn: Dsn = "",
    as_json: AsJson = False,
) -> None:
    """Show one dead letter with its payload."""
    with connect(dsn, max_size=1) as broker:
        found = broker.dead_letters(queue, after=id - 1, max=1)
    if not found or found[0].id != id:
        missing = NotFound(f"queue '{queue}' has no dead letter {id}")
        missing.advise(f"pgmb dlq list {queue}")
        raise missing
    document = _document(found[0])
    if as_json:
        output.json(document)
        return
    document["id"] = str(id)
    del document["errors"]
    document["payload"] = msgspec.json.format(found[0].event.raw, indent=2).decode()
    document["headers"] = msgspec.json.encode(found[0].event.headers).decode()
    output.record(f"Dead letter {id} of {queue}", document)
    output.attempts(f"Failed attempts at {queue}", found[0].errors)


def redrive(queue: Queue, dsn: Dsn = "", topic: Topic = None, error: Error = None, id: Ids = None) -> None:
    """Send dead letters back to the queue: all, or those that match all filters."""
    with connect(dsn, max_size=1) as broker:
        count = change(broker.redrive, queue, id or None, topic, _like(error))
    output.line(f"Redrove {count:,} dead letter{'' if count == 1 else 's'} of queue {queue}.")


def drop(
    queue: Queue, dsn: Dsn = "", topic: Topic = None, error: Error = None, id: Ids = None, yes: Yes = False
) -> None:
    """Delete dead letters permanently: all, or those that match all filters."""
    with connect(dsn, max_size=1) as broker:
        chosen = _chosen(broker, queue, topic, _like(error), id)
        confirm(f"Delete {len(chosen):,} dead letters of queue {queue} for good?", yes)
        count = change(broker.drop_dead, queue, chosen)
    output.line(f"Dropped {count:,} dead letters of queue {queue}.")


def _chosen(
    broker: Broker, queue: str, topic: str | None, error: str | None, ids: list[int] | None
) -> list[int]:
    """The ids of those that are dead now: what dies while the question is open is not in the answer."""
    chosen: list[int] = []
    wanted = set(ids or ())
    after = 0
    while page := broker.dead_letters(queue, topic, error, after, _PAGE_EVENTS):
        chosen += [letter.id for letter in page if not ids or letter.id in wanted]
        after = page[-1].id
    return chosen


def _like(error: str | None) -> str | None:
    if error is None or "%" in error:
        return error
    escaped = error.replace("\\", "\\\\").replace("_", "\\_")
    return f"%{escaped}%"


def _document(letter: DeadLetter) -> dict[str, Any]:
    event = output.event_document(letter.event)
    return {
        "id": letter.id,
        "died_at": letter.died_at,
        "error": letter.error,
        "errors": letter.errors,
        "event_id": event.pop("id"),
        **event,
    }
