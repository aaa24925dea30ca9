"""What a column's declaration means, and which JSON values fit its type: nothing is coerced or rounded."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from pgmb.errors import InvalidArgument
from pgmb.lake.projection.columns import Column, Decoder, parse_columns
from pgmb.lake.projection.declaration import load

AT = datetime(2026, 1, 31, tzinfo=UTC)
DIGITS = "1234567890123456789012345678"


def rows(columns: str, *payloads: str, bad: str = "rescue") -> list[dict[str, Any]]:
    count = len(payloads)
    events: Any = pa.record_batch(
        {
            "seq": pa.array(range(count), pa.int64()),
            "id": pa.array(["id"] * count),
            "topic": pa.array(["t"] * count),
            "key": pa.array([None] * count, pa.string()),
            "payload": pa.array(payloads, pa.string()),
            "published_at": pa.array([AT] * count, pa.timestamp("us", tz="UTC")),
        }
    )
    found: list[dict[str, Any]] = Decoder(parse_columns(columns), bad).rows(events).to_pylist()
    return found


@pytest.mark.parametrize(
    ("kind", "json", "value"),
    [
        ("string", '"a\\u0000b"', "a\0b"),
        ("boolean", "true", True),
        ("int", "2147483647", 2**31 - 1),
        ("bigint", "-9223372036854775808", -(2**63)),
        ("double", "1", 1.0),
        ("double", "1e300", 1e300),
        ("decimal(5,2)", "1.1", Decimal("1.10")),
        ("decimal(5,2)", '"-999.99"', Decimal("-999.99")),
        ("decimal(38,10)", f"{DIGITS}.1234567891", Decimal(f"{DIGITS}.1234567891")),
        ("decimal(3)", "1e2", Decimal(100)),
        ("timestamp", '"2026-01-31T10:00:00.123456+02:00"', datetime(2026, 1, 31, 8, 0, 0, 123456, UTC)),
        ("timestamp", '"2026-01-31T10:00:00.123456000Z"', datetime(2026, 1, 31, 10, 0, 0, 123456, UTC)),
        ("timestamp", '"9999-12-31T23:59:59.999999Z"', datetime(9999, 12, 31, 23, 59, 59, 999999, UTC)),
        ("array<timestamp>", '["0001-01-01T00:00:00Z", null]', [datetime(1, 1, 1, tzinfo=UTC), None]),
        ("date", '"2026-01-31"', date(2026, 1, 31)),
        ("json", '{"b" : 1.10, "a":2}', '{"b" : 1.10, "a":2}'),
        ("array<int>", "[1, null]", [1, None]),
        ("array<decimal(3,1)>", '[1.5, "2"]', [Decimal("1.5"), Decimal("2.0")]),
        ("map<string, json>", '{"a": [1 ], "b": null}', [("a", "[1 ]"), ("b", None)]),
        ("map<string, int>", '{"a": 1}', [("a", 1)]),
        (
            "struct<a: int, b: array<struct<c: text>>>",
            '{"b": [{"c": "x"}, {}], "z": 1}',
            {"a": None, "b": [{"c": "x"}, {"c": None}]},
        ),
    ],
)
def test_values_that_fit(kind: str, json: str, value: Any) -> None:
    fitting, missing, null = rows(f"a {kind}", f'{{"a": {json}}}', '{"b": 1}', '{"a": null}')
    assert fitting["a"] == value
    assert (missing["a"], null["a"]) == (None, None)
    assert {row["rescued"] for row in (fitting, missing, null)} == {None}
    required = rows(f"a {kind} not null", f'{{"a": {json}}}', '{"b": 1}', '{"a": null}')
    assert [row["a"] for row in required] == [value, None, None]
    assert [row["rescued"] for row in required] == [None, '{"b": 1}', '{"a": null}']
    assert all(row["rescue_reason"].startswith("a: Expected ") for row in required[1:])


@pytest.mark.parametrize(
    ("kind", "json"),
    [
        ("string", "1"),
        ("boolean", "1"),
        ("boolean", '"true"'),
        ("int", "2147483648"),
        ("int", "1.0"),
        ("bigint", "9223372036854775808"),
        ("bigint", '"1"'),
        ("double", '"1"'),
        ("double", "1e400"),
        ("decimal(5,2)", "1.005"),
        ("decimal(5,2)", "1000"),
        ("decimal(5,2)", '"NaN"'),
        ("decimal(5,2)", "true"),
        ("decimal(5,2)", '"1_0"'),
        ("decimal(5,2)", '" 1"'),
        ("decimal(5,2)", '"\u0661"'),
        ("decimal(5,2)", '"Infinity"'),
        ("decimal(5,2)", "{}"),
        ("array<decimal(5,2)>", '["1_0"]'),
        ("timestamp", '"2026-01-31T10:00:00.123456789Z"'),
        ("timestamp", '"0001-01-01T00:00:00+01:00"'),
        ("timestamp", '"9999-12-31T23:59:59-01:00"'),
        ("array<timestamp>", '["0001-01-01T00:00:00+01:00"]'),
        ("timestamp", 'null, "a": 1'),
        ("timestamp", '"2026-01-31T10:00:00"'),
        ("timestamp", "1769853600"),
        ("timestamp", '"soon"'),
        ("date", '"2026-02-30"'),
        ("array<int>", "[1, 2.5]"),
        ("array<int>", "{}"),
        ("map<string, int>", "[]"),
        ("struct<a: int>", '{"a": "1"}'),
        ("string", '"\\ud800"'),
    ],
)
def test_values_that_do_not_fit_are_rescued_with_the_rest_of_the_row(kind: str, json: str) -> None:
    payload = f'{{"b": 7, "a": {json}}}'
    (found,) = rows(f"a {kind}, b int", payload)
    whole = "ud800" in json
    assert (found["a"], found["b"]) == (None, None if whole else 7)
    assert found["rescued"] == payload
    assert found["rescue_reason"].startswith("payload: " if whole else "a: ")
    assert rows(f"a {kind}, b int", payload, '{"b": 8}', bad="drop")[0]["b"] == 8


@pytest.mark.parametrize("kind", ["json", "string", "array<json>"])
@pytest.mark.parametrize("at", ["a", "z"])
def test_a_payload_that_nests_too_deeply_is_rescued(kind: str, at: str) -> None:
    """PostgreSQL accepts it, Python does not."""
    deep = f'{{"b": 7, "{at}": {"[" * 5000}{"]" * 5000}}}'
    found, other = rows(f"a {kind}, b int", deep, '{"b": 8}')
    assert (found["a"], found["b"], found["rescued"]) == (None, None, deep)
    assert found["rescue_reason"] == "payload: nested too deeply"
    assert (other["b"], other["rescued"]) == (8, None)


def test_paths_lead_into_objects_and_other_payloads_are_rescued() -> None:
    columns = "city string from customer.address.city, name string not null from customer.name"
    payloads = [
        '{"customer": {"name": "A", "address": {"city": "B"}}}',
        '{"customer": {"name": "A", "address": null}}',
        '{"customer": {"name": "A", "address": "B"}}',
        '{"customer": null}',
        "[]",
        # Of a field that is there twice the last one counts.
        '{"customer": 1, "customer": {"name": "A"}}',
    ]
    found = rows(columns, *payloads)
    assert [(row["city"], row["name"]) for row in found] == [
        ("B", "A"), (None, "A"), (None, "A"), (None, None), (None, None), (None, "A"),
    ]  # fmt: skip
    assert [row["rescue_reason"] for row in found] == [
        None,
        None,
        "city: Expected `object`, got `str`",
        "name: Expected a value, got none",
        "payload: Expected `object`, got `array`",
        None,
    ]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("a", "expected a name"),
        ("a int,", "expected a name"),
        ("a foo", "there is no type foo"),
        ("a int not", "expected 'null'"),
        ("a int b", "expected ','"),
        ("a decimal(39)", "precision of 1 to 38"),
        ("a struct<b int", "expected ','"),
        ("a; drop", "expected a name, a type or a sign"),
        ("event_id string", "every projection has a column event_id"),
        ("a int, A int", "declared twice"),
        ("a int from b.c, b string", "has the field of another column"),
        ("b string, a int from b.c", "inside of a field"),
    ],
)
def test_declarations_that_are_refused(columns: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        rows(columns)


def test_a_file_declares_projections() -> None:
    orders, other = load(
        """
        projections:
          orders:
            topics: order.paid
            columns:
              order: bigint not null
              total: numeric(10,2)
              city: {type: string, path: customer.city}
              odd: {type: json, path: [a.b, "c-d"], required: true}
          other:
            stream: side
            topics: [a.*, "b.#"]
            bad: drop
            url: s3://lake/other
            columns: {n: int}
        """
    )
    assert (orders.name, orders.stream, orders.topics, orders.bad) == (
        "orders",
        "main",
        ["order.paid"],
        "rescue",
    )
    assert orders.columns == [
        Column("order", "bigint", required=True),
        Column("total", "decimal(10,2)"),
        Column("city", "string", ["customer", "city"]),
        Column("odd", "json", ["a.b", "c-d"], required=True),
    ]
    assert (other.stream, other.topics, other.bad, other.url) == (
        "side",
        ["a.*", "b.#"],
        "drop",
        "s3://lake/other",
    )
    for wrong in (
        "[",
        "a: 1",
        "projections: {a: {topics: x}}",
        "projections: {a: {topics: x, columns: {b: 1}}}",
    ):
        with pytest.raises(InvalidArgument):
            load(wrong)
