"""An event as a row."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

# What the log holds, and two columns that are the same for a whole batch: the stream, and its end's position.
SCHEMA: Final = (
    "id STRING, stream STRING, topic STRING, key STRING, payload STRING, headers STRING, "
    "published_at TIMESTAMP, seq BIGINT, position STRING"
)

ARROW: Final = pa.schema(
    [
        ("id", pa.string()),
        ("stream", pa.string()),
        ("topic", pa.string()),
        ("key", pa.string()),
        ("payload", pa.string()),
        ("headers", pa.string()),
        ("published_at", pa.timestamp("us", tz="UTC")),
        ("seq", pa.int64()),
        ("position", pa.string()),
    ]
)


def chosen(names: list[str]) -> pa.Schema:
    """The columns that were asked for, in that order."""
    unknown = [name for name in names if name not in ARROW.names]
    if unknown:
        raise ValueError(
            f"an event has no column {', '.join(unknown)}: choose among {', '.join(ARROW.names)}, "
            "and decode payloads afterwards, for example with pgmb.spark.decode"
        )
    return pa.schema([ARROW.field(name) for name in names])
