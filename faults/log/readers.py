"""Readers that write down all they get, to run in threads while others publish."""

from __future__ import annotations

import threading
import time
from typing import Any

import psycopg
from psycopg.rows import TupleRow

import pgmb
from faults.log.history import Delivery, Reader


def turn_of(lease: str) -> int:
    """The number of the claim in a lease: it rises with the queue's position."""
    return int(lease.replace("-", "")[6:22], 16)


class Consumer:
    """A competing consumer of a queue: receives, acks, until `finished` is set and nothing is left.

    `style` is how it settles: by the next receive ("chained"), by a call of its own ("apart"), or without
    waiting for the disk ("relaxed"). With nothing to do it looks again after `idle` seconds.
    """

    def __init__(
        self,
        dsn: str,
        reader: Reader,
        finished: threading.Event,
        *,
        size: int,
        style: str = "apart",
        idle: float = 0.01,
    ) -> None:
        self._dsn = dsn
        self._reader = reader
        self._finished = finished
        self._size = size
        self._style = style
        self._idle = idle
        self.calls = 0

    def run(self) -> None:
        lease: str | None = None
        with psycopg.connect(self._dsn, autocommit=True, application_name="consumer") as connection:
            while True:
                last = self._finished.is_set()
                rows = connection.execute(
                    "select lease::text, payload::text::bigint, attempt"
                    " from pgmb.receive(%s, %s, ack => %s, durable => %s)",
                    [self._reader.name, self._size, lease, self._style != "relaxed"],
                ).fetchall()
                self.calls += 1
                lease = None
                if rows:
                    lease = self._write_down(rows)
                    if self._style != "chained":
                        connection.execute("select pgmb.ack(%s)", [lease])
                        lease = None
                elif last:
                    return
                else:
                    time.sleep(self._idle)

    def _write_down(self, rows: list[TupleRow]) -> str:
        lease: str = rows[0][0]
        turn = turn_of(lease)
        self._reader.deliveries.extend(Delivery(name, turn, attempt) for _, name, attempt in rows)
        return lease


class Client:
    """A competing consumer by the Python client, which claims and reads in one statement where it can.

    Several may share a broker, as the tasks of a process do.
    """

    def __init__(self, broker: pgmb.Broker, reader: Reader, finished: threading.Event, *, size: int) -> None:
        self._broker = broker
        self._reader = reader
        self._finished = finished
        self._size = size

    def run(self) -> None:
        lease: pgmb.Lease | None = None
        while True:
            last = self._finished.is_set()
            lease = self._broker.receive(self._reader.name, self._size, ack=lease)
            turn = turn_of(str(lease.id))
            self._reader.deliveries.extend(Delivery(event.payload, turn, event.attempt) for event in lease)
            if not lease and last:
                return
            if not lease:
                time.sleep(0.01)


class Walker:
    """Reads between positions, page by page, until `finished` is set and a last walk is done.

    With `ticks` its positions are named by ticks. With `confirms` retention waits for it.
    """

    def __init__(
        self,
        dsn: str,
        reader: Reader,
        finished: threading.Event,
        *,
        page: int,
        ticks: bool = False,
        confirms: bool = False,
    ) -> None:
        self._dsn = dsn
        self._reader = reader
        self._finished = finished
        self._page = page
        self._ticks = ticks
        self._confirms = confirms
        self._turn = 0
        with psycopg.connect(dsn, autocommit=True) as connection:
            self._after = _value(connection, "select pgmb.position()::text")
            if confirms:
                self._confirm(connection)

    def run(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True, application_name="walker") as connection:
            while True:
                last = self._finished.is_set()
                upto = self._position(connection)
                self._walk(connection, upto)
                self._after = upto
                if self._confirms:
                    self._confirm(connection)
                if last:
                    return
                time.sleep(0.03)

    def _position(self, connection: psycopg.Connection[Any]) -> str:
        if not self._ticks:
            return str(_value(connection, "select pgmb.position()::text"))
        connection.execute("select pgmb.tick()")
        # Null where another session's tick covers everything: that one, then.
        return str(_value(connection, "select (pgmb.newest_tick('main')).position::text"))

    def _walk(self, connection: psycopg.Connection[Any], upto: str) -> None:
        place = 0
        while True:
            rows = connection.execute(
                "select seq, payload::text::bigint from pgmb.between('main', %s, %s, %s, %s)",
                [self._after, upto, place, self._page],
            ).fetchall()
            self._turn += 1
            self._reader.got((name for _, name in rows), self._turn)
            if len(rows) < self._page:
                return
            place = rows[-1][0]

    def _confirm(self, connection: psycopg.Connection[Any]) -> None:
        connection.execute("select pgmb.confirm('main', %s, %s)", [self._reader.name, self._after])


class SequenceCursor:
    """The control: a reader that trusts the sequence alone, and so loses whatever commits late."""

    def __init__(self, dsn: str, reader: Reader, finished: threading.Event) -> None:
        self._dsn = dsn
        self._reader = reader
        self._finished = finished

    def run(self) -> None:
        place = turn = 0
        with psycopg.connect(self._dsn, autocommit=True, application_name="cursor") as connection:
            while True:
                last = self._finished.is_set()
                rows = connection.execute(
                    "select seq, payload::text::bigint from pgmb.log_main"
                    " where seq > %s order by seq limit 1000",
                    [place],
                ).fetchall()
                turn += 1
                self._reader.got((name for _, name in rows), turn)
                if rows:
                    place = rows[-1][0]
                elif last:
                    return
                time.sleep(0.01)


def _value(connection: psycopg.Connection[Any], statement: Any, parameters: Any = None) -> Any:
    row = connection.execute(statement, parameters).fetchone()
    assert row is not None
    return row[0]
