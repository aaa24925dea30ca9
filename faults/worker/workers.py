"""Publishers and consumers that expect to be killed: each writes down what it knows before and after it acts.

They run in processes of their own, or in threads while the server is killed. What they wrote outlives them.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psycopg

from faults.log.history import Event, Outcome, Publisher, Reader
from faults.log.readers import turn_of


class Journal:
    """JSON lines, each written by one call, so that a kill leaves no half lines that matter."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, kind: str, *what: Any) -> None:
        os.write(self._file, json.dumps([kind, *what]).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)

    @staticmethod
    def read(path: Path) -> Iterator[list[Any]]:
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                yield json.loads(line)


def publish(dsn: str, number: int, journal: Path, stop: Path, least: int = 0, pace: float = 0.0) -> None:
    """Publishes small transactions, a fifth of them rolled back, until told to stop and `least` are done."""
    chance = random.Random(number)
    notes = Journal(journal)
    name = number << 32
    connection: psycopg.Connection[Any] | None = None
    done = 0
    while not stop.exists() or done < least:
        time.sleep(pace)
        events: list[Event] = []
        for _ in range(chance.randint(1, 6)):
            name += 1
            events.append(Event(name, f"publisher-{number}", name, "t"))
        notes.write("invoke", events)
        committing = False
        try:
            connection = connection or psycopg.connect(dsn, application_name="publisher")
            _send(connection, events, copy=chance.random() < 0.3)
            if chance.random() < 0.2:
                connection.rollback()
                notes.write("fail")
                continue
            committing = True
            connection.commit()
            notes.write("ok")
            done += len(events)
        except psycopg.OperationalError:
            if not committing:
                notes.write("fail")  # it never asked to commit
            _discard(connection)
            connection = None
    notes.close()
    if connection is not None:
        connection.close()


def _send(connection: psycopg.Connection[Any], events: list[Event], *, copy: bool) -> None:
    if not copy:
        for event in events:
            connection.execute(
                "select pgmb.publish(%s, %s::text::json, key => %s)",
                [event.topic, str(event.name), event.key],
            )
        return
    with (
        connection.cursor() as cursor,
        cursor.copy("copy pgmb.log_main (topic, key, payload) from stdin") as rows,
    ):
        for event in events:
            rows.write_row((event.topic, event.key, str(event.name)))


def consume(dsn: str, number: int, journal: Path, stop: Path, lease_for: str = "400 ms") -> None:
    """Receives, works for a moment, and commits the ack together with its effects, until told to stop."""
    chance = random.Random(number)
    notes = Journal(journal)
    connection: psycopg.Connection[Any] | None = None
    while not stop.exists():
        try:
            connection = connection or psycopg.connect(dsn, application_name="consumer")
            rows = connection.execute(
                "select lease::text, payload::text::bigint, attempt"
                " from pgmb.receive('q', %s, lease_for => %s, durable => %s)",
                [chance.choice((1, 5, 20)), lease_for, chance.random() < 0.5],
            ).fetchall()
            connection.commit()
            if not rows:
                time.sleep(0.01)
                continue
            lease = rows[0][0]
            notes.write("got", lease, [row[1:] for row in rows])
            time.sleep(chance.random() * 0.02)
            connection.execute(
                "insert into effect (event) select unnest(%s::bigint[])", [[name for _, name, _ in rows]]
            )
            connection.execute("select pgmb.ack(%s)", [lease])
            connection.commit()
            notes.write("acked", lease)
        except psycopg.OperationalError:
            _discard(connection)
            connection = None
        except psycopg.Error as error:
            if error.sqlstate != "MB011" or connection is None:
                raise
            connection.rollback()  # the lease is lost, and with it the effects
    notes.close()
    if connection is not None:
        connection.close()


def _discard(connection: psycopg.Connection[Any] | None) -> None:
    """The server is gone for a moment."""
    if connection is not None:
        connection.close()
    time.sleep(0.02)


def publishers_of(journals: Iterable[Path]) -> list[Publisher]:
    found: list[Publisher] = []
    for path in journals:
        publisher = Publisher()
        for kind, *what in Journal.read(path):
            if kind == "invoke":
                publisher.begin().events = [Event(*event) for event in what[0]]
            else:
                outcome = Outcome.COMMITTED if kind == "ok" else Outcome.ROLLED_BACK
                publisher.transactions[-1].outcome = outcome
        found.append(publisher)
    return found


def reader_of(journals: Iterable[Path]) -> Reader:
    reader = Reader("consumers", once=False)
    for path in journals:
        open_leases: dict[str, list[Any]] = {}
        for kind, lease, *what in Journal.read(path):
            if kind == "got":
                open_leases[lease] = [
                    delivery
                    for name, attempt in what[0]
                    for delivery in reader.got([name], turn_of(lease), attempt)
                ]
            else:
                for delivery in open_leases[lease]:
                    delivery.settled = True
    return reader
