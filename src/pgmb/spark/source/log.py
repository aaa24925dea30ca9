"""One shard as the driver sees it: where its log stands, and how to divide what is new."""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec
import psycopg
from psycopg import sql

from pgmb._core.cursor import later
from pgmb.errors import ClusterChanged, ForeignPosition, HistoryGone, PositionLost, translated
from pgmb.spark.source.offsets import Mark, Part
from pgmb.types import Position

# How long a driver goes on trying to connect to a database that is away.
PATIENCE: Final = 30.0

_IDENTIFY: Final = "select cluster, database, salt from pgmb.identify(%s)"
_TICK: Final = "select pgmb.tick(%s)"
_NEWEST: Final = "select position::text, last from pgmb.newest(%s)"
_EARLIEST: Final = "select pgmb.earliest(%s)::text"
_AT: Final = "select pgmb.position_at(%s, to_timestamp(%s / 1000000.0))::text"
_ASSERT: Final = "select pgmb.assert_between(%s, %s::pgmb.position, %s::pgmb.position, %s, %s)"
_DIVIDE: Final = """select lo, hi, late, numbers
from pgmb.divide(%s, %s::pgmb.position, %s::pgmb.position, %s, %s, max => %s, size => %s, parts => %s)"""
_COMPILE: Final = "select topics, regex from pgmb.compile_patterns(%s)"
_CONFIRM: Final = "select pgmb.confirm(%s, %s, %s::pgmb.position)"


class Frontier(msgspec.Struct, frozen=True):
    """A position to read to, and the highest number that an event before it can have."""

    position: str
    last: int


class Slice(msgspec.Struct, frozen=True):
    """The next mark, and how many numbers lie before it."""

    mark: Mark
    numbers: int


class Log:
    """A stream in one database. Connects when it is first asked, and again when the connection is lost."""

    def __init__(self, url: str, stream: str, fail_on_data_loss: bool = True) -> None:
        self._url, self.stream, self._strict = url, stream, fail_on_data_loss
        self._connection: psycopg.Connection[Any] | None = None
        self._identity: tuple[str, int] | None = None

    @property
    def home(self) -> str:
        """The cluster and database that its positions belong to."""
        return self._identified()[0]

    @property
    def salt(self) -> int:
        """What ids that nobody gave are derived from."""
        return self._identified()[1]

    def frontier(self) -> Frontier:
        """Where the log stands now. The same as before if nothing happened."""
        self._row(_TICK, self.stream)
        return Frontier(*self._row(_NEWEST, self.stream))

    def earliest(self) -> str:
        return str(self._row(_EARLIEST, self.stream)[0])

    def at(self, micros: int) -> str:
        """The newest position known from before that moment."""
        return str(self._row(_AT, self.stream, micros)[0])

    def advance(self, mark: Mark, frontier: Frontier, max: int | None, size: int, parts: int) -> Slice:
        """The next mark, at most `max` numbers on: the rest of a batch that was begun, or a new one."""
        if mark.batch is None:
            if frontier.position == mark.done:
                return Slice(mark, 0)
            upto, last = frontier.position, frontier.last
        else:
            upto, last = mark.batch, mark.last
        # Before they are compared: a position that was lost may be ahead of the log for a while.
        self._assert_kept(mark, upto, last)
        if mark.batch is None and not later(Position.parse(upto), Position.parse(mark.done)):
            return Slice(mark, 0)
        rows = self._rows(_DIVIDE, self.stream, mark.done, upto, mark.seq, last, max, size, parts)
        cut = [Part(lo, hi, late) for lo, hi, late, _ in rows]
        numbers = sum(row[3] for row in rows)
        if cut and cut[-1].hi < last:
            following = Mark(mark.done, upto, cut[-1].hi, last, mark.since, cut)
        else:
            following = Mark(upto, since=mark.since, parts=cut)
        return Slice(following, numbers)

    def event_bytes(self, mark: Mark) -> float:
        """About how many bytes an event takes as a row, by those that come next."""
        log = sql.Identifier("pgmb", f"log_{self.stream}")
        sample = sql.SQL(
            "select avg(60 + octet_length(topic) + coalesce(octet_length(key), 0)"
            " + octet_length(payload::text) + coalesce(octet_length(headers::text), 0))::float"
            " from (select * from {} where seq > %s order by seq limit 1000) upcoming"
        ).format(log)
        place = max(mark.seq, Position.parse(mark.done).seq)
        found = self._row(sample, place)[0]
        return float(found) if found else 100.0

    def matching(self, patterns: list[str]) -> str:
        """The condition on topics, to be added to a WHERE clause."""
        topics, regex = self._row(_COMPILE, patterns)
        if topics is not None:
            return f" and e.topic = any ({sql.Literal(topics).as_string()})"
        return f" and e.topic ~ {sql.Literal(regex).as_string()}" if regex is not None else ""

    def confirm(self, reader: str, position: str) -> None:
        """Let retention know that what lies before is no longer needed."""
        self._row(_CONFIRM, self.stream, reader, position)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _assert_kept(self, mark: Mark, upto: str, last: int) -> None:
        # From the earliest on, what is kept counts; within its batch, what was kept when it began.
        begun = mark.seq > 0 or not Position.parse(mark.done).snapshot.startswith("3:")
        bounds = (mark.seq, last) if begun and self._strict else (None, None)
        try:
            self._row(_ASSERT, self.stream, mark.done, upto, *bounds)
        except HistoryGone as gone:
            gone.add_note(f"The query stands at {mark.done}, number {mark.seq}.")
            gone.add_note(ON_DATA_LOSS)
            raise
        except (ClusterChanged, ForeignPosition, PositionLost) as refused:
            refused.add_note(
                "The checkpoint belongs to the log before. Start the query with a new checkpoint."
            )
            raise

    def _identified(self) -> tuple[str, int]:
        if self._identity is None:
            cluster, database, salt = self._row(_IDENTIFY, self.stream)
            self._identity = (f"{cluster}/{database}", salt)
        return self._identity

    def _row(self, statement: Any, *arguments: Any) -> tuple[Any, ...]:
        return self._rows(statement, *arguments)[0]

    def _rows(self, statement: Any, *arguments: Any) -> list[tuple[Any, ...]]:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                with translated():
                    return self._connected().execute(statement, arguments).fetchall()
            except psycopg.OperationalError:
                lost = self._connection is None or self._connection.closed
                self.close()
                # A database that was never reached is not one that is away for a moment.
                if not lost or self._identity is None or time.monotonic() > until:
                    raise
                time.sleep(0.5)

    def _connected(self) -> psycopg.Connection[Any]:
        if self._connection is None:
            self._connection = psycopg.connect(
                self._url, autocommit=True, prepare_threshold=None, fallback_application_name="pgmb spark"
            )
        return self._connection


ON_DATA_LOSS: Final = (
    "With failOnDataLoss=false the query goes on with what is left. With readerName retention waits for it."
)
