"""Events as JSON lines, for Spark: payloads unchanged, both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from pgmb.errors import InvalidArgument

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_scalar = msgspec.json.Decoder(str | int | float | None).decode

_ROLES = ("topic", "key", "payload", "headers", "id", "at")


def line() -> Column:
    """A column: an event much as `pgmb tail --json` has it. Without headers they are null."""
    from pyspark.sql import functions as f

    at = f.date_format("published_at", "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX").alias("published_at")
    head = f.to_json(f.struct("seq", "id", "topic", "key", at, "stream"), {"ignoreNullFields": "false"})
    return f.concat(
        f.substring(head, f.lit(1), f.length(head) - 1),
        *(f.lit(',"payload":'), _in_one_line("payload")),
        *(f.lit(',"headers":'), f.coalesce(_in_one_line("headers"), f.lit("null"))),
        f.lit("}"),
    ).alias("value")


def _in_one_line(name: str) -> Column:
    """JSON may be written in many lines, but not inside a text: there a newline is an escape."""
    from pyspark.sql import functions as f

    return f.translate(name, "\r\n", "  ")


def events(lines: DataFrame, columns: Mapping[str, str]) -> DataFrame:
    """The events that lines of text hold. `columns` names the fields that are called otherwise, "" for none.

    As in a table, the fields that are nothing else make the payload, unless one is the payload itself.
    """
    found = lines.mapInArrow(_reading(dict(columns)), ", ".join(f"{role} string" for role in _ROLES))
    return found.withColumn("at", found["at"].cast("timestamp")) if columns.get("at") else found.drop("at")


def _reading(
    columns: dict[str, str],
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        schema = pa.schema([(role, pa.string()) for role in _ROLES])
        for batch in batches:
            texts: list[Any] = batch.to_pydict()["value"]
            rows = [row(text, columns) for text in texts if text.strip()]
            yield pa.RecordBatch.from_pydict(
                {role: [one[number] for one in rows] for number, role in enumerate(_ROLES)}, schema
            )

    return read


def row(text: str, columns: Mapping[str, str]) -> tuple[str | None, ...]:
    """The columns of an event, in the order of the roles."""
    try:
        fields = _decode(text.encode())
        named = {role: columns.get(role, role if role != "at" else "") for role in _ROLES}
        taken = {role: fields.pop(name) for role, name in named.items() if name in fields}
        payload = taken.pop("payload", None) or msgspec.json.encode(fields)
        found = {role: _json(raw) if role == "headers" else _text(raw) for role, raw in taken.items()}
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        shown = text if len(text) <= 60 else text[:57] + "..."
        raise InvalidArgument(f"not an event: {error}: {shown}") from None
    return tuple(bytes(payload).decode() if role == "payload" else found.get(role) for role in _ROLES)


def _text(raw: msgspec.Raw) -> str | None:
    value = _scalar(raw)
    return value if value is None or isinstance(value, str) else bytes(raw).decode()


def _json(raw: msgspec.Raw) -> str | None:
    text = bytes(raw).decode()
    return None if text == "null" else text
