"""What a row publishes: which column is what, how values become JSON, what is refused beforehand."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import types as t

from pgmb.errors import InvalidArgument
from pgmb.spark.options import WriteOptions
from pgmb.spark.sink.columns import Columns
from pgmb.spark.sink.events import Digest, EventIds
from pgmb.spark.sink.json_encoding import encoder
from pgmb.spark.sink.writers import BatchWriter, StreamWriter

URL = "postgresql://nowhere"
TEXT, LONG = t.StringType(), t.LongType()


def schema(**kinds: t.DataType) -> t.StructType:
    return t.StructType([t.StructField(name, kind) for name, kind in kinds.items()])


def columns(kinds: t.StructType, **options: str) -> Columns:
    return Columns(kinds, WriteOptions.of({"url": URL, **options}, streaming=False))


def events(kinds: t.StructType, rows: list[dict[str, Any]], **options: str) -> dict[str, list[Any]]:
    names: dict[type[t.DataType], Any] = {
        t.StringType: pa.string(),
        t.LongType: pa.int64(),
        t.BinaryType: pa.binary(),
    }
    arrow = pa.schema([(field.name, names[type(field.dataType)]) for field in kinds.fields])
    batch = pa.RecordBatch.from_pylist(rows, schema=arrow)
    return {name: values.to_pylist() for name, values in columns(kinds, **options).events(batch).items()}


def test_columns_are_what_their_names_say() -> None:
    identity = "0197f7a0-0000-7000-8000-00000000ABCD"
    found = events(
        schema(topic=TEXT, key=LONG, payload=TEXT, headers=TEXT, id=TEXT),
        [
            {"topic": "a", "key": 1, "payload": '{"x": 1}', "headers": '{"h": "1"}', "id": identity},
            {"topic": "b", "key": None, "payload": None, "headers": None, "id": None},
        ],
    )
    assert found == {
        "topic": ["a", "b"],
        "key": ["1", None],
        "payload": ['{"x": 1}', "null"],
        "headers": ['{"h": "1"}', None],
        "id": [UUID(identity).bytes, None],
    }


def test_without_a_payload_column_the_others_are_its_fields() -> None:
    rows: list[dict[str, Any]] = [{"topic": "a", "n": 1, "s": None}, {"topic": "a"}]
    found = events(schema(topic=TEXT, n=LONG, s=TEXT), rows)
    assert found["payload"] == ['{"n":1}', "{}"]


def test_options_name_columns_and_fill_what_is_null() -> None:
    kinds = schema(kind=TEXT, customer=LONG, body=TEXT)
    rows: list[dict[str, Any]] = [
        {"kind": "a", "customer": 7, "body": "1"},
        {"kind": None, "customer": None, "body": "2"},
    ]
    names = {"topicColumn": "kind", "keyColumn": "customer", "payloadColumn": "body"}
    found = events(kinds, rows, **names, topic="rest", key="nobody")
    assert found == {"topic": ["a", "rest"], "key": ["7", "nobody"], "payload": ["1", "2"]}
    found = events(schema(payload=TEXT), [{"payload": "1"}], topic="t", key="k")
    assert found == {"topic": ["t"], "key": ["k"], "payload": ["1"]}
    # A table's own id is no event's.
    found = events(schema(id=LONG, key=TEXT), [{"id": 1, "key": "k"}], topic="t", idColumn="", keyColumn="")
    assert found["payload"] == ['{"id":1,"key":"k"}']


def test_names_of_columns_are_the_same_in_any_case() -> None:
    kinds = schema(Topic=TEXT, KEY=TEXT, N=LONG)
    assert events(kinds, [{"Topic": "a", "KEY": "k", "N": 1}]) == {
        "topic": ["a"],
        "key": ["k"],
        "payload": ['{"N":1}'],
    }
    found = events(schema(Customer=LONG, n=LONG), [{"Customer": 7, "n": 1}], topic="t", keyColumn="customer")
    assert found == {"topic": ["t"], "key": ["7"], "payload": ['{"n":1}']}
    # With spark.sql.caseSensitive the one of that very name is meant.
    found = events(schema(key=TEXT, Key=LONG), [{"key": "k", "Key": 1}], topic="t")
    assert found == {"topic": ["t"], "key": ["k"], "payload": ['{"Key":1}']}
    with pytest.raises(ValueError, match="columns KEY and Key have the same name as key"):
        columns(schema(KEY=TEXT, Key=TEXT, n=LONG), topic="t")


def test_what_a_read_of_a_log_returns_can_be_written() -> None:
    kinds = schema(
        id=TEXT, stream=TEXT, topic=TEXT, key=TEXT, payload=TEXT, headers=TEXT, seq=LONG, position=TEXT
    )
    assert columns(kinds).found.keys() == {"id", "topic", "key", "payload", "headers"}


@pytest.mark.parametrize(
    ("kinds", "options", "said"),
    [
        (schema(payload=TEXT), {}, "events need a topic"),
        (schema(topic=TEXT), {}, "events need a payload"),
        (
            schema(topic=LONG, payload=TEXT),
            {},
            "column topic is bigint: as the topic of events it must be a string",
        ),
        (schema(id=LONG, n=LONG), {"topic": "t"}, "must be a UUID"),
        (schema(at=TEXT, n=LONG), {"topic": "t"}, "must be a timestamp"),
        (schema(headers=LONG, n=LONG), {"topic": "t"}, "a map, a struct or JSON text"),
        (schema(payload=TEXT, total=LONG), {"topic": "t"}, "total would be lost"),
        (
            schema(payload=TEXT),
            {"topic": "t", "keyColumn": "no"},
            "keyColumn names 'no', but there are payload",
        ),
        (schema(payload=TEXT), {"topic": "t", "comitMode": "direct"}, "did you mean commitMode"),
        (
            schema(payload=TEXT),
            {"topic": "t", "commitMode": "fast"},
            "commitMode must be staged or direct, got 'fast'",
        ),
        (
            schema(payload=TEXT),
            {"topic": "t", "deliveryGuarantee": "exactly"},
            "exactly-once or at-least-once",
        ),
        (
            schema(payload=TEXT),
            {"topic": "t", "txnAppId": "a"},
            "txnAppId and txnVersion must be set together",
        ),
        (schema(payload=TEXT), {"topic": "t", "txnAppId": "a", "txnVersion": "-1"}, "a number of at least 0"),
        (schema(payload=TEXT), {"topic": "t", "txnAppId": "", "txnVersion": "1"}, "1 to 500 characters"),
        (schema(payload=TEXT), {"topic": "t", "url": ""}, "needs .option"),
        (t.StructType([t.StructField("a", TEXT), t.StructField("a", TEXT)]), {"topic": "t"}, "the same name"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(
    kinds: t.StructType, options: dict[str, str], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        BatchWriter({"url": URL, **options}, kinds, overwrite=False)


def test_modes_that_make_no_sense_are_refused() -> None:
    kinds = schema(topic=TEXT, payload=TEXT)
    for writer in (BatchWriter, StreamWriter):
        with pytest.raises(ValueError, match="only ever appended to"):
            writer({"url": URL}, kinds, True)
    with pytest.raises(ValueError, match="batch writes only"):
        StreamWriter({"url": URL, "txnVersion": "1"}, kinds, False)
    with pytest.raises(ValueError, match="cannot be combined"):
        StreamWriter({"url": URL, "commitMode": "direct", "deliveryGuarantee": "at-least-once"}, kinds, False)
    # Spark hands its own options on.
    StreamWriter({"URL": URL, "checkpointLocation": "/tmp/x", "queryName": "q"}, kinds, False)


def test_a_row_without_a_topic_or_with_a_broken_id_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="column topic is NULL in 1 of 2 rows"):
        events(schema(topic=TEXT, payload=TEXT), [{"topic": "a"}, {"topic": None}])
    with pytest.raises(InvalidArgument, match="'order-7', which is no UUID"):
        events(schema(id=TEXT, payload=TEXT), [{"id": None}, {"id": "order-7"}], topic="t")


@pytest.mark.parametrize(
    ("kind", "arrow", "values", "texts"),
    [
        (
            t.TimestampType(),
            pa.timestamp("us", "Europe/Berlin"),
            [1, 1000, -1, 253402300800000000, None],
            [
                "1970-01-01T00:00:00.000001Z",
                "1970-01-01T00:00:00.001Z",
                "1969-12-31T23:59:59.999999Z",
                "+10000-01-01T00:00:00.000Z",
                None,
            ],
        ),
        (t.DateType(), pa.date32(), [0, 2932897], ["1970-01-01", "+10000-01-01"]),
        (
            t.TimeType(),
            pa.time64("us"),
            [0, 1, 86399123450, None],
            ["00:00:00", "00:00:00.000001", "23:59:59.12345", None],
        ),
        (t.DoubleType(), pa.float64(), [1.0, -0.0, 1e300], [1.0, -0.0, 1e300]),
        (
            t.ArrayType(TEXT),
            pa.list_(pa.string()),
            [[], [None], None, ["a", '"']],
            [[], [None], None, ["a", '"']],
        ),
        (
            t.MapType(t.DateType(), LONG),
            pa.map_(pa.date32(), pa.int64()),
            [[(0, 1)], [], None],
            [{"1970-01-01": 1}, {}, None],
        ),
        (
            t.MapType(schema(a=LONG), LONG),
            pa.map_(pa.struct([("a", pa.int64())]), pa.int64()),
            [[({"a": 1}, None)]],
            [{'{"a":1}': None}],
        ),
        (schema(), pa.struct([]), [{}, None], [{}, None]),
        (schema(a=LONG), pa.struct([("a", pa.int64())]), [{"a": None}, {"a": 1}, None], [{}, {"a": 1}, None]),
        (t.NullType(), pa.null(), [None, None], [None, None]),
    ],
)
def test_values_of_a_type(kind: t.DataType, arrow: Any, values: list[Any], texts: list[Any]) -> None:
    whole = pa.array([values[0], *values, values[-1]], arrow)
    for array in (pa.array(values, arrow), whole[1:-1]):
        found = encoder(kind)(array).to_pylist()
        assert [None if text is None else json.loads(text) for text in found] == texts


@pytest.mark.parametrize("kind", [t.YearMonthIntervalType(), t.CalendarIntervalType()])
def test_a_type_that_never_reaches_python_is_refused_at_the_driver(kind: t.DataType) -> None:
    with pytest.raises(TypeError, match="as to_json does"):
        columns(schema(topic=TEXT, span=kind))


def test_a_digest_is_of_the_events_and_not_of_their_order_or_batches() -> None:
    def digest(*batches: list[tuple[str, str | None]]) -> int:
        made = Digest()
        for rows in batches:
            topics, keys = zip(*rows, strict=True)
            made({"topic": pa.array(topics), "key": pa.array(keys, pa.string())}, 0, len(rows))
        return made.value

    rows: list[tuple[str, str | None]] = [("a", "1"), ("b", None), ("c", "3")]
    assert digest(rows) == digest(rows[::-1]) == digest(rows[:1], rows[1:])
    assert (
        len({digest(rows), digest(rows[:2]), digest([*rows, rows[0]]), digest([("a", None), *rows[1:]])}) == 4
    )
    assert -(2**63) <= digest(rows) < 2**63


def test_ids_are_the_same_in_every_attempt_and_no_two_alike() -> None:
    def ids(app: str, version: int | None, task: int, before: int, rows: int) -> list[bytes]:
        made: dict[str, Any] = {}
        EventIds(app, version, task)(made, before, rows)
        found: list[bytes] = made["id"].to_pylist()
        return found

    assert ids("a", 1, 0, 0, 4) == [*ids("a", 1, 0, 0, 1), *ids("a", 1, 0, 1, 3)]
    several = ids("a", 1, 0, 0, 3) + ids("a", 1, 1, 0, 3) + ids("a", 2, 0, 0, 3) + ids("b", 1, 0, 0, 3)
    assert len(set(several)) == len(several)
    assert {(UUID(bytes=one).version, UUID(bytes=one).variant) for one in several} == {
        (8, "specified in RFC 4122")
    }
    assert np.array_equal(ids("a", None, 0, 2**40 - 1, 1), ids("a", None, 0, 2**40 - 1, 1))
    with pytest.raises(OverflowError):
        ids("a", 1, 0, 2**40, 1)
