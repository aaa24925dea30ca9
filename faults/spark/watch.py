"""The database seen from beside while Spark publishes: whom to hold, who waits, what was published."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import psycopg

from faults.spark.console import PATIENCE, Console


class Watch:
    """Holds whoever comes to a certain point, by locks that they wait for."""

    def __init__(self, dsn: str) -> None:
        self._looking: psycopg.Connection[Any] = psycopg.connect(dsn, autocommit=True)
        self._holding: psycopg.Connection[Any] = psycopg.connect(dsn)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._holding.close()
        self._looking.close()

    @contextmanager
    def held(self, table: str) -> Iterator[None]:
        """Nobody writes to the table meanwhile; whoever wants to waits."""
        self._holding.execute(f"lock table {table} in share mode")
        try:
            yield
        finally:
            self._holding.rollback()

    @contextmanager
    def held_version(self, console: Console) -> Iterator[None]:
        """Once tasks publish directly, they go on, but nobody says that the version is published."""
        deadline = time.monotonic() + PATIENCE
        while not self._holding.execute(
            "select from pgmb.ledger where version is null and under_way is not null for share"
        ).rowcount:
            self._holding.rollback()
            _still_waiting(deadline, console)
        try:
            yield
        finally:
            self._holding.rollback()

    def wait_for_waiting(self, number: int, console: Console) -> list[int]:
        """Until as many backends wait for a lock (ours: no other lasts). Who they are."""
        deadline = time.monotonic() + PATIENCE
        while True:
            rows = self._looking.execute(
                "select pid from pg_stat_activity"
                " where datname = current_database() and wait_event_type = 'Lock' order by query_start"
            )
            pids = [pid for (pid,) in rows]
            if len(pids) >= number:
                return pids
            _still_waiting(deadline, console)

    def end(self, pids: list[int]) -> None:
        """Ends sessions, as the server does when it notices that nobody is there any more."""
        for pid in pids:
            self._looking.execute("select pg_terminate_backend(%s, 60000)", [pid])

    def wait_until(self, condition: str, console: Console) -> None:
        """Until a condition holds in the database."""
        deadline = time.monotonic() + PATIENCE
        while not self._value(f"select {condition}"):
            _still_waiting(deadline, console)

    def published(self, topic: str) -> list[int]:
        rows = self._looking.execute(
            "select payload::text::bigint from pgmb.log_main where topic = %s", [topic]
        )
        return sorted(number for (number,) in rows)

    def applications(self) -> int:
        """How many have published a version."""
        return int(self._value("select count(*) from pgmb.ledger where version is not null"))

    def left(self) -> int:
        """Stages in use, and tasks that published of a version that is not finished."""
        return int(
            self._value(
                "select (select count(*) from pgmb.stage where app is not null)"
                " + (select count(*) from pgmb.ledger_task)"
            )
        )

    def _value(self, statement: str) -> Any:
        row = self._looking.execute(statement).fetchone()
        assert row is not None
        return row[0]


def _still_waiting(deadline: float, console: Console) -> None:
    console.check()
    if time.monotonic() > deadline:
        raise TimeoutError(f"what was waited for did not come:\n{console.said()}")
    time.sleep(0.01)
