"""Adds to orders of one stream what is known of their customers, and publishes them to another, exactly once.

    python enrich.py --url postgresql:///app --customers customers.csv --checkpoint checkpoint

The stream to publish to must be there: `select pgmb.create_stream('enriched')`. Kill this program at any
moment and start it again: every order is in the second stream once. What makes it so is the checkpoint, which
holds positions of the log, and the sink, which writes a batch and its number in one transaction. Keep the
checkpoint; a query that begins with a new one publishes everything anew.
"""

import argparse
import os

from pyspark.sql import SparkSession
from pyspark.sql.functions import broadcast, from_json, struct

ORDER = "order long, customer long, total decimal(12, 2)"
CUSTOMER = "customer long, name string, country string"


def main() -> None:
    arguments = parse()
    spark = SparkSession.builder.appName("enrich").getOrCreate()
    customers = spark.read.csv(arguments.customers, schema=CUSTOMER, header=True, escape='"')
    orders = (
        spark.readStream.format("pgmb")
        .option("url", arguments.url)
        .option("stream", "main")
        .option("subscribe", "order.paid")
        .option("startingOffsets", "earliest")
        .option("maxEventsPerTrigger", arguments.batch)
        .option("readerName", "enrich")
        .load()
        .select("key", from_json("payload", ORDER).alias("order"))
        .select("key", "order.*")
    )
    # The column key is the events' key. The others, as none is called payload, are fields of the payload.
    enriched = orders.join(broadcast(customers), "customer", "left").select(
        "key", "order", "total", struct("customer", "name", "country").alias("customer")
    )
    writer = (
        enriched.writeStream.format("pgmb")
        .option("url", arguments.url)
        .option("stream", "enriched")
        .option("topic", "order.enriched")
        .option("checkpointLocation", arguments.checkpoint)
    )
    query = writer.start() if arguments.follow else writer.trigger(availableNow=True).start()
    query.awaitTermination()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    dsn = os.environ.get("PGMB_DSN")
    parser.add_argument("--url", default=dsn, required=dsn is None, help="the database, else PGMB_DSN")
    parser.add_argument("--customers", required=True, help="a CSV file: customer, name, country")
    parser.add_argument("--checkpoint", required=True, help="a directory")
    parser.add_argument("--batch", type=int, default=50_000, help="events a micro-batch at most")
    parser.add_argument("--follow", action="store_true", help="go on for ever, not to the end of the log")
    return parser.parse_args()


if __name__ == "__main__":
    main()
