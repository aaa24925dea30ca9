"""Filters that are pushed down mean the same in PostgreSQL as in Spark, or are not taken."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    In,
    IsNull,
    LessThanOrEqual,
    Not,
    StringEndsWith,
    StringStartsWith,
)
from pyspark.sql.types import StructType

from pgmb.spark.source.queries import condition
from pgmb.spark.source.readers import BatchReader

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        (EqualTo(("topic",), "a'b"), "e.topic = 'a''b'"),
        (In(("key",), ("a", "b")), "e.key in ('a', 'b')"),
        (Not(IsNull(("key",))), "not (e.key is null)"),
        (StringStartsWith(("topic",), "a."), "starts_with(e.topic, 'a.')"),
        (GreaterThan(("published_at",), NOON), "e.published_at > '2026-01-31 12:00:00+00:00'::timestamptz"),
        (LessThanOrEqual(("seq",), 5), "e.seq <= 5"),
    ],
)
def test_filters_become_conditions(asked: Filter, made: str) -> None:
    assert condition(asked) == made


@pytest.mark.parametrize(
    "asked",
    [
        # Text is ordered otherwise by a database's collation.
        GreaterThan(("topic",), "a"),
        EqualTo(("topic",), "a\0b"),
        EqualTo(("payload",), "1"),
        EqualTo(("payload", "n"), 1),
        EqualTo(("seq",), 2**63),
        EqualTo(("published_at",), NOON.replace(tzinfo=None)),
        StringEndsWith(("topic",), "a"),
        In(("key",), ("a", None)),
    ],
)
def test_the_rest_is_left_to_spark(asked: Filter) -> None:
    assert condition(asked) is None
    reader = BatchReader({"url": "host=nowhere"}, StructType().add("topic", "string"))
    assert list(reader.pushFilters([asked])) == [asked]
