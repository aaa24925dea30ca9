"""Dead letters, many or old. pgmb.dead_letters() shows them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from harness.states.running import Db, rows


def add_dead(db: Db, events: int, queue: str = "q", *, topic: str = "t") -> None:
    """Make that many dead letters of a queue."""
    rows(
        db,
        "insert into pgmb.dead (queue, attempt, seq, event_id, topic, payload, published_at)"
        " select q.id, 2, g, gen_random_uuid(), %(topic)s, '1', now()"
        " from pgmb.queue q, generate_series(1, %(events)s::int) g where q.name = %(queue)s",
        {"topic": topic, "events": events, "queue": queue},
    )


def add_dead_letters(
    db: Db,
    letters: Sequence[tuple[datetime, str, datetime]],
    queue: str = "q",
    *,
    attempt: int = 5,
    topic: str = "t",
    payload: str = "1",
) -> None:
    """Make dead letters of a queue: when each died, why, and when its event was published."""
    died, errors, published = (list(column) for column in zip(*letters, strict=True))
    rows(
        db,
        "insert into pgmb.dead (queue, died_at, attempt, error, seq, event_id, topic, payload, published_at)"
        " select q.id, d.at, %(attempt)s, d.error, 0, gen_random_uuid(), %(topic)s, %(payload)s::json,"
        " d.published_at"
        " from unnest(%(died)s::timestamptz[], %(errors)s::text[], %(published)s::timestamptz[])"
        " d (at, error, published_at), pgmb.queue q where q.name = %(queue)s",
        {
            "attempt": attempt,
            "topic": topic,
            "payload": payload,
            "died": died,
            "errors": errors,
            "published": published,
            "queue": queue,
        },
    )


def age_dead(db: Db, by: str, *, first: int) -> None:
    """Make the first dead letters that much older."""
    rows(
        db,
        "update pgmb.dead set died_at = died_at - %s::interval"
        " where id in (select id from pgmb.dead order by id limit %s)",
        [by, first],
    )


def forget_archiving(db: Db) -> None:
    """Make all dead letters such as are in no lake yet."""
    rows(db, "update pgmb.dead set archived_at = null")


def keep_from_dying(db: Db) -> None:
    """Let nobody write a dead letter until this transaction ends."""
    rows(db, "lock table pgmb.dead in share mode")
