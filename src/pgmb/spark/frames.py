"""DataFrames of events: short ways to `format("pgmb")`, and payloads as columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, cast, get_args

from pyspark.sql import functions as fn
from pyspark.sql.types import StringType, StructField, StructType

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# What becomes of a payload that does not fit the schema: null where it differs, the same with the payload in
# the column `rescued`, an error, or a row left out.
Malformed = Literal["null", "rescue", "fail", "drop"]
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

    A payload that is no such struct becomes null where it differs; `malformed="rescue"` also adds a column
    `rescued` with the text of such a payload, `malformed="fail"` raises, `malformed="drop"` leaves it out.
    """
    if malformed not in get_args(Malformed):
        raise ValueError(f"malformed must be {', '.join(get_args(Malformed))}, got {malformed!r}")
    if isinstance(schema, str) and schema.strip().lower() == "variant":
        parsed = (fn.parse_json if malformed == "fail" else fn.try_parse_json)("payload")
        if malformed == "rescue":
            frame = frame.withColumn("rescued", fn.when(parsed.isNull(), fn.col("payload")))
        frame = frame.withColumn("payload", parsed)
        return frame.where("payload is not null") if malformed == "drop" else frame
    if malformed == "null":
        return frame.withColumn("payload", fn.from_json("payload", schema))
    if malformed == "fail":
        return frame.withColumn("payload", fn.from_json("payload", schema, {"mode": "FAILFAST"}))
    fields = StructType.fromDDL(schema) if isinstance(schema, str) else schema
    marked = StructType([*cast("StructType", fields), StructField(_WHOLE, StringType())])
    column = fn.from_json("payload", marked, {"columnNameOfCorruptRecord": _WHOLE})
    whole = fn.col("payload")[_WHOLE]
    if malformed == "rescue":
        # JSON null is parsed to nothing, and is no struct either.
        nothing = fn.when(column.isNull(), fn.col("payload"))
        frame = frame.withColumn("rescued", nothing).withColumn("payload", column)
        frame = frame.withColumn("rescued", fn.coalesce(whole, fn.col("rescued")))
    else:
        frame = frame.withColumn("payload", column).where(whole.isNull())
    return frame.withColumn("payload", fn.col("payload").dropFields(_WHOLE))


def _options(url: str | list[str], stream: str, given: dict[str, Any]) -> dict[str, str]:
    options = {
        name: str(value).lower() if isinstance(value, bool) else value for name, value in given.items()
    }
    return {**options, "url": url if isinstance(url, str) else "\n".join(url), "stream": stream}
