"""Events as columns of a table of the lake, and how its files are written."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow

# The stubs of pyarrow are incomplete.
pa: Any = pyarrow

COLUMNS: Final = "e.seq, e.xid, e.id, e.topic, e.key, e.payload, e.headers, e.published_at"
"""What is read from the log."""

FILE_SCHEMA: Final = pa.schema(
    [
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("xid", pa.int64(), nullable=False),
        pa.field("id", pa.string(), nullable=False),
        pa.field("topic", pa.string(), nullable=False),
        pa.field("key", pa.string()),
        pa.field("payload", pa.string(), nullable=False),
        pa.field("headers", pa.string()),
        pa.field("published_at", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)
"""The columns of a file."""

TABLE_SCHEMA: Final = FILE_SCHEMA.append(pa.field("date", pa.date32(), nullable=False))
"""The columns of a table: `date`, of published_at in UTC, is the folder of a file."""

STATISTICS: Final = ("seq", "xid", "topic", "published_at")
"""The columns whose bounds the table knows. Not keys and payloads: an erasure does not reach its log."""

ROW_GROUP: Final = 131_072

WRITING: Final[dict[str, Any]] = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": ["topic", "key", "headers"],
    "column_encoding": {
        "seq": "DELTA_BINARY_PACKED",
        "xid": "DELTA_BINARY_PACKED",
        "published_at": "DELTA_BINARY_PACKED",
        "id": "DELTA_BYTE_ARRAY",  # derived ids have long prefixes in common
    },
    "write_statistics": list(STATISTICS),
    "write_page_checksum": True,
}
"""For Arrow's Parquet writer."""


class Layout(NamedTuple):
    """How the files of a table are written.

    statistics   the columns whose bounds the table knows
    at           the column whose UTC date is the folder of a file, which `partition` names
    """

    schema: Any
    writing: dict[str, Any]
    statistics: tuple[str, ...]
    at: str
    partition: str


EVENTS: Final = Layout(FILE_SCHEMA, WRITING, STATISTICS, "published_at", "date")
"""Of a stream's table."""


class LogRows:
    """Converts record batches of the log to the columns of a file."""

    def __init__(self, salt: int) -> None:
        # Imported here: readers of files need no Spark.
        from pgmb.spark.source.queries import arrow_schema
        from pgmb.spark.source.rows import Rows

        names = [name for name in FILE_SCHEMA.names if name != "xid"]
        self._rows = Rows(arrow_schema(names), "", "", salt)

    def of(self, batch: Any) -> Any:
        given = self._rows.of(batch)
        columns = [
            _xids(batch.column("xid")) if name == "xid" else given.column(name) for name in FILE_SCHEMA.names
        ]
        return pa.RecordBatch.from_arrays(columns, schema=FILE_SCHEMA)


def _xids(column: Any) -> Any:
    """xid8, which ADBC gives as the eight bytes that the server sent."""
    stored = column.storage if isinstance(column, pa.ExtensionArray) else column
    offset = np.frombuffer(stored.buffers()[1], dtype=np.int32)[stored.offset]
    values = np.frombuffer(stored.buffers()[2], dtype=">i8", count=len(stored), offset=offset)
    return pa.array(values.astype(np.int64))
