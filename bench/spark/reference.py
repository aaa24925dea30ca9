"""The least a Python data source can do: a SELECT on the log's table by ADBC, a range of numbers a partition.

It gives the columns of `format("pgmb")`, an id only where the table holds one, and knows nothing of
snapshots: it would miss what commits late.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

if TYPE_CHECKING:
    import pyarrow as pa

NAME = "reference"
BATCH_BYTES = 16 * 1024 * 1024

_connections: dict[str, Any] = {}


class _Range(NamedTuple):
    low: int
    high: int


class Reference(DataSource):
    """Options: url, stream, events, partitions."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        return (
            "id STRING, stream STRING, topic STRING, key STRING, payload STRING, headers STRING, "
            "published_at TIMESTAMP, seq BIGINT, position STRING"
        )

    def reader(self, schema: object) -> _Reader:
        return _Reader(dict(self.options))


class _Reader(DataSourceReader):
    def __init__(self, options: dict[str, str]) -> None:
        self.url, self.stream = options["url"], options["stream"]
        self.events, self.count = int(options["events"]), int(options["partitions"])

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(part) for part in ranges(self.events, self.count)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        from adbc_driver_postgresql import dbapi

        if self.url not in _connections:
            _connections[self.url] = dbapi.connect(self.url, autocommit=True)
        with _connections[self.url].cursor() as cursor:
            cursor.adbc_statement.set_options(**{"adbc.postgresql.batch_size_hint_bytes": str(BATCH_BYTES)})
            cursor.execute(statement(self.stream, *partition.value))
            for batch in cursor.fetch_record_batch():
                identity, topic, key, payload, headers, published_at, seq = batch.columns
                yield pa.RecordBatch.from_arrays(
                    [
                        identity,
                        pa.repeat(self.stream, batch.num_rows),
                        topic,
                        key,
                        payload.storage if isinstance(payload, pa.ExtensionArray) else payload,
                        headers.storage if isinstance(headers, pa.ExtensionArray) else headers,
                        published_at,
                        seq,
                        pa.repeat("0", batch.num_rows),
                    ],
                    ["id", "stream", "topic", "key", "payload", "headers", "published_at", "seq", "position"],
                )


def ranges(events: int, count: int) -> list[_Range]:
    """Numbers 1 to `events` in as many equal ranges: above the low, up to the high."""
    return [_Range(events * part // count, events * (part + 1) // count) for part in range(count)]


def statement(stream: str, low: int, high: int) -> str:
    columns = "id::text, topic, key, payload, headers, published_at, seq"
    return f"select {columns} from pgmb.log_{stream} where seq > {low} and seq <= {high}"
