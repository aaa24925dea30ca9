"""Puts the clicks of each visitor together into sessions, which end after half an hour of silence.

    python sessions.py --url postgresql:///app --to sessions

The visitor is the events' key, the time is in the payload, and clicks may come out of order. What is not over
yet is kept in Spark's state, and goes on with the next run. Needs `pip install protobuf`.
"""

import argparse
import os
from collections.abc import Iterator
from typing import Any

from pyspark.sql import Row, SparkSession
from pyspark.sql.functions import from_json, timestamp_millis, unix_millis
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

SILENCE = 30 * 60 * 1000
"""Milliseconds after which a session is over."""

Session = tuple[int, int, int]
"""First click, last click (both in milliseconds), number of clicks."""


class Sessions(StatefulProcessor):
    """The sessions of a visitor that may still grow."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.open = handle.getListState("open", "first long, last long, clicks long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        sessions = merged([*self.open.get(), *((row.millis, row.millis, 1) for row in rows)])
        self.open.put(sessions)
        for _, last, _ in sessions:
            self.handle.registerTimer(last + SILENCE)
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        now = expiredTimerInfo.getExpiryTimeInMs()
        sessions = list(self.open.get())
        self.open.clear()
        for first, last, clicks in sessions:
            if last + SILENCE > now:
                self.open.appendValue((first, last, clicks))
            else:
                yield Row(visitor=key[0], first=first, last=last, clicks=clicks)


def merged(sessions: list[Session]) -> list[Session]:
    """Those that are less than the silence apart made one."""
    result: list[Session] = []
    for first, last, clicks in sorted(sessions):
        if result and first < result[-1][1] + SILENCE:
            before = result.pop()
            result.append((before[0], max(before[1], last), before[2] + clicks))
        else:
            result.append((first, last, clicks))
    return result


def main() -> None:
    arguments = parse()
    spark = SparkSession.builder.appName("sessions").getOrCreate()
    spark.conf.set(
        "spark.sql.streaming.stateStore.providerClass",
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    )
    clicks = (
        spark.readStream.format("pgmb")
        .option("url", arguments.url)
        .option("subscribe", "page.viewed")
        .option("startingOffsets", "earliest")
        .option("maxEventsPerTrigger", 100_000)
        .option("readerName", "sessions")
        .load()
        .select("key", from_json("payload", "at timestamp").at.alias("at"))
        .withWatermark("at", "10 minutes")
        .withColumn("millis", unix_millis("at"))
    )
    sessions = clicks.groupBy("key").transformWithState(
        statefulProcessor=Sessions(),
        outputStructType="visitor string, first long, last long, clicks long",
        outputMode="Append",
        timeMode="EventTime",
    )
    writer = (
        sessions.withColumns({name: timestamp_millis(name) for name in ("first", "last")})
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
    parser.add_argument("--to", required=True, help="a directory for the sessions and the checkpoint")
    parser.add_argument("--follow", action="store_true", help="go on for ever, not to the end of the log")
    return parser.parse_args()


if __name__ == "__main__":
    main()
