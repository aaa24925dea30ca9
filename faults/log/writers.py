"""Writers that publish in every way there is, and commit late, early, in part or not at all."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg

from faults.log.history import Event, Outcome, Publisher, Transaction

ENTITIES = 64
"""Rows that writers serialise on: their versions must arrive in the order of the commits."""

TOPICS = ("order.created", "order.paid", "invoice.created", "order.eu.created", "stock")


def prepare(connection: psycopg.Connection[Any]) -> None:
    """Creates the table whose rows writers serialise on."""
    connection.execute("create table entity (number int primary key, version bigint not null default 0)")
    connection.execute("insert into entity (number) select generate_series(0, %s)", [ENTITIES - 1])


class Writer:
    """One session that publishes until `events` events are committed, and writes down what it knows.

    `serialise` has it wait for others' row locks now and then; `finished` ends it before its time.
    """

    def __init__(
        self,
        number: int,
        dsn: str,
        events: int,
        *,
        delay: float,
        size: int,
        seed: int,
        serialise: bool = True,
        finished: threading.Event | None = None,
    ) -> None:
        self.number = number
        self.publisher = Publisher()
        self._dsn = dsn
        self._goal = events
        self._delay = delay
        self._size = size
        self._serialise = serialise
        self._finished = finished or threading.Event()
        self._chance = random.Random(seed * 1000 + number)
        self._name = number << 32
        self._order = 0

    def run(self) -> None:
        done = 0
        with psycopg.connect(self._dsn, application_name=f"publisher {self.number}") as connection:
            while done < self._goal and not self._finished.is_set():
                done += self._transaction(connection, min(self._size, self._goal - done))

    def _transaction(self, connection: psycopg.Connection[Any], size: int) -> int:
        chance = self._chance
        mine = self.publisher.begin()
        serialised = False
        style = chance.random()
        if style < 0.3:
            connection.execute("select pg_current_xact_id()")  # an xid long before the first event
            self._wait(0.5)
        elif style < 0.45 and self._serialise:
            self._publish_version(connection, mine)
            serialised = True
        for _ in range(chance.randrange(1, 4)):
            chance.choice((self._publish, self._publish_many, self._copy, self._savepoint))(
                connection, mine, chance.randint(1, size)
            )
            if chance.random() < 0.3:
                self._wait(0.1)
        # Who holds the lock of an entity makes others wait: not for the whole delay.
        self._wait(0.1 if serialised else 1)
        if chance.random() < 0.2:
            connection.rollback()
            mine.outcome = Outcome.ROLLED_BACK
            return 0
        connection.commit()
        mine.outcome = Outcome.COMMITTED
        return len(mine.events)

    def _wait(self, part: float) -> None:
        if self._chance.random() < 0.7:
            time.sleep(self._chance.random() * self._delay * part)

    def _event(self, topic: str | None = None) -> Event:
        self._name += 1
        self._order += 1
        return Event(self._name, f"writer-{self.number}", self._order, topic or self._chance.choice(TOPICS))

    def _publish_version(self, connection: psycopg.Connection[Any], mine: Transaction) -> None:
        entity = self._chance.randrange(ENTITIES)
        row = connection.execute(
            "update entity set version = version + 1 where number = %s returning version", [entity]
        ).fetchone()
        assert row is not None
        self._name += 1
        event = Event(self._name, f"entity-{entity}", row[0], "entity.changed")
        mine.events.append(event)
        self._send_one(connection, event)

    def _publish(self, connection: psycopg.Connection[Any], mine: Transaction, size: int) -> None:
        for _ in range(min(size, 5)):
            event = self._event()
            mine.events.append(event)
            self._send_one(connection, event)

    def _send_one(self, connection: psycopg.Connection[Any], event: Event) -> None:
        connection.execute(
            "select pgmb.publish(%s, %s::text::json, key => %s)", [event.topic, str(event.name), event.key]
        )

    def _publish_many(self, connection: psycopg.Connection[Any], mine: Transaction, size: int) -> None:
        events = [self._event() for _ in range(size)]
        mine.events.extend(events)
        connection.execute(
            "select pgmb.publish_many(topics => %s, payloads => %s::text[]::json[], keys => %s)",
            [
                [event.topic for event in events],
                [str(event.name) for event in events],
                [event.key for event in events],
            ],
        )

    def _copy(self, connection: psycopg.Connection[Any], mine: Transaction, size: int) -> None:
        events = [self._event() for _ in range(size)]
        mine.events.extend(events)
        with (
            connection.cursor() as cursor,
            cursor.copy("copy pgmb.log_main (topic, key, payload) from stdin") as copy,
        ):
            for event in events:
                copy.write_row((event.topic, event.key, str(event.name)))

    def _savepoint(self, connection: psycopg.Connection[Any], mine: Transaction, size: int) -> None:
        """Publishes inside a savepoint, and takes half of such parts back."""
        keep = self._chance.random() < 0.5
        part = mine
        if not keep:
            part = Transaction(outcome=Outcome.ROLLED_BACK)
            self.publisher.transactions.append(part)
        connection.execute("savepoint part")
        inner: Callable[[psycopg.Connection[Any], Transaction, int], None]
        inner = self._chance.choice((self._publish, self._publish_many, self._copy))
        inner(connection, part, size)
        connection.execute("release savepoint part" if keep else "rollback to savepoint part")
