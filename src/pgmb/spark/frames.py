"""DataFrames of events: short ways to `format("pgmb")`, and payloads as columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, cast

from pyspark.sql import functions as fn
from pyspark.sql.types import StringType, StructField, StructType

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# What becomes of a payload that does not fit the schema: null where it differs, an error, or a row left out.
Malformed = Literal["null", "fail", "drop"]
# A column that a payload's field cannot have.
_WHOLE: Final = "__payload"


def read(
    spark: SparkSession,
    url: str | list[str],
    stream: str = "main",
    *,
    schema: StructType | str | None = None,
    malformed: Malformed = "null",
    **options: Any,
) -> DataFrame:
    """The events of a stream, or of several databases' streams of that name, as a table.

    `schema` decodes payloads as `decode` does. Other options are those of the format.
    """
    frame = spark.read.format("pgmb").options(**_options(url, stream, options)).load()
    return frame if schema is None else decode(frame, schema, malformed=malformed)


def read_stream(
    spark: SparkSession,
    url: str | list[str],
    stream: str = "main",
    *,
    schema: StructType | str | None = None,
    malformed: Malformed = "null",
    **options: Any,
) -> DataFrame:
    """The same as they come: from now on, unless startingOffsets or startingTimestamp say otherwise."""
    frame = spark.readStream.format("pgmb").options(**_options(url, stream, options)).load()
    return frame if schema is None else decode(frame, schema, malformed=malformed)


def decode(frame: DataFrame, schema: StructType | str, *, malformed: Malformed = "null") -> DataFrame:
    """Parse payloads: to a struct of that schema, or with "variant" to whatever each of them holds.

    A payload that is no such struct becomes null where it differs; `malformed="fail"` raises instead, and
    `malformed="drop"` leaves it out.
    """
    if isinstance(schema, str) and schema.strip().lower() == "variant":
        parse = fn.parse_json if malformed == "fail" else fn.try_parse_json
        parsed = frame.withColumn("payload", parse("payload"))
        return parsed.where("payload is not null") if malformed == "drop" else parsed
    if malformed == "null":
        return frame.withColumn("payload", fn.from_json("payload", schema))
    if malformed == "fail":
        return frame.withColumn("payload", fn.from_json("payload", schema, {"mode": "FAILFAST"}))
    fields = StructType.fromDDL(schema) if isinstance(schema, str) else schema
    marked = StructType([*cast("StructType", fields), StructField(_WHOLE, StringType())])
    column = fn.from_json("payload", marked, {"columnNameOfCorruptRecord": _WHOLE})
    kept = frame.withColumn("payload", column).where(fn.col("payload")[_WHOLE].isNull())
    return kept.withColumn("payload", fn.col("payload").dropFields(_WHOLE))


def _options(url: str | list[str], stream: str, given: dict[str, Any]) -> dict[str, str]:
    options = {
        name: str(value).lower() if isinstance(value, bool) else value for name, value in given.items()
    }
    return {**options, "url": url if isinstance(url, str) else "\n".join(url), "stream": stream}
