"""The figures of a report: one pass over the events of log and lake in Spark, and what the database knows.

Each task reads a range of the log or the lake and reduces it to counts before Spark sees it: payloads reach
neither the JVM nor the driver. Spark adds the counts up.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import psycopg
import pyarrow
import pyarrow.compute
from psycopg.rows import class_row

from pgmb._core.connecting import session
from pgmb.errors import InvalidArgument
from pgmb.lake.dead import DeadTable, dead_lake
from pgmb.lake.report.figures import (
    HOUR,
    Endpoint,
    Failing,
    FieldDay,
    Figures,
    KeyCount,
    KeyDay,
    Quantiles,
    Queue,
    Series,
    Volume,
    Waiting,
    error_kind,
    quantiles,
)
from pgmb.lake.storage import Storage
from pgmb.spark.source.partition_read import PartitionRead, read_partition
from pgmb.spark.source.queries import arrow_schema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The stubs of pyarrow are incomplete.
pa: Any = pyarrow
pc: Any = pyarrow.compute

_COLUMNS: Final = ["seq", "topic", "key", "payload", "headers", "published_at"]
_COUNTS: Final = (
    "kind string, stream string, topic string, at int, name string, type string, events bigint, bytes bigint"
)
_COUNT_SCHEMA: Final = pa.schema(
    [
        *((name, pa.string()) for name in ("kind", "stream", "topic")),
        ("at", pa.int32()),
        *((name, pa.string()) for name in ("name", "type")),
        *((name, pa.int64()) for name in ("events", "bytes")),
    ]
)
_HOURS, _KEY_DAYS, _KEYS, _FIELDS = "hour", "key by day", "key", "field"
_HEAVIEST: Final = 10
_MOST_DEPTH: Final = 6
_MOST_FIELDS: Final = 100
"""Of an object, over all payloads: one with more is a map, and its fields are one, `*`."""
_MOST_SHAPES: Final = 20_000
_HOUR_MICROS: Final = 3_600_000_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

_STREAMS: Final = "select stream from pgmb.describe_streams() order by 1"
_LAKES: Final = "select stream from pgmb.describe_lakes()"
_DEAD: Final = (
    "select id, stream, queue, endpoint, died_at, published_at, error from pgmb.report_dead(%s, %s)"
)
_ENDPOINT_NAMES: Final = "select id::text, name from pgmb.endpoints"
_ENDPOINTS: Final = (
    "select endpoint, stream, queue, log, timeout, attempts, failed, seconds, delayed, delays"
    " from pgmb.report_endpoints(%s, %s)"
    " where attempts > 0 and stream = any(%s) order by seconds[2] desc nulls last, endpoint"
)
_REQUESTS: Final = (
    "select stream, queue, endpoint, hour, error, events from pgmb.report_requests(%s, %s)"
    " where stream = any(%s)"
)
_RETRIES: Final = (
    "select stream, queue, endpoint, error, events, attempts, oldest_age from pgmb.report_retries()"
    " where stream = any(%s)"
)
_QUEUES: Final = (
    "select queue, stream, waiting, oldest_age, retries, dead, paused_at is not null, at_least"
    " from pgmb.describe_queues() where stream = any(%s) order by oldest_age desc nulls last, queue"
)


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a report is to cover. Times are cut to whole hours.

    streams   None: all
    sample    parse one payload in so many, to find fields
    """

    since: datetime
    until: datetime
    streams: list[str] | None = None
    sample: int = 1


def gather(
    spark: SparkSession,
    dsn: str,
    asked: Asked,
    *,
    url: str | None = None,
    options: Mapping[str, str] | None = None,
) -> Figures:
    """The figures of a time. `url` is where tasks reach the database; `options` open the storage."""
    since, until = _hour(asked.since), _hour(asked.until)
    if since >= until:
        raise InvalidArgument(f"a report needs a whole hour, got {asked.since} to {asked.until}")
    if asked.sample < 1:
        raise InvalidArgument(f"sample must be at least 1, got {asked.sample}")
    with session(dsn, "pgmb lake") as database:
        # These may take a minute, over all dead letters and attempts of a month.
        database.execute("set statement_timeout = 0")
        streams = [
            stream for (stream,) in database.execute(_STREAMS) if stream in (asked.streams or [stream])
        ]
        if missing := set(asked.streams or ()) - set(streams):
            raise InvalidArgument(f"there is no stream {min(missing)}")
        known = _failures(database, streams, since, until, options)
    counted = _events(spark, url or dsn, streams, since, until, asked.sample, options)
    return Figures(
        since=since,
        until=until,
        taken_at=datetime.now(UTC),
        streams=streams,
        sample=asked.sample,
        **known,
        **counted,
    )


def _hour(at: datetime) -> datetime:
    return at.astimezone(UTC).replace(minute=0, second=0, microsecond=0)


# -- Events, in Spark ----------------------------------------------------------------------------------------


def _events(
    spark: SparkSession,
    url: str,
    streams: Sequence[str],
    since: datetime,
    until: datetime,
    sample: int,
    options: Mapping[str, str] | None,
) -> dict[str, Any]:
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    parts = [part for stream in streams for part in _parts(spark, url, stream, since, until, options)]
    if not parts:
        return {}
    numbers = spark.range(0, len(parts), 1, len(parts))
    groups = ["kind", "stream", "topic", "at", "name", "type"]
    with _shuffling(spark, len(parts)):
        # Of each task; what several have in common is added up.
        counts = (
            numbers.mapInArrow(_counting(parts, sample), _COUNTS)
            .groupBy(*groups)
            .agg(f.sum("events").alias("events"), f.sum("bytes").alias("bytes"))
            .persist()
        )
        by_key = f.col("kind").isin(_KEYS, _KEY_DAYS)
        few = counts.where(~by_key).collect()
        totals = (
            counts.where(by_key)
            .groupBy("kind", "stream", "topic", "at")
            .agg(f.count("*").alias("keys"), f.sum("events").alias("events"))
            .collect()
        )
        heaviest_first = Window.partitionBy("kind", "stream", "topic", "at").orderBy(f.desc("events"), "name")
        heaviest = (
            counts.where(by_key)
            .withColumn("place", f.row_number().over(heaviest_first))
            .where(f.col("place") <= _HEAVIEST)
            .collect()
        )
        counts.unpersist()
    return _arranged(few, totals, heaviest)


@contextmanager
def _shuffling(spark: SparkSession, parts: int) -> Generator[None]:
    """As many partitions for counts as there are tasks, at most Spark's own 200: there are few counts."""
    name = "spark.sql.shuffle.partitions"
    before = str(spark.conf.get(name))
    spark.conf.set(name, str(max(1, min(parts, 200))))
    try:
        yield
    finally:
        spark.conf.set(name, before)


def _parts(
    spark: SparkSession,
    url: str,
    stream: str,
    since: datetime,
    until: datetime,
    options: Mapping[str, str] | None,
) -> list[PartitionRead]:
    from pyspark.sql.types import StringType, StructType

    from pgmb.spark.source.readers import BatchReader

    schema = StructType()
    for name in _COLUMNS:
        schema.add(name, StringType())  # only the names are used
    reader = BatchReader(
        {
            "url": url,
            "stream": stream,
            "startingTimestamp": since.isoformat(),
            "endingTimestamp": until.isoformat(),
            "minPartitions": str(spark.sparkContext.defaultParallelism),
            "lakeOptions": msgspec.json.encode(dict(options or {})).decode(),
        },
        schema,
    )
    return [part.value for part in reader.partitions() if isinstance(part.value, PartitionRead)]


def _counting(parts: Sequence[PartitionRead], sample: int) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """What a task does: the counts of its range."""

    def count(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            numbers: list[int] = batch.column(0).to_pylist()
            for part in (parts[number] for number in numbers):
                counter = Counting(part.stream, sample)
                for events in read_partition(part, arrow_schema(_COLUMNS)):
                    counter.add(events)
                yield from counter.counts()

    return count


class Counting:
    """Counts events of a stream, and the fields of one payload in `sample`."""

    def __init__(self, stream: str, sample: int) -> None:
        self._stream, self._sample = stream, sample
        self._hours: list[Any] = []
        self._keys: list[Any] = []
        self._shapes: Counter[tuple[str, int, Any]] = Counter()
        self._fields: Counter[tuple[str, int, str, str]] = Counter()

    def add(self, events: Any) -> None:
        """Count a batch with the columns of _COLUMNS."""
        hours = pc.cast(pc.divide(events.column("published_at").cast(pa.int64()), _HOUR_MICROS), pa.int32())
        days = pc.cast(pc.divide(hours, 24), pa.int32())
        size = pc.add(
            pc.add(_length(events.column("topic")), _length(events.column("key"))),
            pc.add(_length(events.column("payload")), _length(events.column("headers"))),
        )
        topics = events.column("topic")
        self._hours.append(
            pa.table({"topic": topics, "at": hours, "bytes": size})
            .group_by(["topic", "at"])
            .aggregate([("bytes", "sum"), ("bytes", "count")])
        )
        keyed = pa.table({"topic": topics, "at": days, "name": events.column("key")})
        keyed = keyed.filter(pc.is_valid(keyed.column("name")))
        if keyed.num_rows:
            self._keys.append(keyed.group_by(["topic", "at", "name"]).aggregate([([], "count_all")]))
        self._look_into(events, topics, days)

    def _look_into(self, events: Any, topics: Any, days: Any) -> None:
        """Count the shapes of payloads. There are few, and each is unfolded once."""
        payloads = events.column("payload")
        if self._sample > 1:
            seqs = events.column("seq").to_numpy(zero_copy_only=False)
            # Of neighbours in the log too, whatever the order in which topics take turns.
            chosen = pa.array((seqs * 0x9E3779B1 >> 16) % self._sample == 0)
            payloads, topics, days = (column.filter(chosen) for column in (payloads, topics, days))
        decode, shapes = msgspec.json.decode, self._shapes
        for topic, day, payload in zip(
            topics.to_pylist(), days.to_pylist(), payloads.to_pylist(), strict=True
        ):
            try:
                shape = shape_of(decode(payload))
            except (msgspec.DecodeError, RecursionError):
                # PostgreSQL accepts JSON that this does not: escapes of lone surrogates, deep nesting.
                shape = "unreadable"
            shapes[topic, day, shape] += 1
        if len(shapes) > _MOST_SHAPES:
            self._unfold()

    def _unfold(self) -> None:
        for (topic, day, shape), events in self._shapes.items():
            for path, name in set(fields_of(shape)):
                self._fields[topic, day, path, name] += events
        self._shapes.clear()
        self._fields = collapsed(self._fields)

    def counts(self) -> Iterator[Any]:
        """All that was counted, in batches."""
        if self._hours:
            hours = pa.concat_tables(self._hours).group_by(["topic", "at"])
            summed = hours.aggregate([("bytes_sum", "sum"), ("bytes_count", "sum")])
            yield from self._rows(
                _HOURS, summed, events=summed.column("bytes_count_sum"), size=summed.column("bytes_sum_sum")
            )
        if self._keys:
            by_day = pa.concat_tables(self._keys).group_by(["topic", "at", "name"])
            by_day = by_day.aggregate([("count_all", "sum")])
            yield from self._rows(
                _KEY_DAYS, by_day, events=by_day.column("count_all_sum"), name=by_day.column("name")
            )
            in_all = by_day.group_by(["topic", "name"]).aggregate([("count_all_sum", "sum")])
            yield from self._rows(
                _KEYS, in_all, events=in_all.column("count_all_sum_sum"), name=in_all.column("name")
            )
        self._unfold()
        if self._fields:
            topics, days, paths, types = zip(*self._fields, strict=True)
            table = pa.table({"topic": pa.array(topics, pa.string()), "at": pa.array(days, pa.int32())})
            yield from self._rows(
                _FIELDS, table, events=list(self._fields.values()), name=list(paths), kind_of=list(types)
            )

    def _rows(
        self, kind: str, table: Any, *, events: Any, size: Any = None, name: Any = None, kind_of: Any = None
    ) -> Iterator[Any]:
        rows = table.num_rows
        given = {
            "kind": [kind] * rows,
            "stream": [self._stream] * rows,
            "topic": table.column("topic"),
            "at": table.column("at") if "at" in table.column_names else [0] * rows,
            "name": [""] * rows if name is None else name,
            "type": [""] * rows if kind_of is None else kind_of,
            "events": events,
            "bytes": [0] * rows if size is None else size,
        }
        # Of one chunk each: chunks of columns may end at different rows.
        arrays = [
            (
                column.combine_chunks()
                if isinstance(column, pa.ChunkedArray)
                else pa.array(column, field.type)
            ).cast(field.type)
            for field, column in zip(_COUNT_SCHEMA, given.values(), strict=True)
        ]
        yield from pa.Table.from_arrays(arrays, schema=_COUNT_SCHEMA).to_batches(max_chunksize=50_000)


def _length(column: Any) -> Any:
    return pc.cast(pc.fill_null(pc.binary_length(column), 0), pa.int64())


_NAMES: Final[dict[type, str]] = {
    str: "string",
    bool: "boolean",
    int: "number",
    float: "number",
    type(None): "null",
}


def shape_of(value: Any, depth: int = 0) -> Any:
    """What a payload has of fields and types, without values: equal for payloads alike."""
    kind: Any = value.__class__
    if kind is dict:
        if depth >= _MOST_DEPTH:
            return "object"
        # Most values are plain: a call for each would cost more than the rest.
        return (
            "object",
            *[(name, _NAMES.get(one.__class__) or shape_of(one, depth + 1)) for name, one in value.items()],
        )
    if kind is list:
        if depth >= _MOST_DEPTH:
            return "array"
        return "array", frozenset([shape_of(one, depth + 1) for one in value])
    return _NAMES[kind]


def fields_of(shape: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The paths of a shape, each with its type: customer.id, lines[].price."""
    if isinstance(shape, str):
        yield path, shape
    elif shape[0] == "array":
        yield path, "array"
        for one in shape[1]:
            yield from fields_of(one, f"{path}[]")
    else:
        yield path, "object"
        for name, one in shape[1:]:
            yield from fields_of(one, f"{path}.{name}" if path else name)


def collapsed(fields: Counter[tuple[str, int, str, str]]) -> Counter[tuple[str, int, str, str]]:
    """Objects with more than 100 fields are maps, whose names are data: their fields become one, `*`."""
    children: dict[tuple[str, str], set[str]] = {}
    for topic, _, path, _ in fields:
        parent, dot, name = path.rpartition(".")
        children.setdefault((topic, parent), set()).add(name if dot else path)
    maps = {
        (topic, f"{parent}." if parent else "")
        for (topic, parent), names in children.items()
        if len(names) > _MOST_FIELDS or "*" in names
    }
    if not maps:
        return fields
    result: Counter[tuple[str, int, str, str]] = Counter()
    for (topic, day, path, name), events in fields.items():
        starts = [prefix for of, prefix in maps if of == topic and path.startswith(prefix) and path != prefix]
        if starts and path:
            prefix = min(starts, key=len)
            # The names below are of other objects each time.
            path, _, below = path[len(prefix) :].partition(".")
            path = f"{prefix}*" + ("[]" if path.endswith("[]") else "")
            if below:
                continue
        result[topic, day, path, name] += events
    return result


def _arranged(few: Sequence[Any], totals: Sequence[Any], heaviest: Sequence[Any]) -> dict[str, Any]:
    """Rows of Spark as figures."""
    hours: dict[Series, dict[datetime, Volume]] = {}
    counts: dict[str, Counter[tuple[str, int, str, str]]] = {}
    for row in few:
        series = Series(row.stream, row.topic)
        if row.kind == _HOURS:
            hours.setdefault(series, {})[_EPOCH + row.at * HOUR] = Volume(row.events, row.bytes)
        else:
            counts.setdefault(row.stream, Counter())[row.topic, row.at, row.name, row.type] = row.events
    fields: dict[Series, list[FieldDay]] = {}
    for stream, found in counts.items():
        for (topic, day, path, name), events in sorted(collapsed(found).items()):
            fields.setdefault(Series(stream, topic), []).append(FieldDay(_date(day), path, name, events))
    tops: dict[tuple[str, Series, int], list[KeyCount]] = {}
    for row in sorted(heaviest, key=lambda row: row.place):
        tops.setdefault((row.kind, Series(row.stream, row.topic), row.at), []).append(
            KeyCount(row.name, row.events)
        )
    keys: dict[Series, KeyDay] = {}
    key_days: dict[Series, dict[date, KeyDay]] = {}
    for row in totals:
        series = Series(row.stream, row.topic)
        found_keys = KeyDay(row.keys, row.events, tops[row.kind, series, row.at])
        if row.kind == _KEYS:
            keys[series] = found_keys
        else:
            key_days.setdefault(series, {})[_date(row.at)] = found_keys
    return {"hours": hours, "fields": fields, "keys": keys, "key_days": key_days}


def _date(day: int) -> date:
    return (_EPOCH + timedelta(days=day)).date()


# -- Failures, which the database and the table of dead letters have -----------------------------------------


class _Letter(NamedTuple):
    id: int
    stream: str
    queue: str
    endpoint: str | None
    died_at: datetime
    published_at: datetime
    error: str | None


def _failures(
    database: psycopg.Connection[Any],
    streams: list[str],
    since: datetime,
    until: datetime,
    options: Mapping[str, str] | None,
) -> dict[str, Any]:
    dead: dict[Failing, Counter[datetime]] = {}
    deaths: dict[tuple[str, str], array[float]] = {}
    for letter in _letters(database, streams, since, until, options):
        failing = Failing(letter.stream, letter.queue, letter.endpoint, error_kind(letter.error))
        dead.setdefault(failing, Counter())[_hour(letter.died_at)] += 1
        seconds = (letter.died_at - letter.published_at).total_seconds()
        deaths.setdefault((letter.stream, letter.queue), array("d")).append(seconds)
    requests: dict[Failing, Counter[datetime]] = {}
    for stream, queue, endpoint, hour, error, events in database.execute(_REQUESTS, [since, until, streams]):
        failing = Failing(stream, queue, endpoint, error_kind(error))
        requests.setdefault(failing, Counter())[hour.astimezone(UTC)] += events
    waiting: dict[Failing, Waiting] = {}
    for stream, queue, endpoint, error, events, attempts, oldest in database.execute(_RETRIES, [streams]):
        failing = Failing(stream, queue, endpoint, error_kind(error))
        had = waiting.get(failing, Waiting(failing, 0, 0, timedelta(0)))
        waiting[failing] = Waiting(
            failing, had.events + events, max(had.attempts, attempts), max(had.oldest or timedelta(0), oldest)
        )
    return {
        "dead": dead,
        "deaths": {
            where: found for where, values in deaths.items() if (found := quantiles(values)) is not None
        },
        "requests": requests,
        "endpoints": [
            Endpoint._make([*described, _given(described[5], seconds), _given(delayed, delays)])
            for *described, seconds, delayed, delays in database.execute(_ENDPOINTS, [since, until, streams])
        ],
        "queues": [
            Queue._make([*described, frozenset(bounds or ())])
            for *described, bounds in database.execute(_QUEUES, [streams])
        ],
        "retries": sorted(waiting.values(), key=lambda one: (-one.events, one.failing[:2])),
    }


def _given(count: int, found: list[float] | None) -> Quantiles | None:
    return Quantiles(count, *found) if count and found else None


def _letters(
    database: psycopg.Connection[Any],
    streams: Sequence[str],
    since: datetime,
    until: datetime,
    options: Mapping[str, str] | None,
) -> Iterator[_Letter]:
    """Dead letters of a time: those that only the database has, and then those of the lake."""
    seen: set[int] = set()
    with database.cursor(row_factory=class_row(_Letter)) as cursor:
        for letter in cursor.stream(_DEAD, [since, until]):
            seen.add(letter.id)
            if letter.stream in streams:
                yield letter
    names = dict(database.execute(_ENDPOINT_NAMES).fetchall())
    for (stream,) in database.execute(_LAKES).fetchall():
        if stream not in streams:
            continue
        lake = dead_lake(database, stream)
        table = DeadTable.open(Storage.at(lake.url, options), lake.source)
        for row in table.between(since, until):
            # Those that were archived since the database was asked are in both.
            if row["id"] not in seen:
                endpoint = names.get(row["endpoint"], row["endpoint"])
                yield _Letter(**{**row, "stream": stream, "endpoint": endpoint})
