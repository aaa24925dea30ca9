"""Counts orders by topic in windows of five minutes of their own time, as Parquet files.

    python windowed_counts.py --url postgresql:///app --to counts

An order says itself when it was placed, and may be published later. The watermark waits ten minutes for such:
a window is written once, when nothing that belongs to it is waited for any more. Run again, the program goes
on where it stopped.
"""

import argparse
import os

from pyspark.sql import SparkSession
from pyspark.sql.functions import count, from_json, window


def main() -> None:
    arguments = parse()
    spark = SparkSession.builder.appName("windowed counts").getOrCreate()
    events = (
        spark.readStream.format("pgmb")
        .option("url", arguments.url)
        .option("subscribe", "order.#")
        .option("startingOffsets", "earliest")
        .option("maxEventsPerTrigger", 100_000)
        .option("readerName", "windowed-counts")  # retention keeps what this query has not read
        .load()
    )
    counts = (
        events.select("topic", from_json("payload", "placed_at timestamp").placed_at.alias("placed_at"))
        .withWatermark("placed_at", "10 minutes")
        .groupBy(window("placed_at", "5 minutes"), "topic")
        .agg(count("*").alias("orders"))
    )
    writer = (
        counts.select("window.start", "window.end", "topic", "orders")
        .writeStream.format("parquet")
        .option("path", f"{arguments.to}/data")
        .option("checkpointLocation", f"{arguments.to}/checkpoint")
    )
    query = writer.start() if arguments.follow else writer.trigger(availableNow=True).start()
    query.awaitTermination()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    dsn = os.environ.get("PGMB_DSN")
    parser.add_argument("--url", default=dsn, required=dsn is None, help="the database, else PGMB_DSN")
    parser.add_argument("--to", required=True, help="a directory for the counts and the checkpoint")
    parser.add_argument("--follow", action="store_true", help="go on for ever, not to the end of the log")
    return parser.parse_args()


if __name__ == "__main__":
    main()
