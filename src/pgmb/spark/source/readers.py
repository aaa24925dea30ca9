"""The log as a table (`BatchReader`) and as a stream (`StreamReader`) for Spark.

The driver takes positions and divides the events between them; executors read the partitions. Spark pickles a
reader to the executors too, so it connects only on first use.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import msgspec
from psycopg import sql
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from pgmb.spark.options import ReadOptions, offsets_given
from pgmb.spark.source.offsets import BatchRange, Offset, ShardOffset, between
from pgmb.spark.source.partition_read import LakeOptions, PartitionRead, read_partition
from pgmb.spark.source.queries import arrow_schema, condition
from pgmb.spark.source.shards import Frontier, ShardLog, Shards

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import Filter
    from pyspark.sql.types import StructType


_FIRST_PAUSE_SECONDS: Final = 0.01
_LONGEST_PAUSE_SECONDS: Final = 0.25


class EventPartition(InputPartition):
    """A partition of a batch, as Spark sends it to an executor."""

    def __init__(self, read: PartitionRead) -> None:
        super().__init__(read)


class _Reader:
    """Common to both readers."""

    def __init__(self, options: Mapping[str, str], schema: StructType, streaming: bool) -> None:
        self._options = ReadOptions.of(options, streaming)
        self._names = schema.fieldNames()
        arrow_schema(self._names)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a partition. Called on an executor."""
        if not isinstance(partition.value, PartitionRead):
            return iter(())
        return read_partition(partition.value, arrow_schema(self._names))

    @property
    def _partition_sizes(self) -> tuple[int, int, int]:
        options = self._options
        return options.partition_events, options.min_partitions, options.partition_bytes

    def _topics(self, shards: Shards) -> str:
        """The conditions of the options on topics, for the WHERE clause."""
        conditions = shards.matching(self._options.subscribe) if self._options.subscribe else ""
        if self._options.subscribe_pattern is not None:
            conditions += f" and e.topic ~ {sql.Literal(self._options.subscribe_pattern).as_string()}"
        return conditions

    def _partitions(
        self, shards: Shards, home: str, batch: BatchRange, topics: str, pushed: str = ""
    ) -> Iterator[EventPartition]:
        conditions, until = topics + pushed, self._options.until
        if until is not None:
            conditions += f" and e.published_at < {_moment(until)}"
        if batch.since is not None:
            conditions += f" and e.published_at >= {_moment(batch.since)}"
        lake = LakeOptions(topics, batch.since, until, self._options.lake_options)
        for seqs in batch.ranges:
            yield EventPartition(
                PartitionRead(
                    url=shards.read_url(home),
                    stream=self._options.stream,
                    salt=shards[home].salt,
                    after=batch.after,
                    upto=batch.upto,
                    range=seqs,
                    condition=conditions,
                    fail_on_data_loss=self._options.fail_on_data_loss,
                    replica_timeout=self._options.replica_timeout,
                    lake=lake if self._options.read_lake else None,
                )
            )


class BatchReader(_Reader, DataSourceReader):
    """The events between two offsets, by default from the earliest to the newest."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        super().__init__(options, schema, streaming=False)
        self._pushed = ""
        self.pushFilters = _PushFilters(self)  # type: ignore[method-assign]

    def partitions(self) -> Sequence[InputPartition]:
        with Shards(self._options) as shards:
            return list(self._planned(shards))

    def _planned(self, shards: Shards) -> Iterator[EventPartition]:
        topics = self._topics(shards)
        start = shards.start()
        end = shards.at(self._options.ending) if offsets_given(self._options.ending) else None
        for home, log in shards.items():
            ended = None if end is None else end.shards[home]
            frontier = log.frontier() if ended is None else shards.frontier_at(home, ended)
            for batch in self._batches(log, start.shards[home], frontier, ended):
                yield from self._partitions(shards, home, batch, topics, self._pushed)

    def _batches(
        self, log: ShardLog, begun: ShardOffset, frontier: Frontier, ended: ShardOffset | None
    ) -> Iterator[BatchRange]:
        """What lies between two offsets, either of which may be within a batch that a limit has cut."""
        if ended is not None and ended.to_position is not None:
            if begun.from_position != ended.from_position:
                yield from self._batches(log, begun, frontier, None)
                begun = ShardOffset(ended.from_position, since=begun.since)
            # The part of the cut batch that was read.
            begun = msgspec.structs.replace(begun, to_position=ended.to_position, last=ended.seq, ranges=[])
            yield from self._batch(log, begun, frontier)
            return
        yield from self._batch(log, begun, frontier)
        if begun.to_position is not None:
            yield from self._batch(log, ShardOffset(begun.to_position, since=begun.since), frontier)

    def _batch(self, log: ShardLog, begun: ShardOffset, frontier: Frontier) -> Iterator[BatchRange]:
        """The rest of a batch, or all up to a frontier."""
        sliced = log.advance(begun, frontier, None, *self._partition_sizes)
        batch = between(begun, sliced.offset)
        if batch is not None:
            yield batch

    def push(self, filters: list[Filter]) -> Iterable[Filter]:
        """Push filters down to PostgreSQL where it evaluates them as Spark does, and return the others.

        All of them if events may come from the lake: Spark evaluates them for those.
        """
        for pushed in filters:
            made = condition(pushed)
            if made is not None:
                self._pushed += f" and {made}"
            if made is None or self._options.read_lake:
                yield pushed


class _PushFilters:
    """Accepts pushed-down filters.

    Spark refuses a reader that overrides pushFilters while spark.sql.python.filterPushdown.enabled is off,
    its default, and checks __func__ for that. Reading must work without that setting.
    """

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, reader: BatchReader) -> None:
        self._reader = reader

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        return list(self._reader.push(filters))


class StreamReader(_Reader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The log as a stream. Offsets are positions (`pgmb.spark.source.offsets`)."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        super().__init__(options, schema, streaming=True)
        self._frozen: dict[str, Frontier] | None = None
        self._latest: dict[str, Any] | None = None
        self._confirmed: Offset | None = None
        self._moved_at = time.monotonic()
        self._pause = 0.0

    @cached_property
    def _shards(self) -> Shards:
        return Shards(self._options)

    @cached_property
    def _matching(self) -> str:
        return self._topics(self._shards)

    def initialOffset(self) -> dict[str, Any]:
        first = self._shards.start()
        self._confirm(first)
        return first.dump()

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.max_events is not None:
            return ReadMaxRows(self._options.max_events)
        if self._options.max_bytes is not None:
            return ReadMaxBytes(self._options.max_bytes)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        self._frozen = {home: log.frontier() for home, log in self._shards.items()}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        # The default trigger asks again at once, a hundred times a second. While nothing comes, less often.
        time.sleep(self._pause)
        begun = self._shards.known(Offset.parse(start))
        # Spark asks for the next offset when the batch up to `start` is committed. commit() comes later.
        self._confirm(begun)
        offsets: dict[str, ShardOffset] = {}
        latest: dict[str, ShardOffset] = {}
        numbers = 0
        for home, log in self._shards.items():
            frontier = self._frozen[home] if self._frozen else log.frontier()
            latest[home] = ShardOffset(frontier.position)
            share = self._share(home, begun.shards[home], limit)
            sliced = log.advance(begun.shards[home], frontier, share, *self._partition_sizes)
            offsets[home] = sliced.offset
            numbers += sliced.numbers
        self._latest = Offset(self._options.stream, latest).dump()
        if self._frozen is None and offsets == begun.shards:
            self._pause = min(2 * self._pause or _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
        else:
            self._pause = 0.0
        if self._too_few(numbers):
            return start
        if offsets != begun.shards:
            self._moved_at = time.monotonic()
        return Offset(self._options.stream, offsets).dump()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return self._latest

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        begun, ended = self._shards.known(Offset.parse(start)), Offset.parse(end)
        partitions: list[InputPartition] = []
        for home, offset in ended.shards.items():
            batch = between(begun.shards[home], offset)
            if batch is not None:
                partitions += self._partitions(self._shards, home, batch, self._matching)
        return partitions

    def commit(self, end: dict[str, Any]) -> None:
        self._confirm(Offset.parse(end))

    def stop(self) -> None:
        if "_shards" in vars(self):
            self._shards.close()

    def _confirm(self, offset: Offset) -> None:
        if self._options.reader is None or offset == self._confirmed:
            return
        for home, shard in offset.shards.items():
            before = self._confirmed.shards.get(home) if self._confirmed is not None else None
            last = None if before is None else before.from_position
            self._shards[home].confirm(self._options.reader, shard.from_position, last)
        self._confirmed = offset

    def _share(self, home: str, offset: ShardOffset, limit: ReadLimit) -> int | None:
        """How many seqs of this shard may be read."""
        allowed: list[int] = []
        size = self._options.max_bytes
        match limit:
            case ReadMaxRows(max_rows=rows):
                # Spark passes one limit. If both are set, the smaller one counts.
                allowed.append(rows)
            case ReadMaxBytes(max_bytes=given):
                size = given
            case _:
                return None
        if size is not None:
            allowed.append(int(size / self._shards[home].event_bytes(offset)))
        return max(1, min(allowed) // len(self._shards))

    def _too_few(self, numbers: int) -> bool:
        if self._frozen is not None or numbers >= self._options.min_events:
            return False
        return time.monotonic() - self._moved_at < self._options.max_delay


def _moment(micros: int) -> str:
    return f"(timestamptz 'epoch' + {micros} * interval '1 microsecond')"
