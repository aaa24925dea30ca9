"""What a row publishes: its columns by name, the rest of them as the payload."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import pyarrow
import pyarrow.compute
from pyspark.sql import types as t

from pgmb.errors import InvalidArgument
from pgmb.spark.options import WriteOptions
from pgmb.spark.sink.json_encoding import Encoder, encoder

# Their stubs know too little of what arrays may be.
pa: Any = pyarrow
pc: Any = pyarrow.compute

OF_THE_SOURCE: Final = ("stream", "published_at", "seq", "position")
"""Columns of a read that mean nothing to a write."""

_WHOLE = (t.ByteType, t.ShortType, t.IntegerType, t.LongType)
_ALLOWED: Final[dict[str, tuple[Any, str]]] = {
    "topic": (t.StringType, "a string"),
    "key": ((t.StringType, *_WHOLE), "a string or a whole number"),
    "headers": ((t.StringType, t.MapType, t.StructType, t.VariantType), "a map, a struct or JSON text"),
    "id": ((t.StringType, t.BinaryType), "a UUID, as text or its 16 bytes"),
    "at": (t.TimestampType, "a timestamp"),
}


class Columns:
    """How rows of a schema become events: made at the driver, used by every task.

    The column of each name of COLUMNS is what it says. Without a payload column, all that are nothing else
    are its fields. A payload or headers that are strings are JSON text already; anything else is encoded.
    """

    def __init__(self, schema: t.StructType, options: WriteOptions) -> None:
        kinds = {field.name: field.dataType for field in schema.fields}
        if len(kinds) < len(schema.fields):
            raise ValueError("two columns have the same name")
        resolved = {role: _resolved(name, kinds) for role, name in options.columns.items()}
        self.found = {role: name for role, name in resolved.items() if name is not None}
        for role, name in options.columns.items():
            if name and name != role and role not in self.found:
                raise ValueError(
                    f"{role}Column names {name!r}, but there are {', '.join(kinds) or 'no columns'}"
                )
        for role, (types, wanted) in _ALLOWED.items():
            if role in self.found and not isinstance(kinds[self.found[role]], types):
                raise ValueError(
                    f"column {self.found[role]} is {kinds[self.found[role]].simpleString()}: as the {role} of"
                    f' events it must be {wanted}. If it is not that, set .option("{role}Column", "")'
                )
        if "topic" not in self.found and options.topic is None:
            raise ValueError(
                'events need a topic: a column topic, .option("topicColumn", …) or .option("topic", …)'
            )
        self.topic, self.key = options.topic, options.key
        self.fields = [field for field in schema.fields if field.name not in self.found.values()]
        if "payload" in self.found:
            lost = [field.name for field in self.fields if field.name.lower() not in OF_THE_SOURCE]
            if lost:
                raise ValueError(
                    f"beside payload, {', '.join(lost)} would be lost: drop them, make them fields of it, or"
                    ' set .option("payloadColumn", "") to publish all columns as fields'
                )
        elif not self.fields:
            raise ValueError("events need a payload: a column payload, or columns to be its fields")
        whole = t.StructType(self.fields)
        self._kinds = {role: kinds[name] for role, name in self.found.items()} | (
            {} if "payload" in self.found else {"payload": whole}
        )
        for role in ("payload", "headers"):
            self._encoder(role)
        self.delayed = "at" in self.found
        self.identified = "id" in self.found

    def events(self, batch: Any) -> dict[str, Any]:
        """The columns of the log, or of a stage, that the rows of a batch give."""
        events = {"topic": self._topic(batch)}
        if "key" in self.found:
            key = self._column(batch, "key").cast(pa.string())
            events["key"] = key if self.key is None else pc.fill_null(key, self.key)
        elif self.key is not None:
            events["key"] = pa.repeat(self.key, len(batch))
        events["payload"] = pc.fill_null(self._payload(batch), "null")
        if "headers" in self.found:
            encode = self._encoder("headers")
            headers = self._column(batch, "headers")
            events["headers"] = encode(headers) if encode else headers
        if "id" in self.found:
            events["id"] = _uuids(self._column(batch, "id"), self.found["id"])
        if "at" in self.found:
            events["due_at"] = self._column(batch, "at").cast(pa.timestamp("us", "UTC"))
        return events

    def _column(self, batch: Any, role: str) -> Any:
        return batch.column(self.found[role])

    def _topic(self, batch: Any) -> Any:
        if "topic" not in self.found:
            return pa.repeat(self.topic, len(batch))
        topic = self._column(batch, "topic")
        if topic.null_count and self.topic is None:
            raise InvalidArgument(
                f"an event needs a topic: column {self.found['topic']} is NULL in {topic.null_count} of"
                f' {len(topic)} rows, and there is no .option("topic", …)'
            )
        return topic if self.topic is None else pc.fill_null(topic, self.topic)

    def _payload(self, batch: Any) -> Any:
        if "payload" in self.found:
            payload = self._column(batch, "payload")
        else:
            names = [field.name for field in self.fields]
            payload = pa.StructArray.from_arrays([batch.column(name) for name in names], names)
        encode = self._encoder("payload")
        return encode(payload) if encode else payload

    def _encoder(self, role: str) -> Encoder | None:
        kind = self._kinds.get(role)
        return None if kind is None or isinstance(kind, t.StringType) else encoder(kind)


def _resolved(name: str, columns: Iterable[str]) -> str | None:
    """The column of that name; in Spark's way, that is in any case of letters."""
    alike = [column for column in columns if column.lower() == name.lower()]
    if name in alike or not alike:
        return name if alike else None
    if len(alike) > 1:
        raise ValueError(f"columns {' and '.join(alike)} have the same name as {name}")
    return alike[0]


def _uuids(array: Any, name: str) -> Any:
    if pa.types.is_binary(array.type):
        return array.cast(pa.binary(16))
    bare = pc.replace_substring(array.cast(pa.string()), "-", "")
    wrong = pc.invert(pc.match_substring_regex(bare, "^[0-9a-fA-F]{32}$"))
    if pc.any(wrong).as_py():
        first = array.filter(pc.fill_null(wrong, False))[0].as_py()
        raise InvalidArgument(
            f"column {name} holds {first[:80]!r}, which is no UUID. If it is not the id of events, set"
            ' .option("idColumn", "") or another name'
        )
    whole = pc.fill_null(bare, "0" * 32)
    octets = bytes.fromhex("".join(whole.to_pylist()))
    uuids = pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(array), [None, pa.py_buffer(octets)])
    return pc.if_else(array.is_valid(), uuids, pa.scalar(None, pa.binary(16))) if array.null_count else uuids
