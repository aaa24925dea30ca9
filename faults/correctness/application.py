"""The application that is checked: a ledger of what was published, and a table of effects."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from uuid import UUID

import psycopg

from faults.correctness.verdict import Effect, Generation, Published
from harness import states

TABLES = """
create schema if not exists app;
create table if not exists app.ledger (
  event uuid primary key,
  queue text not null,
  key text,
  number bigint not null,
  at timestamptz not null default clock_timestamp()
);
create table if not exists app.effect (
  event uuid not null,
  lease uuid not null,
  worker text not null,
  attempt integer not null,
  at timestamptz not null default clock_timestamp()
);
create index if not exists effect_event on app.effect (event);
"""

KILLED = (psycopg.errors.QueryCanceled, psycopg.OperationalError)
"""What a session gets whose statement was cancelled, or that was terminated."""

_PUBLISH = """
insert into app.ledger (event, queue, key, number)
select pgmb.publish(%s, to_json(number), key => 'key-' || key), %s, 'key-' || key, number
from unnest(%s::bigint[], %s::bigint[]) batch (key, number)
"""


class Publisher:
    """Publishes events and notes each in the ledger, in one transaction. One publisher a key."""

    def __init__(self, name: int, keys: int, queue: str) -> None:
        self._queue = queue
        self.keys = [name * 1000 + key for key in range(keys)]
        self._number = 0
        self.committed_at: dict[int, float] = {}
        """By number: a time after the commit."""

    def publish(self, connection: psycopg.Connection[Any], events: int) -> range:
        """Publishes in the connection's transaction, or in one of its own. Returns the numbers."""
        numbers = range(self._number, self._number + events)
        self._number += events
        keys = [self.keys[number % len(self.keys)] for number in numbers]
        connection.execute(_PUBLISH, [self._queue, self._queue, keys, list(numbers)])
        return numbers

    def committed(self, numbers: range) -> None:
        self.committed_at.update(dict.fromkeys(numbers, time.time()))

    def flow(self, dsn: str, events: int, size: int, pause: float, stop: threading.Event) -> None:
        """Publishes `events` in batches, waiting `pause` seconds between two. Goes on after it was killed."""
        while self._number < events and not stop.is_set():
            with (
                suppress(*KILLED),
                psycopg.connect(dsn, autocommit=True, application_name="publisher") as connection,
            ):
                while self._number < events and not stop.wait(pause):
                    self.committed(self.publish(connection, min(size, events - self._number)))


def prepare(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(TABLES)


def published(connection: psycopg.Connection[Any], publishers: Sequence[Publisher] = ()) -> list[Published]:
    """The ledger. An event whose commit was not noted counts from when it was written."""
    noted = {f"key-{key}": publisher.committed_at for publisher in publishers for key in publisher.keys}
    rows = connection.execute(
        "select event, queue, key, number, extract(epoch from at)::float from app.ledger"
    )
    return [
        Published(event, queue, key, number, noted.get(key, {}).get(number, at))
        for event, queue, key, number, at in rows
    ]


def effects(connection: psycopg.Connection[Any]) -> list[Effect]:
    rows = connection.execute("select event, lease, extract(epoch from at)::float from app.effect")
    return [Effect(*row) for row in rows]


def generations(connection: psycopg.Connection[Any], queue: str) -> list[Generation]:
    """The generations of a queue that receivers opened."""
    return [Generation(*row) for row in states.generations(connection, queue)]


def dead_letters(connection: psycopg.Connection[Any], queues: Sequence[str]) -> list[UUID]:
    rows = connection.execute(
        "select d.event_id from unnest(%s::text[]) queue, pgmb.dead_letters(queue, max => 1000000) d",
        [list(queues)],
    )
    return [event for (event,) in rows]


def unsettled(connection: psycopg.Connection[Any], queues: Sequence[str]) -> int:
    """How many events of the ledger have neither an effect nor a dead letter."""
    row = connection.execute(
        "select count(*) from app.ledger l"
        " where not exists (select from app.effect e where e.event = l.event)"
        " and l.event not in (select d.event_id from unnest(%s::text[]) queue,"
        " pgmb.dead_letters(queue, max => 1000000) d)",
        [list(queues)],
    ).fetchone()
    assert row is not None
    return int(row[0])
