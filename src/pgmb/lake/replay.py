"""Replay: a part of a stream's history, from the log and the lake, into one queue or stream.

What lies between two positions does not change. So a replay remembers two positions and the number of the
last event that it passed, which moves on in the transaction that inserts the events. A replay that was killed
is continued from there, and each event arrives once.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

import msgspec
import psycopg
import pyarrow
import pyarrow.compute
from psycopg import sql
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from pgmb._core.connecting import session
from pgmb.errors import InvalidArgument, NotFound
from pgmb.spark.source.offsets import SeqRange, ShardOffset
from pgmb.spark.source.partition_read import LakeOptions, PartitionRead, read_partition
from pgmb.spark.source.queries import arrow_schema
from pgmb.spark.source.shards import Frontier, ShardLog
from pgmb.types import Position

# The stubs of pyarrow are incomplete.
pa: Any = pyarrow
pc: Any = pyarrow.compute

_SCHEMA: Final = arrow_schema(["seq", "id", "topic", "key", "payload", "headers", "published_at"])
_TEXTS: Final = ("topic", "key", "payload", "headers")
# How much is read in one transaction of the log: it must end soon, since retention waits for it.
_READ_NUMBERS: Final = 50_000
_MOST_NUMBERS: Final = 5_000_000
_READ_BYTES: Final = 64 * 1024 * 1024
_MOST_EVENTS: Final = 1000
"""Of a transaction that inserts."""
_PER_SECOND: Final = 10
"""Transactions, so that a slow replay is an even one."""
_SECONDS_TO_CATCH_UP: Final = 5.0

_START: Final = """
select pgmb.start_replay(%(stream)s, %(after)s::pgmb.position, %(upto)s::pgmb.position, %(last)s,
  into_queue => %(into_queue)s, into_stream => %(into_stream)s, patterns => %(patterns)s, since => %(since)s,
  until => %(until)s, equals => %(equals)s, filter => %(filter)s, params => %(params)s)
"""
_DESCRIBE: Final = """
select id, stream, into_queue, into_stream, after::text, upto::text, last, patterns, since, until, equals,
  filter, params, seq, events, bytes, created_at, moved_at, ended_at
from pgmb.describe_replays()
"""
_PASSING: Final = """
select pgmb.passing(%s::bigint[], %s::text[], %s::text[], %s::json[], %s::json[],
  equals => %s, filter => %s, params => %s)
"""
_INSERT: Final = "select pgmb.replay_events(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)"
_SENT: Final = "select events, bytes from pgmb.describe_replays() where id = %s"
_END: Final = "select pgmb.end_replay(%s)"


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a stream's history, and where it goes.

    after, upto          positions; no event before `upto` has a number above `last`
    since, until         times of publication, from and before
    equals, filter, params   as in `create_queue`
    """

    stream: str
    after: str
    upto: str
    last: int
    into_queue: str | None = None
    into_stream: str | None = None
    patterns: list[str] | None = None
    since: datetime | None = None
    until: datetime | None = None
    equals: dict[str, Any] | None = None
    filter: str | None = None
    params: dict[str, Any] | None = None

    @property
    def filtered(self) -> bool:
        return self.equals is not None or self.filter is not None


class Replay(Slice, frozen=True, kw_only=True):
    """A replay that was begun: all events up to `seq` were passed, and `events` of them inserted."""

    id: UUID
    seq: int
    events: int
    bytes: int
    created_at: datetime
    moved_at: datetime | None
    ended_at: datetime | None


class Counted(msgspec.Struct, frozen=True):
    """How many events, and the bytes of their topics, keys, payloads and headers."""

    events: int = 0
    bytes: int = 0


class Replayer:
    """Replays history. `options` open the storage of the lake, by the names of `deltalake`."""

    def __init__(self, dsn: str, *, options: Mapping[str, str] | None = None) -> None:
        self.dsn, self._options = dsn, dict(options or {})

    def choose(
        self,
        stream: str,
        begin: datetime | Position | None,
        end: datetime | Position | None,
        **asked: Any,
    ) -> Slice:
        """The events from one point to another, as they are now; None: from the first, and to the newest."""
        with closing(ShardLog(self.dsn, stream, read_lake=True)) as log:
            frontier = log.frontier()
            if isinstance(begin, Position):
                after = str(begin)
            elif begin is not None:
                after = log.at(int(begin.timestamp() * 1_000_000))
            else:
                after = log.earliest()
        return Slice(
            stream=stream,
            after=after,
            upto=str(end) if isinstance(end, Position) else frontier.position,
            last=frontier.last,
            since=begin if isinstance(begin, datetime) else None,
            until=end if isinstance(end, datetime) else None,
            **asked,
        )

    def count(self, chosen: Slice) -> Counted:
        """What a replay would insert."""
        events = size = 0
        with self._connected() as database:
            for found, _ in self._read(chosen, 0):
                kept = self._filtered(database, chosen, found)
                events += kept.num_rows
                size += sum(_bytes(kept.column(name)) for name in _TEXTS)
        return Counted(events, size)

    def start(self, chosen: Slice) -> UUID:
        """Begin a replay. Raises Conflict if the target has an unfinished one."""
        given = msgspec.structs.asdict(chosen)
        for name in ("equals", "params"):
            given[name] = None if given[name] is None else Jsonb(given[name])
        with self._connected() as database:
            row = database.execute(_START, given).fetchone()
        assert row is not None  # noqa: S101 - the function returns a row or raises
        return UUID(str(row[0]))

    def replays(self) -> list[Replay]:
        """All replays, the newest first."""
        with self._connected() as database, database.cursor(row_factory=dict_row) as cursor:
            return [msgspec.convert(row, Replay) for row in cursor.execute(_DESCRIBE)]

    def find(self, id: UUID) -> Replay:
        for known in self.replays():
            if known.id == id:
                return known
        missing = NotFound(f"there is no replay {id}")
        missing.advise("pgmb lake replays")
        raise missing

    def end(self, id: UUID) -> bool:
        """End a replay. What it inserted stays. False if it had ended."""
        with self._connected() as database:
            row = database.execute(_END, [id]).fetchone()
        return row is not None and bool(row[0])

    def run(self, id: UUID, rate: float | None = None) -> Iterator[Counted]:
        """Continue a replay to its end, at most at `rate` events per second. Yields what was inserted so far.

        Raises Conflict if another process continues it too.
        """
        replay = self.find(id)
        if replay.ended_at is not None:
            return
        seq = replay.seq
        pace = Pace(rate)
        with self._connected() as database:
            for found, upto in self._read(replay, seq):
                kept = self._filtered(database, replay, found)
                pieces = [
                    kept.slice(begin, pace.events) for begin in range(0, kept.num_rows, pace.events)
                ] or [kept]
                for number, piece in enumerate(pieces, 1):
                    end = upto if number == len(pieces) else piece.column("seq")[-1].as_py()
                    pace.wait()
                    database.execute(_INSERT, [id, seq, end, *_arrays(piece)])
                    seq = end
                    pace.passed(piece.num_rows)
                    # An ordered queue is not sent what it has before it.
                    for done, size in database.execute(_SENT, [id]):
                        yield Counted(done, size)
            database.execute(_END, [id])

    @contextmanager
    def _connected(self) -> Generator[psycopg.Connection[Any]]:
        with session(self.dsn, "pgmb lake") as database:
            # A filter may run for long; a batch of events never takes a minute.
            database.execute("set statement_timeout = '60s'")
            yield database

    def _filtered(self, database: psycopg.Connection[Any], chosen: Slice, events: Any) -> Any:
        if not chosen.filtered or events.num_rows == 0:
            return events
        equals, params = (None if given is None else Jsonb(given) for given in (chosen.equals, chosen.params))
        kept: list[int] = []
        for begin in range(0, events.num_rows, _MOST_EVENTS):
            piece = events.slice(begin, _MOST_EVENTS)
            given = [piece.column(name).to_pylist() for name in ("seq", *_TEXTS)]
            ((passed,),) = database.execute(_PASSING, [*given, equals, chosen.filter, params]).fetchall()
            kept += passed
        return events.filter(pc.is_in(events.column("seq"), pa.array(kept, pa.int64())))

    def _read(self, chosen: Slice, seq: int) -> Iterator[tuple[Any, int]]:
        """Events with a number above `seq`, in tables, each with the number up to which it is complete.

        Each is read in a transaction that ends before its events are used.
        """
        with closing(ShardLog(self.dsn, chosen.stream, read_lake=True)) as log:
            topics = log.matching(chosen.patterns) if chosen.patterns else ""
            since, until = _micros(chosen.since), _micros(chosen.until)
            times = "".join(
                f" and e.published_at {sign} {sql.Literal(at).as_string()}"
                for sign, at in ((">=", chosen.since), ("<", chosen.until))
                if at is not None
            )
            lake = LakeOptions(topics, since, until, self._options)
            frontier = Frontier(chosen.upto, chosen.last)
            numbers = _READ_NUMBERS
            while seq < chosen.last:
                offset = ShardOffset(chosen.after, chosen.upto, seq, chosen.last)
                ahead = log.advance(offset, frontier, numbers, numbers, 1).offset
                end = chosen.last if ahead.to_position is None else ahead.seq
                found: list[Any] = []
                size = 0
                for seqs in ahead.ranges:
                    part = PartitionRead(
                        url=self.dsn,
                        stream=chosen.stream,
                        salt=log.salt,
                        after=Position.parse(chosen.after),
                        upto=Position.parse(chosen.upto),
                        range=SeqRange(max(seqs.lo, seq), seqs.hi, seqs.late),
                        condition=topics + times,
                        fail_on_data_loss=True,
                        replica_timeout=0,
                        lake=lake,
                    )
                    for batch in read_partition(part, _SCHEMA):
                        found.append(batch)
                        size += batch.nbytes
                        if size >= _READ_BYTES:
                            # The rest is read by the next transaction: this one ends here.
                            break
                    if size >= _READ_BYTES:
                        end = found[-1].column("seq")[-1].as_py()
                        break
                # Where nothing is wanted, larger steps are taken.
                numbers = _READ_NUMBERS if found else min(numbers * 4, _MOST_NUMBERS)
                yield pa.Table.from_batches(found, schema=_SCHEMA), end
                seq = end


class Pace:
    """Spreads events evenly over time, and catches up with pauses of up to 5 seconds."""

    def __init__(self, rate: float | None) -> None:
        if rate is not None and not rate > 0:
            raise InvalidArgument(f"the rate must be above 0 events per second, got {rate}")
        self._rate = rate
        self._next: float | None = None
        self.events = _MOST_EVENTS if rate is None else max(1, min(_MOST_EVENTS, round(rate / _PER_SECOND)))
        """As many as a transaction should insert."""

    def wait(self) -> None:
        if self._next is None:
            # What it took to come here is not caught up with.
            self._next = time.monotonic()
        elif (seconds := self._next - time.monotonic()) > 0:
            time.sleep(seconds)

    def passed(self, events: int) -> None:
        if self._rate is not None and self._next is not None:
            self._next = max(self._next, time.monotonic() - _SECONDS_TO_CATCH_UP) + events / self._rate


def _arrays(piece: Any) -> list[list[Any]]:
    return [
        piece.column(name).to_pylist()
        for name in ("seq", "id", "topic", "key", "payload", "headers", "published_at")
    ]


def _bytes(column: Any) -> int:
    return int(pc.sum(pc.binary_length(column)).as_py() or 0)


def _micros(at: datetime | None) -> int | None:
    return None if at is None else (at - datetime(1970, 1, 1, tzinfo=UTC)) // datetime.resolution
