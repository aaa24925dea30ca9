"""Writers that record what they publish in the same transaction: the record is what was committed."""

from __future__ import annotations

import threading
from typing import Any

import psycopg

from faults.log.history import Event, Transaction
from faults.log.writers import Writer, prepare

ENDLESS = 1 << 40

__all__ = ["RecordingWriter", "prepare_record", "recorded"]


def prepare_record(connection: psycopg.Connection[Any]) -> None:
    """Creates the tables that writers need."""
    prepare(connection)
    connection.execute(
        "create table recorded (name bigint primary key, key text not null, place bigint not null)"
    )


def recorded(connection: psycopg.Connection[Any]) -> dict[int, Event]:
    """What was committed, by name."""
    rows = connection.execute("select name, key, place from recorded")
    return {name: Event(name, key, place, "") for name, key, place in rows}


class RecordingWriter(Writer):
    """A writer whose events stand in table `recorded` if and only if they are committed.

    It begins no transaction while `gate` is closed.
    """

    def __init__(self, number: int, dsn: str, *, gate: threading.Event, **options: Any) -> None:
        super().__init__(number, dsn, ENDLESS, **options)
        self._gate = gate

    def _transaction(self, connection: psycopg.Connection[Any], size: int) -> int:
        if not self._gate.wait(0.2):
            return 0
        return super()._transaction(connection, size)

    def _send_one(self, connection: psycopg.Connection[Any], event: Event) -> None:
        super()._send_one(connection, event)
        _record(connection, [event])

    def _publish_many(self, connection: psycopg.Connection[Any], mine: Transaction, size: int) -> None:
        before = len(mine.events)
        super()._publish_many(connection, mine, size)
        _record(connection, mine.events[before:])

    def _copy(self, connection: psycopg.Connection[Any], mine: Transaction, size: int) -> None:
        before = len(mine.events)
        super()._copy(connection, mine, size)
        _record(connection, mine.events[before:])


def _record(connection: psycopg.Connection[Any], events: list[Event]) -> None:
    connection.execute(
        "insert into recorded select * from unnest(%s::bigint[], %s::text[], %s::bigint[])",
        [
            [event.name for event in events],
            [event.key for event in events],
            [event.order for event in events],
        ],
    )
