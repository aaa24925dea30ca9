"""The shards of a query: each database's log as the driver plans reads from it."""

from __future__ import annotations

import time
from collections.abc import ItemsView
from contextlib import ExitStack, nullcontext
from logging import getLogger
from typing import Any, Final, Self

import msgspec
import psycopg
from psycopg import sql

from pgmb._core.connecting import connect
from pgmb._core.cursor import ReadCursor, later
from pgmb.errors import ClusterChanged, ForeignPosition, HistoryGone, PositionLost, translated
from pgmb.spark.options import RECONNECT_SECONDS, ReadOptions, offsets_given
from pgmb.spark.source.offsets import Offset, SeqRange, ShardOffset
from pgmb.types import Position

_logger = getLogger("pgmb.spark")

_IDENTIFY: Final = "select cluster, database, salt from pgmb.identify(%s)"
_TICK: Final = "select pgmb.tick(%s)"
_NEWEST: Final = "select position::text, last from pgmb.newest(%s)"
_EARLIEST: Final = "select pgmb.earliest(%s)::text"
_AT: Final = "select pgmb.position_at(%s, to_timestamp(%s / 1000000.0))::text"
_ASSERT: Final = "select pgmb.assert_between(%s, %s::pgmb.position, %s::pgmb.position, %s, %s)"
_DIVIDE: Final = """select lo, hi, late, numbers
from pgmb.divide(%s, %s::pgmb.position, %s::pgmb.position, %s, %s, max => %s, size => %s, parts => %s)"""
_READ_LAKE: Final = "set local pgmb.read_lake = 'on'"
_COMPILE: Final = "select topics, regex from pgmb.compile_patterns(%s)"
_CONFIRM: Final = "select pgmb.confirm(%s, %s, %s::pgmb.position, %s::pgmb.position)"


class Frontier(msgspec.Struct, frozen=True):
    """A position to read to, and the highest seq that an event before it can have."""

    position: str
    last: int


class Slice(msgspec.Struct, frozen=True):
    """The next offset, and the number of seqs before it."""

    offset: ShardOffset
    numbers: int


class ShardLog:
    """A stream in one database. Connects on first use, and reconnects."""

    def __init__(
        self, url: str, stream: str, fail_on_data_loss: bool = True, read_lake: bool = False
    ) -> None:
        self._url, self.stream, self._strict, self._lake = url, stream, fail_on_data_loss, read_lake
        self._connection: psycopg.Connection[Any] | None = None
        self._identity: tuple[str, int] | None = None

    @property
    def home(self) -> str:
        """The cluster and database that its positions belong to."""
        return self._identified()[0]

    @property
    def salt(self) -> int:
        """The salt of derived event ids."""
        return self._identified()[1]

    def frontier(self) -> Frontier:
        """The newest position. It stays the same while no event is published."""
        self._row(_TICK, self.stream)
        return Frontier(*self._row(_NEWEST, self.stream))

    def earliest(self) -> str:
        return str(self._row(_EARLIEST, self.stream)[0])

    def at(self, micros: int) -> str:
        """The newest known position before that time."""
        return str(self._row(_AT, self.stream, micros)[0])

    def advance(
        self,
        offset: ShardOffset,
        frontier: Frontier,
        max: int | None,
        size: int,
        parts: int,
        size_bytes: int | None = None,
    ) -> Slice:
        """The next offset, at most `max` seqs further: in the rest of a begun batch, or in a new one.

        Its ranges have at most `size` seqs and about `size_bytes` bytes each.
        """
        if offset.to_position is None:
            if frontier.position == offset.from_position:
                return Slice(offset, 0)
            upto, last = frontier.position, frontier.last
        else:
            upto, last = offset.to_position, offset.last
        # Checked before they are compared: a lost position may be ahead of the log for a while.
        self._assert_kept(offset, upto, last)
        if offset.to_position is None and not later(
            Position.parse(upto), Position.parse(offset.from_position)
        ):
            return Slice(offset, 0)
        if size_bytes is not None:
            size = min(size, int(size_bytes / self.event_bytes(offset)) or 1)
        given = (self.stream, offset.from_position, upto, offset.seq, last, max, size, parts)
        rows = self._rows(_DIVIDE, *given, lake=self._lake)
        ranges = [SeqRange(lo, hi, late) for lo, hi, late, _ in rows]
        numbers = sum(count for *_, count in rows)
        if ranges and ranges[-1].hi < last:
            following = ShardOffset(offset.from_position, upto, ranges[-1].hi, last, offset.since, ranges)
        else:
            following = ShardOffset(upto, since=offset.since, ranges=ranges)
        return Slice(following, numbers)

    def event_bytes(self, offset: ShardOffset) -> float:
        """The estimated bytes per event, from a sample of the next ones.

        Payloads as they are stored, which reads no TOAST tables, times how much the first of them unpack to.
        """
        log = sql.Identifier("pgmb", f"log_{self.stream}")
        sample = sql.SQL(
            "select avg(60 + octet_length(topic) + coalesce(octet_length(key), 0)"
            " + coalesce(pg_column_size(headers), 0))::float,"
            " avg(pg_column_size(payload))::float,"
            " avg(case when nth <= 10 then octet_length(payload::text) end)::float"
            " / avg(case when nth <= 10 then pg_column_size(payload) end)::float"
            " from (select *, row_number() over (order by seq) nth from {} where seq > %s"
            " order by seq limit 1000) upcoming"
        ).format(log)
        after = max(offset.seq, Position.parse(offset.from_position).seq)
        rest, payload, unpacked = self._row(sample, after)
        return 100.0 if rest is None else float(rest + payload * unpacked)

    def matching(self, patterns: list[str]) -> str:
        """The condition for topic patterns, to append to a WHERE clause."""
        topics, regex = self._row(_COMPILE, patterns)
        if topics is not None:
            return f" and e.topic = any ({sql.Literal(topics).as_string()})"
        return f" and e.topic ~ {sql.Literal(regex).as_string()}" if regex is not None else ""

    def confirm(self, reader: str, position: str, before: str | None) -> None:
        """Tell retention that events before this position are no longer needed.

        Raises Conflict if the reader is no longer where this query left it: another one has its name.
        """
        self._row(_CONFIRM, self.stream, reader, position, before)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _assert_kept(self, offset: ShardOffset, upto: str, last: int) -> None:
        # From the earliest position, a query reads what is kept. Later, every event must still exist.
        begun = offset.seq > 0 or not Position.parse(offset.from_position).snapshot.startswith("3:")
        bounds = (offset.seq, last) if begun else (None, None)
        try:
            self._rows(_ASSERT, self.stream, offset.from_position, upto, *bounds, lake=self._lake)
        except HistoryGone as gone:
            if not self._strict:
                _logger.warning("stream %s: %s; the query goes on with what is left", self.stream, gone)
                return
            gone.add_note(f"The query stands at {offset.from_position}, number {offset.seq}.")
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

    def _rows(self, statement: Any, *arguments: Any, lake: bool = False) -> list[tuple[Any, ...]]:
        """`lake`: the statement counts what can be read from the lake."""
        until = time.monotonic() + RECONNECT_SECONDS
        while True:
            try:
                connection = self._connected()
                with translated(), connection.transaction() if lake else nullcontext():
                    if lake:
                        connection.execute(_READ_LAKE)
                    return connection.execute(statement, arguments).fetchall()
            except psycopg.OperationalError:
                lost = self._connection is None or self._connection.closed
                self.close()
                # Fail at once if the database was never reached: the connection string may be wrong.
                if not lost or self._identity is None or time.monotonic() > until:
                    raise
                time.sleep(0.5)

    def _connected(self) -> psycopg.Connection[Any]:
        if self._connection is None:
            self._connection = connect(self._url, "pgmb spark", prepare_threshold=None)
        return self._connection


ON_DATA_LOSS: Final = (
    "With failOnDataLoss=false the query goes on with what is left. With readerName retention waits for it."
)


class Shards:
    """The logs of a query. Connects to each to learn its cluster and database."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._logs: dict[str, ShardLog] = {}
        self._read_urls: dict[str, str] = {}
        with ExitStack() as undo:
            for url, read_url in zip(options.urls, options.read_urls, strict=True):
                log = ShardLog(url, options.stream, options.fail_on_data_loss, options.read_lake)
                undo.callback(log.close)
                if log.home in self._logs:
                    raise ValueError(f"url names the database {log.home} twice")
                self._logs[log.home] = log
                self._read_urls[log.home] = read_url
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, home: str) -> ShardLog:
        return self._logs[home]

    def __len__(self) -> int:
        return len(self._logs)

    def items(self) -> ItemsView[str, ShardLog]:
        return self._logs.items()

    def read_url(self, home: str) -> str:
        """The connection string to read a shard's events from."""
        return self._read_urls[home]

    def matching(self, patterns: list[str]) -> str:
        """The condition for topic patterns, which is the same in every shard."""
        return next(iter(self._logs.values())).matching(patterns)

    def start(self) -> Offset:
        """The offset of startingTimestamp or startingOffsets."""
        since = self._options.since
        if since is None:
            return self.at(self._options.starting)
        offsets = {home: ShardOffset(log.at(since), since=since) for home, log in self._logs.items()}
        return Offset(self._options.stream, offsets)

    def at(self, given: str) -> Offset:
        """The offset for `earliest`, `latest` or JSON."""
        named = offsets_given(given)
        if named is not None and "v" in named:
            return self.known(Offset.parse(named))
        return Offset(
            self._options.stream,
            {home: self._offset_at(home, given, named) for home in self._logs},
        )

    def known(self, offset: Offset) -> Offset:
        """The offset; shards that were added since start at their earliest event, as in Kafka's source.

        Raises ValueError if it belongs to another stream or database.
        """
        if offset.stream != self._options.stream:
            raise ValueError(
                f"the checkpoint is of stream {offset.stream}, the query reads {self._options.stream}: "
                "start it with a new checkpoint"
            )
        strange = [home for home in offset.shards if home not in self._logs]
        if strange:
            raise ValueError(
                f"the checkpoint stands in {', '.join(strange)} (installation and database), but "
                f"url leads to {', '.join(self._logs)}: a database that was restored or copied, or another. "
                "Positions belong to the cluster that gave them: start the query with a new checkpoint"
            )
        added = [home for home in self._logs if home not in offset.shards]
        if not added:
            return offset
        offsets = {home: ShardOffset(self._logs[home].earliest()) for home in added}
        return Offset(offset.stream, {**offset.shards, **offsets})

    def frontier_at(self, home: str, offset: ShardOffset) -> Frontier:
        """The frontier at a given position."""
        now = self._logs[home].frontier()
        return Frontier(offset.from_position, now.last)

    def close(self) -> None:
        for log in self._logs.values():
            log.close()

    def _offset_at(self, home: str, given: str, named: dict[str, object] | None) -> ShardOffset:
        log = self._logs[home]
        if named is not None:
            text = named.get(home, named.get(self._options.stream))
            if not isinstance(text, str):
                raise ValueError(f"offsets as JSON name a position for {self._options.stream}, or for {home}")
            cursor = ReadCursor.parse(text)
            if cursor.end is not None:
                raise ValueError(f"offsets as JSON must be positions, got a cursor within a batch: {text!r}")
            return ShardOffset(str(cursor.start))
        if given == "earliest":
            return ShardOffset(log.earliest())
        if given == "latest":
            return ShardOffset(log.frontier().position)
        raise ValueError(f"offsets must be earliest, latest or JSON, got {given!r}")
