"""Publishes a Parquet file of past orders into a stream, once, however often it is run.

    python backfill.py --url postgresql:///app --parquet orders --generate --events 5000000
    python backfill.py --url postgresql:///app --parquet orders

With --generate it first writes the file. A write that names itself (`txnAppId`, `txnVersion`) takes place
once: after a crash run it again with the same version, for the next file raise it. The stream must be there:
`select pgmb.create_stream('orders')`.
"""

import argparse
import os
import time

from pyspark.sql import SparkSession
from pyspark.sql.functions import expr


def main() -> None:
    arguments = parse()
    spark = SparkSession.builder.appName("backfill").getOrCreate()
    if arguments.generate:
        generate(spark, arguments.parquet, arguments.events)
    # The columns topic and key are what they say; the others are fields of the payload.
    events = spark.read.parquet(arguments.parquet).select(
        expr("'order.' || state as topic"), expr("customer as key"), "order", "customer", "total", "placed_at"
    )
    began = time.monotonic()
    (
        events.write.format("pgmb")
        .mode("append")
        .option("url", arguments.url)
        .option("stream", arguments.stream)
        .option("commitMode", arguments.commit_mode)
        .option("txnAppId", "backfill-orders")
        .option("txnVersion", arguments.version)
        .save()
    )
    print(f"published in {time.monotonic() - began:.1f} s, or found published before")
    spark.stop()


def generate(spark: SparkSession, path: str, count: int) -> None:
    orders = spark.range(count).select(
        expr("id as order"),
        expr("id % 10000 as customer"),
        expr("cast(id % 100000 / 100 as decimal(12, 2)) as total"),
        expr("timestamp '2026-01-01 00:00:00' + make_dt_interval(0, 0, 0, id) as placed_at"),
        expr("if(id % 10 = 0, 'cancelled', 'paid') as state"),
    )
    orders.write.mode("overwrite").parquet(path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    dsn = os.environ.get("PGMB_DSN")
    parser.add_argument("--url", default=dsn, required=dsn is None, help="the database, else PGMB_DSN")
    parser.add_argument("--parquet", required=True, help="the file or directory with the orders")
    parser.add_argument("--stream", default="orders")
    parser.add_argument("--version", type=int, default=1, help="of this write: each takes place once")
    parser.add_argument("--commit-mode", default="staged", help="staged, or direct: a transaction a task")
    parser.add_argument("--generate", action="store_true", help="write the file first")
    parser.add_argument("--events", type=int, default=5_000_000, help="so many of them")
    return parser.parse_args()


if __name__ == "__main__":
    main()
