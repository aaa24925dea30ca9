"""The log as a table (`BatchReader`) and as a stream (`StreamReader`) for Spark.

The driver takes positions and divides what lies between them; executors read the parts. Spark pickles a
reader to the executors too, so it connects only where it is asked something.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from psycopg import sql
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from pgmb.spark.source.filters import condition
from pgmb.spark.source.log import Frontier
from pgmb.spark.source.offsets import Mark, Offset, Stretch, between
from pgmb.spark.source.options import ReadOptions, offsets_given
from pgmb.spark.source.reading import Reading, read
from pgmb.spark.source.schema import chosen
from pgmb.spark.source.shards import Shards

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import Filter
    from pyspark.sql.types import StructType


class PartPartition(InputPartition):
    """A part of a batch, as Spark hands it to an executor."""

    def __init__(self, reading: Reading) -> None:
        super().__init__(reading)


class _Reader:
    """What both readers do alike."""

    def __init__(self, options: Mapping[str, str], schema: StructType, streaming: bool) -> None:
        self._options = ReadOptions.of(options, streaming)
        self._names = schema.fieldNames()
        chosen(self._names)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """On an executor."""
        if not isinstance(partition.value, Reading):
            return iter(())
        return read(partition.value, chosen(self._names))

    def _asked(self, shards: Shards) -> str:
        """What an event must be, for the WHERE clause."""
        asked = shards.matching(self._options.subscribe) if self._options.subscribe else ""
        if self._options.subscribe_pattern is not None:
            asked += f" and e.topic ~ {sql.Literal(self._options.subscribe_pattern).as_string()}"
        if self._options.until is not None:
            asked += f" and e.published_at < {_moment(self._options.until)}"
        return asked

    def _parts(self, shards: Shards, home: str, stretch: Stretch, asked: str) -> Iterator[PartPartition]:
        if stretch.since is not None:
            asked += f" and e.published_at >= {_moment(stretch.since)}"
        for part in stretch.parts:
            yield PartPartition(
                Reading(
                    url=shards.read_url(home),
                    stream=self._options.stream,
                    salt=shards[home].salt,
                    after=stretch.after,
                    upto=stretch.upto,
                    part=part,
                    asked=asked,
                    fail_on_data_loss=self._options.fail_on_data_loss,
                    replica_timeout=self._options.replica_timeout,
                )
            )


class BatchReader(_Reader, DataSourceReader):
    """Everything between two offsets, by default from the earliest event to the moment of the read."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        super().__init__(options, schema, streaming=False)
        self._pushed = ""
        self.pushFilters = _PushFilters(self)  # type: ignore[method-assign]

    def partitions(self) -> Sequence[InputPartition]:
        with Shards(self._options) as shards:
            return list(self._planned(shards))

    def _planned(self, shards: Shards) -> Iterator[PartPartition]:
        asked = self._asked(shards) + self._pushed
        start = shards.first(self._options.starting)
        end = shards.first(self._options.ending) if offsets_given(self._options.ending) else None
        for home, log in shards.items():
            begun = start.shards[home]
            frontier = log.frontier() if end is None else shards.frontier_at(home, end.shards[home])
            sliced = log.advance(
                begun, frontier, None, self._options.partition_events, self._options.min_partitions
            )
            stretch = between(begun, sliced.mark)
            if stretch is not None:
                yield from self._parts(shards, home, stretch, asked)

    def push(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take over what PostgreSQL can do as well, and give back the rest."""
        for asked in filters:
            made = condition(asked)
            if made is None:
                yield asked
            else:
                self._pushed += f" and {made}"


class _PushFilters:
    """Takes filters where Spark pushes them down.

    Spark refuses a reader that overrides pushFilters while spark.sql.python.filterPushdown.enabled is off, as
    it is by default, and looks at __func__ for that. Whoever did not switch it on shall be able to read.
    """

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, reader: BatchReader) -> None:
        self._reader = reader

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        return list(self._reader.push(filters))


class StreamReader(_Reader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The log as it grows. Offsets are positions (`pgmb.spark.source.offsets`)."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        super().__init__(options, schema, streaming=True)
        self._frozen: dict[str, Frontier] | None = None
        self._latest: dict[str, Any] | None = None
        self._moved_at = time.monotonic()

    @cached_property
    def _shards(self) -> Shards:
        return Shards(self._options)

    @cached_property
    def _matching(self) -> str:
        return self._asked(self._shards)

    def initialOffset(self) -> dict[str, Any]:
        first = self._shards.first(self._options.starting)
        self._keep(first)
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
        begun = self._shards.known(Offset.parse(start))
        marks: dict[str, Mark] = {}
        latest: dict[str, Mark] = {}
        numbers = 0
        for home, log in self._shards.items():
            frontier = self._frozen[home] if self._frozen else log.frontier()
            latest[home] = Mark(frontier.position)
            sliced = log.advance(
                begun.shards[home],
                frontier,
                self._share(home, begun.shards[home], limit),
                self._options.partition_events,
                self._options.min_partitions,
            )
            marks[home] = sliced.mark
            numbers += sliced.numbers
        self._latest = Offset(self._options.stream, latest).dump()
        if self._too_few(numbers):
            return start
        if marks != begun.shards:
            self._moved_at = time.monotonic()
        return Offset(self._options.stream, marks).dump()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return self._latest

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        begun, ended = self._shards.known(Offset.parse(start)), Offset.parse(end)
        parts: list[InputPartition] = []
        for home, mark in ended.shards.items():
            stretch = between(begun.shards[home], mark)
            if stretch is not None:
                parts += self._parts(self._shards, home, stretch, self._matching)
        return parts

    def commit(self, end: dict[str, Any]) -> None:
        self._keep(Offset.parse(end))

    def stop(self) -> None:
        if "_shards" in vars(self):
            self._shards.close()

    def _keep(self, offset: Offset) -> None:
        if self._options.reader is None:
            return
        for home, mark in offset.shards.items():
            self._shards[home].confirm(self._options.reader, mark.done)

    def _share(self, home: str, mark: Mark, limit: ReadLimit) -> int | None:
        """How many numbers of this shard may be read."""
        match limit:
            case ReadMaxRows(max_rows=rows):
                allowed = rows
            case ReadMaxBytes(max_bytes=size):
                allowed = int(size / self._shards[home].event_bytes(mark))
            case _:
                return None
        return max(1, allowed // len(self._shards))

    def _too_few(self, numbers: int) -> bool:
        if self._frozen is not None or numbers >= self._options.min_events:
            return False
        return time.monotonic() - self._moved_at < self._options.max_delay


def _moment(micros: int) -> str:
    return f"(timestamptz 'epoch' + {micros} * interval '1 microsecond')"
