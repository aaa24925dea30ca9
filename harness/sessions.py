"""Named sessions that are stepped by a test: who does what first is written down, never left to timing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeAlias, cast

import psycopg
from psycopg import sql

Parameters: TypeAlias = Sequence[Any] | Mapping[str, Any] | None
Row: TypeAlias = tuple[Any, ...]

_POLL = 0.005


class Running:
    """A statement under way in a session."""

    def __init__(self, session: Session, statement: str, future: Future[list[Row]]) -> None:
        self._session = session
        self._statement = statement
        self._future = future

    def result(self, timeout: float = 30.0) -> list[Row]:
        """Waits for the end: the rows, or the statement's error raised."""
        return self._future.result(timeout)

    def done(self) -> bool:
        return self._future.done()

    def blocked(self, timeout: float = 10.0) -> Self:
        """Waits until the server says that the statement waits for a lock. Fails when it ends instead."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self._session.waits_for_lock():
                return self
            if self._future.done():
                error = self._future.exception()
                outcome = f"failed: {error}" if error is not None else f"returned {self._future.result()!r}"
                raise AssertionError(
                    f"{self._session.name}: {self._statement!r} was not blocked, it {outcome}"
                )
            time.sleep(_POLL)
        raise AssertionError(f"{self._session.name}: {self._statement!r} was not blocked within {timeout} s")

    def blocked_by(self) -> list[int]:
        """The process ids of the sessions this one waits for."""
        return self._session.blocking_pids()


class Session:
    """One connection, autocommit (say `begin` yourself), whose statements run in a thread of its own."""

    def __init__(
        self, name: str, connection: psycopg.Connection[Any], observer: psycopg.Connection[Any]
    ) -> None:
        self.name = name
        self.connection = connection
        connection.execute("select set_config('application_name', %s, false)", [name])
        self.pid = self.connection.info.backend_pid
        self._observer = observer
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"session-{name}")

    def start(self, statement: str | sql.Composable, parameters: Parameters = None) -> Running:
        """Sends a statement and returns at once. A session's statements run in the order of their start."""
        text = statement if isinstance(statement, str) else statement.as_string(self.connection)
        return Running(self, text, self._thread.submit(self._execute, statement, parameters))

    def run(
        self, statement: str | sql.Composable, parameters: Parameters = None, timeout: float = 30.0
    ) -> list[Row]:
        """Runs a statement to its end and returns its rows (none for one without a result)."""
        return self.start(statement, parameters).result(timeout)

    def value(
        self, statement: str | sql.Composable, parameters: Parameters = None, timeout: float = 30.0
    ) -> Any:
        """The first column of the only row."""
        (row,) = self.run(statement, parameters, timeout)
        return row[0]

    def waits_for_lock(self) -> bool:
        row = self._observer.execute(
            "select cardinality(pg_blocking_pids(pid)) > 0 or coalesce(wait_event_type = 'Lock', false)"
            " from pg_stat_activity where pid = %s and state = 'active'",
            [self.pid],
        ).fetchone()
        return row is not None and bool(row[0])

    def blocking_pids(self) -> list[int]:
        row = self._observer.execute("select pg_blocking_pids(%s)", [self.pid]).fetchone()
        return [] if row is None else list(row[0])

    def terminate(self) -> None:
        """Ends the backend from outside, and waits until the server has no trace of it."""
        self._observer.execute("select pg_terminate_backend(%s, 10000)", [self.pid])

    def cancel(self) -> None:
        """Ends the statement under way, if there is one, and takes no other."""
        if not self.connection.closed and not self.connection.broken:
            # If the server is gone, so is what there was to cancel.
            with contextlib.suppress(psycopg.Error):
                self.connection.cancel_safe(timeout=5)
        self._thread.shutdown(wait=True, cancel_futures=True)

    def close(self) -> None:
        self.cancel()
        self.connection.close()

    def _execute(self, statement: str | sql.Composable, parameters: Parameters) -> list[Row]:
        # Text made at run time is fine here: tests write it, not users.
        query = sql.SQL(cast("Any", statement)) if isinstance(statement, str) else sql.Composed([statement])
        with self.connection.cursor() as cursor:
            cursor.execute(query, parameters)
            return cursor.fetchall() if cursor.description is not None else []


class Sessions:
    """Sessions by name, opened when first named: `sessions["writer"].run("begin")`.

    They are closed in the end, unless a `connect` that keeps them is given.
    """

    def __init__(self, dsn: str, connect: Callable[[], psycopg.Connection[Any]] | None = None) -> None:
        self._kept = connect is not None
        self._connect = connect or (lambda: psycopg.connect(dsn, autocommit=True))
        self._sessions: dict[str, Session] = {}
        self._observer = self._connect()
        self._observer.execute("set application_name = 'observer'")

    def __getitem__(self, name: str) -> Session:
        if name not in self._sessions:
            self._sessions[name] = Session(name, self._connect(), self._observer)
        return self._sessions[name]

    def open(self, *names: str) -> tuple[Session, ...]:
        return tuple(self[name] for name in names)

    def close(self) -> None:
        for session in self._sessions.values():
            session.cancel()
        if not self._kept:
            for session in self._sessions.values():
                session.connection.close()
            self._observer.close()
        self._sessions.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
