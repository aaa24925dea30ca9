"""Every type of Spark becomes the JSON that Spark's to_json makes of it, where that loses nothing."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import psycopg
from pyspark.sql import functions as f

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# SQL expressions: a column each, several rows.
SAME = {
    "tiny": ["1Y", "-128Y", "null"],
    "short": ["300S", "-32768S", "null"],
    "whole": ["7", "-2147483648", "null"],
    "long": ["9223372036854775807L", "-9223372036854775808L", "0L"],
    "real": ["cast(0.1 as float)", "cast('NaN' as float)", "cast('-Infinity' as float)"],
    "double": ["0.1D", "1e300D", "cast('Infinity' as double)"],
    "fraction": ["-0.0D", "123456789012345680.0D", "5e-324D"],
    "decimal": [
        "cast('12345678901234567890123456789.012345678' as decimal(38,9))",
        "null",
        "cast(0 as decimal(38,9))",
    ],
    "small_decimal": ["cast('0.0000000001' as decimal(20,10))", "cast('-1.5' as decimal(20,10))", "null"],
    "flag": ["true", "false", "null"],
    "text": [r"'plain'", "null", "''"],
    "odd_text": [r"'a\"b\\c\n\t\u0001'", "'𝄞 zoë 漢字 \u2028'", r"'\u0000'"],
    "day": ["date'2026-02-28'", "date'1582-10-04'", "null"],
    "moment": ["timestamp'2026-03-29 01:30:00.123'", "timestamp'1969-12-31 23:59:59'", "null"],
    "local": ["timestamp_ntz'2026-03-29 02:30:00.5'", "timestamp_ntz'1900-01-01 00:00:00'", "null"],
    "bytes": ["x'00ff10'", "x''", "null"],
    "span": ["interval '1 02:03:04.5' day to second", "interval '-3 00:00:00' day to second", "null"],
    "hours": ["interval '26:03' hour to minute", "interval '-0:01' hour to minute", "null"],
    "days": ["interval '400' day", "interval '-1' day", "null"],
    "seconds": ["interval '4.000001' second", "interval '75' second", "null"],
    "list": ["array(1, null, 3)", "array()", "null"],
    "nested": ["array(array('a', null), null)", "array(array())", "null"],
    "struct": [
        "named_struct('a', 1, 'b', cast(null as string), 'c\"d', named_struct('e', array(true)))",
        "named_struct('a', cast(null as int), 'b', 'x', 'c\"d', cast(null as struct<e:array<boolean>>))",
        "null",
    ],
    "map": ["map('a', 1, 'b\"', null)", "map()", "null"],
    "numbers_as_keys": ["map(1, 'x', -2, null)", "map()", "null"],
    "flags_as_keys": ["map(true, map('a', array(1.5D)))", "map(false, null)", "null"],
    "decimals_as_keys": ["map(cast('1.50' as decimal(5,2)), 1)", "map()", "null"],
    "variant": [
        'parse_json(\'{"a": [1, 2.5, null, "x", true], "b": {}}\')',
        "to_variant_object(array(1, 2))",
        "null",
    ],
    "nothing": ["null", "null", "null"],
}


def frame(spark: SparkSession, columns: dict[str, list[str]]) -> DataFrame:
    rows = zip(*columns.values(), strict=True)
    return spark.sql(
        " union all ".join(
            "select " + ", ".join(f"{value} as {name}" for name, value in zip(columns, row, strict=True))
            for row in rows
        )
    )


def parsed(text: str) -> Any:
    return json.loads(text, parse_float=Decimal, parse_int=Decimal)


def test_every_type_is_encoded_as_to_json_does(
    spark: SparkSession, dsn: str, db: psycopg.Connection[Any]
) -> None:
    rows = frame(spark, SAME).withColumn("row", f.monotonically_increasing_id())
    expected = [parsed(row[0]) for row in rows.select(f.to_json(f.struct("*"))).collect()]
    rows.write.format("pgmb").options(url=dsn, topic="t").mode("append").save()
    found = [parsed(row[0]) for row in db.execute("select payload::text from pgmb.log_main").fetchall()]
    by_row = {one["row"]: one for one in found}
    for row in expected:
        got = by_row.pop(row["row"])
        for name in SAME:
            assert (name in got) == (name in row), name
            if name == "fraction":
                assert float(got[name]) == float(row[name])
            else:
                assert got.get(name) == row.get(name), name
    assert not by_row
