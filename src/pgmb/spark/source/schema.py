"""An event as a row."""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa

# What the log holds, and two columns that are the same for a whole batch: the stream, and its end's position.
SCHEMA: Final = (
    "id STRING, stream STRING, topic STRING, key STRING, payload STRING, headers STRING, "
    "published_at TIMESTAMP, seq BIGINT, position STRING"
)

_FIELDS: Final[list[pa.Field[Any]]] = [
    pa.field("id", pa.string()),
    pa.field("stream", pa.string()),
    pa.field("topic", pa.string()),
    pa.field("key", pa.string()),
    pa.field("payload", pa.string()),
    pa.field("headers", pa.string()),
    pa.field("published_at", pa.timestamp("us", tz="UTC")),
    pa.field("seq", pa.int64()),
    pa.field("position", pa.string()),
]
ARROW: Final = pa.schema(_FIELDS)


def chosen(names: list[str]) -> pa.Schema:
    """The columns that were asked for, in that order."""
    unknown = [name for name in names if name not in ARROW.names]
    if unknown:
        raise ValueError(
            f"an event has no column {', '.join(unknown)}: choose among {', '.join(ARROW.names)}, "
            "and decode payloads afterwards, for example with pgmb.spark.decode"
        )
    fields: list[Any] = [_FIELDS[ARROW.names.index(name)] for name in names]
    return pa.schema(fields)
