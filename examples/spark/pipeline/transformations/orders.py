"""Events of a stream as a table that grows, what is in them as another, and a view of sums by country."""

import os

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import from_json
from pyspark.sql.functions import sum as sum_of

ORDER = "order long, country string, total decimal(12, 2)"


def session() -> SparkSession:
    spark = SparkSession.getActiveSession()
    assert spark is not None
    return spark


@dp.table
def events() -> DataFrame:
    return (
        session()
        .readStream.format("pgmb")
        .option("url", os.environ["PGMB_DSN"])
        .option("subscribe", "order.paid")
        .option("startingOffsets", "earliest")
        .load()
    )


@dp.table
def orders() -> DataFrame:
    decoded = session().readStream.table("events").select("seq", from_json("payload", ORDER).alias("order"))
    return decoded.select("seq", "order.*")


@dp.materialized_view
def by_country() -> DataFrame:
    return session().read.table("orders").groupBy("country").agg(sum_of("total").alias("total"))
