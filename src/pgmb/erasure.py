"""Erase all events of keys: from the log, from what waits beside it, from dead letters, and from the lake.

Each step can be repeated. A run that was killed is continued by the next one with the same keys and streams.
The database does not store the keys. See docs/howto/erase.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import msgspec
import psycopg

from pgmb._core.connecting import session
from pgmb.errors import Conflict, InvalidArgument, MissingExtra

if TYPE_CHECKING:
    from pgmb.lake.erase import LakeEraser

_COUNT: Final = "select name, stream, events from pgmb.count_erasable(%s, %s)"
_START: Final = "select pgmb.start_erasure(%s, %s, %s)"
_STREAMS: Final = "select stream from pgmb.erasure_streams(%s) stream"
_LAKES: Final = "select stream from pgmb.describe_lakes()"
_CLOSE: Final = "select pgmb.close_for_erasure(%s, %s)"
_SEAL: Final = "select pgmb.seal(%s)"
_WRITERS: Final = "select pgmb.writers_before_erasure(%s, %s)"
_SEGMENT: Final = "select pgmb.erase_segment(%s, %s, %s)"
_NOW: Final = "select pg_snapshot_xmax(pg_current_snapshot())::text"
_OPEN: Final = "select pgmb.open_transactions(%s::xid8)"
_WAITING: Final = "select pgmb.erase_waiting(%s, %s)"
_REWRITE: Final = "select pgmb.rewrite_erased(%s)"
_END: Final = "select pgmb.end_erasure(%s)"
_DONE: Final = "select tables from pgmb.describe_erasures() where id = %s"
_PAUSE_SECONDS: Final = 0.05


class ErasedTable(msgspec.Struct, frozen=True):
    """How many events or other rows of a table were erased, or would be. files: those that were replaced."""

    name: str
    events: int
    files: list[str] = []
    stream: str | None = None


class Erased(msgspec.Struct, frozen=True):
    """An erasure that has ended."""

    id: UUID
    tables: list[ErasedTable]


class Eraser:
    """Erases the events of keys, of all streams or of some.

    options  of the storage of lakes, by the names of `deltalake`
    wait     how many seconds to wait for other transactions to end, each time
    told     is called with each step
    """

    def __init__(
        self,
        dsn: str,
        keys: Sequence[str],
        *,
        streams: Sequence[str] | None = None,
        options: Mapping[str, str] | None = None,
        wait: float = 600,
        told: Callable[[str], None] | None = None,
    ) -> None:
        if isinstance(keys, str) or not keys:
            raise InvalidArgument("keys must be a list with at least one key")
        self._dsn, self._keys, self._options, self._wait = dsn, list(dict.fromkeys(keys)), options, wait
        self._streams = list(dict.fromkeys(streams)) if streams else None
        self._told = told or _silent

    def count(self) -> list[ErasedTable]:
        """What would be erased. Changes nothing."""
        with session(self._dsn, "pgmb erase") as database:
            # A scan takes as long as it takes.
            database.execute("set statement_timeout = 0")
            rows = database.execute(_COUNT, [self._keys, self._streams]).fetchall()
            found = [ErasedTable(name, events, stream=stream) for name, stream, events in rows if events]
            for lake in self._lakes(database):
                counted = lake.count(database)
                found += [ErasedTable(url, rows, stream=lake.stream) for url, rows in counted if rows]
            return found

    def erase(self, reason: str) -> Erased:
        """Erase, or continue what a killed run began.

        Raises Conflict if another erasure or an archiver is at work, or transactions stay open for too long;
        then run it again.
        """
        with session(self._dsn, "pgmb erase") as database:
            database.execute("set statement_timeout = 0")
            # First: if a table cannot be had, nothing is changed.
            lakes = self._lakes(database)
            for lake in lakes:
                lake.lock(database)
            erasure = self.start(database, reason)
            streams = [name for (name,) in database.execute(_STREAMS, [erasure])]
            for stream in streams:
                self.close(database, erasure, stream)
                self.erase_log(database, erasure, stream)
            for lake in lakes:
                if lake.stream in streams:
                    self.erase_lake(database, erasure, lake)
            self.erase_waiting(database, erasure)
            self.rewrite(database, erasure)
            return self.end(database, erasure)

    # -- The steps -------------------------------------------------------------------------------------------

    def start(self, database: psycopg.Connection[Any], reason: str) -> UUID:
        """Begin an erasure, or continue one of these keys."""
        erasure: UUID = _one(database, _START, self._keys, reason, self._streams)
        self._told(f"erasure {erasure}")
        return erasure

    def close(self, database: psycopg.Connection[Any], erasure: UUID, stream: str) -> None:
        """Seal all segments that the erasure covers: no transaction can add an event to them."""
        self._until(lambda: bool(_one(database, _CLOSE, erasure, stream)), lambda: f"stream {stream} is busy")

        def sealed() -> bool:
            _one(database, _SEAL, stream)
            return _one(database, _WRITERS, erasure, stream) is None

        self._until(sealed, lambda: f"it may still publish: {_one(database, _WRITERS, erasure, stream)}")

    def erase_log(self, database: psycopg.Connection[Any], erasure: UUID, stream: str) -> None:
        """Turn events of the log into tombstones, segment by segment."""
        while (segment := _one(database, _SEGMENT, erasure, self._keys, stream)) is not None:
            self._told(f"{stream}: segment {segment}")

    def erase_lake(self, database: psycopg.Connection[Any], erasure: UUID, lake: LakeEraser) -> None:
        """Turn rows of the stream's tables in the lake into tombstones, and remove the old files."""
        lake.erase(database, erasure, self._told)

    def erase_waiting(self, database: psycopg.Connection[Any], erasure: UUID) -> None:
        """Erase what waits beside the log, until nothing is left and no transaction sees the old rows."""
        while True:
            # Transactions that began before may have read events as they were, and copy them to a table.
            self._wait_for_open_transactions(database)
            if self._locked(database, _WAITING, erasure, self._keys) == 0:
                return

    def rewrite(self, database: psycopg.Connection[Any], erasure: UUID) -> None:
        """Write tables again in which rows were erased."""
        while (done := self._locked(database, _REWRITE, erasure)) is not None:
            self._told(f"rewritten: {done}")

    def end(self, database: psycopg.Connection[Any], erasure: UUID) -> Erased:
        """Record the end."""
        _one(database, _END, erasure)
        tables = _one(database, _DONE, erasure)
        return Erased(erasure, msgspec.convert(tables, list[ErasedTable]))

    def _lakes(self, database: psycopg.Connection[Any]) -> list[LakeEraser]:
        """The lakes of the streams."""
        named = [
            name for (name,) in database.execute(_LAKES) if self._streams is None or name in self._streams
        ]
        if not named:
            return []
        try:
            from pgmb.lake.erase import LakeEraser
        except ImportError as error:
            missing = MissingExtra(
                f"stream {named[0]} has a lake, and the package {error.name} to write it is not installed"
            )
            missing.advise('Run: pip install "pgmb[lake]". Or erase other streams only, by their names.')
            raise missing from error
        return [LakeEraser(self._dsn, name, self._keys, self._options) for name in named]

    def _wait_for_open_transactions(self, database: psycopg.Connection[Any]) -> None:
        """Wait until all transactions have ended that are open now."""
        before = _one(database, _NOW)
        held: set[str] = set(_one(database, _OPEN, before))

        def ended() -> bool:
            held.intersection_update(_one(database, _OPEN, before))
            return not held

        self._until(ended, lambda: f"it is open since before: {', '.join(sorted(held))}")

    def _locked(self, database: psycopg.Connection[Any], statement: str, *given: object) -> Any:
        """The result of a statement that waits for locks only for a moment, and is tried again."""
        found: list[Any] = []

        def done() -> bool:
            try:
                found.append(_one(database, statement, *given))
            except psycopg.errors.LockNotAvailable:
                return False
            return True

        self._until(done, lambda: "it holds rows or a table to be erased")
        return found[0]

    def _until(self, done: Callable[[], bool], reason: Callable[[], str]) -> None:
        """Try until done. Raises Conflict if another transaction is in the way for too long."""
        deadline = time.monotonic() + self._wait
        while not done():
            if time.monotonic() > deadline:
                held = Conflict(f"another transaction is in the way: {reason()}")
                held.advise("End it, and run the same command again: it continues.")
                raise held
            time.sleep(_PAUSE_SECONDS)


def _silent(_: str) -> None:
    pass


def _one(database: psycopg.Connection[Any], statement: str, *given: object) -> Any:
    row = database.execute(statement.encode(), given).fetchone()
    return None if row is None else row[0]
