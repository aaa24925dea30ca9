"""Hourly revenue by country out of a stream of orders, corrected by late orders, with alerts, exactly once.

    python revenue.py --url postgresql:///app --checkpoint revenue

Reads `order.paid` from the first event on, from the lake where the log has dropped it. An order counts for
the hour in which it was placed, even if it is published up to a week late. Whenever the sum of an hour
changes, this program publishes to the stream `revenue`, which must be there (`pgmb streams create revenue`):

    revenue.hour        {"hour": …, "country": …, "revenue": …, "orders": …}   the new sum, whole
    revenue.low         the same, for an hour that is over and has less than half of the country's median
    revenue.recovered   the same, for an hour that was low and, with late orders, is not any more

Kill this program at any moment and start it again: every change is published once.
"""

import argparse
import os
from datetime import UTC, datetime, timedelta

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as f

ORDER = "country string, total decimal(12, 2), placed_at timestamp"
RESULT = "hour timestamp, country string, revenue decimal(14, 2), orders long"
LATE = timedelta(days=7)


def main() -> None:
    arguments = parse()
    spark = (
        SparkSession.builder.appName("revenue")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", 4)  # of the state, for as long as the checkpoint lives
        .getOrCreate()
    )
    orders = (
        spark.readStream.format("pgmb")
        .option("url", arguments.url)
        .option("subscribe", "order.paid")
        .option("startingOffsets", "earliest")
        .option("maxEventsPerTrigger", arguments.batch)
        .option("readerName", "revenue")  # without a lake, retention keeps what this query has not read
        .load()
        .select(f.from_json("payload", ORDER).alias("order"))
        .select("order.*")
    )
    sums = (
        orders.withWatermark("placed_at", f"{LATE.days} days")
        .groupBy(f.window("placed_at", "1 hour").alias("window"), "country")
        .agg(f.sum("total").cast("decimal(14, 2)").alias("revenue"), f.count("*").alias("orders"))
        .select(f.col("window.start").alias("hour"), "country", "revenue", "orders")
    )

    def publish(changed: DataFrame, batch: int) -> None:
        changed = changed.persist()
        messages = message("revenue.hour", changed).unionByName(
            alerts(changed, published(spark, arguments.url), arguments.hours)
        )
        (
            messages.coalesce(1)
            .write.format("pgmb")
            .option("url", arguments.url)
            .option("stream", "revenue")
            # The batch and its number are committed together: a batch that is repeated publishes nothing.
            .option("txnAppId", "revenue")
            .option("txnVersion", batch)
            .mode("append")
            .save()
        )
        changed.unpersist()

    # Update: each batch has the sums that it changed.
    writer = sums.writeStream.outputMode("update").foreachBatch(publish)
    writer = writer.option("checkpointLocation", arguments.checkpoint)
    query = writer.start() if arguments.follow else writer.trigger(availableNow=True).start()
    query.awaitTermination()


def published(spark: SparkSession, url: str) -> DataFrame:
    """What this program has published lately: the last message of each kind for an hour and country."""
    since = datetime.now(UTC) - 2 * LATE
    read = spark.read.format("pgmb").option("url", url).option("stream", "revenue")
    results = (
        read.option("startingTimestamp", since.isoformat())
        .load()
        .select("seq", "topic", f.from_json("payload", RESULT).alias("result"))
        .select("seq", f.when(f.col("topic") != "revenue.hour", f.col("topic")).alias("alert"), "result.*")
    )
    newest = Window.partitionBy("hour", "country", f.col("alert").isNull()).orderBy(f.desc("seq"))
    return results.withColumn("place", f.row_number().over(newest)).where("place = 1").drop("place", "seq")


def alerts(changed: DataFrame, before: DataFrame, hours: int) -> DataFrame:
    """Messages on hours that became low, or are not low any more."""
    kept = before.where("alert is null").drop("alert").join(changed, ["hour", "country"], "left_anti")
    known = kept.unionByName(changed)
    country = Window.partitionBy("country")
    judged = (
        known.withColumn("usual", f.expr("percentile_approx(revenue, 0.5)").over(country))
        .withColumn("hours", f.count("*").over(country))
        .withColumn("newest", f.max("hour").over(country))
        # An hour is over when the country has a later one.
        .where((f.col("hour") < f.col("newest")) & (f.col("hours") >= hours))
        .withColumn("low", f.col("revenue") < f.col("usual") / 2)
    )
    told = before.where("alert is not null").select("hour", "country", f.col("alert") == "revenue.low")
    told = told.toDF("hour", "country", "was_low")
    news = judged.join(told, ["hour", "country"], "left").withColumn(
        "was_low", f.coalesce("was_low", f.lit(False))
    )
    columns = ["hour", "country", "revenue", "orders"]
    return message("revenue.low", news.where("low and not was_low").select(columns)).unionByName(
        message("revenue.recovered", news.where("not low and was_low").select(columns))
    )


def message(topic: str, results: DataFrame) -> DataFrame:
    """Results as events, ordered by country for consumers of an ordered queue."""
    payload = f.to_json(f.struct("hour", "country", "revenue", "orders"))
    return results.select(
        f.lit(topic).alias("topic"), f.col("country").alias("key"), payload.alias("payload")
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    dsn = os.environ.get("PGMB_DSN")
    parser.add_argument("--url", default=dsn, required=dsn is None, help="the database, else PGMB_DSN")
    parser.add_argument("--checkpoint", required=True, help="a directory")
    parser.add_argument("--hours", type=int, default=24, help="a country needs so many hours to be judged")
    parser.add_argument("--batch", type=int, default=500_000, help="events per micro-batch at most")
    parser.add_argument("--follow", action="store_true", help="run as a service, not to the end of the log")
    return parser.parse_args()


if __name__ == "__main__":
    main()
