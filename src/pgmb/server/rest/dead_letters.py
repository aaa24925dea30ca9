"""Operations on dead letters."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

import msgspec
from psycopg import AsyncConnection
from psycopg.rows import tuple_row

from pgmb.errors import translated
from pgmb.server.changes import audited
from pgmb.server.problems import invalid
from pgmb.server.rest.operation import Call, Need, Operations
from pgmb.server.rest.schemas import (
    Counted,
    EventDocument,
    Given,
    Name,
    Number,
    Numbers,
    Page,
    Text,
    Time,
    Topic,
)
from pgmb.types import DeadLetter, FailedAttempt

operations = Operations("dead letters")

CONSUME: Final = Need("consume", "queue")
_LETTERS: Final = "/v1/queues/{queue}/dead_letters"
_CHOSEN: Final = (
    "select array_agg(d.id) from pgmb.dead_letters(queue => %(queue)s, topic => %(topic)s,"
    " error => %(error)s, max => 2147483647) d where (%(ids)s::bigint[] is null or d.id = any (%(ids)s))"
    " and (%(before)s::timestamptz is null or d.died_at < %(before)s)"
    " and (%(since)s::timestamptz is null or d.died_at >= %(since)s)"
)


class Listed(Given):
    topic: Topic | None = None
    """Topics that match this pattern."""
    error: Text | None = None
    """Errors that contain this text, or with % match it by LIKE."""
    after: Number = 0
    """Continue after the dead letter with this id."""
    max: Page = 100


class Chosen(Given):
    """Criteria, which must all match."""

    ids: Numbers | None = None
    topic: Topic | None = None
    error: Text | None = None
    died_before: Time | None = None
    died_since: Time | None = None


class DropDead(Chosen):
    all: bool = False
    """Required without other criteria."""


class DeadLetterDocument(msgspec.Struct):
    id: int
    died_at: datetime
    error: str | None
    errors: list[FailedAttempt]
    """The last ten attempts that failed, the newest last."""
    event: EventDocument

    @classmethod
    def of(cls, letter: DeadLetter) -> DeadLetterDocument:
        return cls(letter.id, letter.died_at, letter.error, letter.errors, EventDocument.of(letter.event))


class DeadLetters(msgspec.Struct):
    """The oldest first. `next` is the `after` of the next page; null on the last page."""

    dead_letters: list[DeadLetterDocument]
    next: int | None


@operations.add("GET", _LETTERS, CONSUME, Need("inspect"))
async def list_dead_letters(call: Call, queue: Name, query: Listed) -> DeadLetters:
    """List the dead letters of a queue, page by page."""
    found = await call.broker.dead_letters(queue, query.topic, like(query.error), query.after, query.max)
    if not found:
        await call.broker.stream_of(queue)
    following = found[-1].id if len(found) == query.max else None
    return DeadLetters([DeadLetterDocument.of(letter) for letter in found], following)


@operations.add("POST", f"{_LETTERS}/redrive", CONSUME)
async def redrive(call: Call, queue: Name, body: Chosen) -> Counted:
    """Redrive all or the selected dead letters: deliver them again, with attempts counted from 1."""
    async with call.changing() as change:
        ids = await _ids(change.conn, queue, body)
        count = await call.broker.redrive(queue, ids, body.topic, like(body.error), conn=change.conn)
        if count:
            await change.record("redrive", queue, **_told(body), count=count)
    return Counted(count)


@operations.add("POST", f"{_LETTERS}/drop", CONSUME)
async def drop_dead(call: Call, queue: Name, body: DropDead) -> Counted:
    """Delete the selected dead letters, or all."""
    if not body.all and not _told(body):
        raise invalid("no dead letters selected", "Send `ids`, or `all`.")
    async with call.changing() as change:
        ids = await _chosen(change.conn, queue, body)
        count = await call.broker.drop_dead(queue, ids, conn=change.conn)
        if count:
            await change.record("drop_dead", queue, **_told(body), count=count)
    return Counted(count)


def like(error: str | None) -> str | None:
    """A LIKE pattern for errors that contain a text; a text with % is a pattern already."""
    if error is None or "%" in error:
        # A pattern must not end in the middle of an escape.
        return error if error is None or len(error) % 2 == len(error.rstrip("\\")) % 2 else error + "\\"
    escaped = error.replace("\\", "\\\\").replace("_", "\\_")
    return f"%{escaped}%"


def _told(body: Chosen) -> dict[str, Any]:
    return {name: value for name, value in audited(body, "all").items() if value is not None}


async def _ids(conn: AsyncConnection[Any], queue: str, chosen: Chosen) -> list[int] | None:
    if chosen.died_before is None and chosen.died_since is None:
        return chosen.ids
    return await _chosen(conn, queue, chosen)


async def _chosen(conn: AsyncConnection[Any], queue: str, chosen: Chosen) -> list[int]:
    with translated():
        cursor = conn.cursor(row_factory=tuple_row)
        await cursor.execute(
            _CHOSEN,
            {
                "queue": queue,
                "topic": chosen.topic,
                "error": like(chosen.error),
                "ids": chosen.ids,
                "before": chosen.died_before,
                "since": chosen.died_since,
            },
        )
        row = await cursor.fetchone()
    return (row[0] if row else None) or []
