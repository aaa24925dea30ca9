"""What a reader may be asked for, by Spark's and Kafka's habits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

import msgspec

from pgmb.spark.given import Given

KNOWN: Final = (
    "url",
    "readUrl",
    "stream",
    "path",
    "subscribe",
    "subscribePattern",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "maxEventsPerTrigger",
    "maxBytesPerTrigger",
    "minEventsPerTrigger",
    "maxTriggerDelay",
    "minPartitions",
    "maxRecordsPerPartition",
    "failOnDataLoss",
    "readerName",
    "replicaTimeout",
)


class ReadOptions(msgspec.Struct, frozen=True):
    """The options of a read, checked.

    urls           one a shard, where positions are taken: primaries
    read_urls      one a shard, where events are read: the same, or replicas
    subscribe      topic patterns; subscribe_pattern is a regular expression, by PostgreSQL's rules
    starting       earliest, latest, or offsets as JSON
    since, until   microseconds: only events published at or after, before
    """

    urls: list[str]
    read_urls: list[str]
    stream: str = "main"
    subscribe: list[str] = []
    subscribe_pattern: str | None = None
    starting: str = "earliest"
    ending: str = "latest"
    since: int | None = None
    until: int | None = None
    max_events: int | None = None
    max_bytes: int | None = None
    min_events: int = 0
    max_delay: float = 900.0
    min_partitions: int = 1
    partition_events: int = 500_000
    fail_on_data_loss: bool = True
    reader: str | None = None
    replica_timeout: float = 60.0

    @classmethod
    def of(cls, options: Mapping[str, str], streaming: bool) -> ReadOptions:
        given = Given(options, KNOWN)
        urls = _urls(given, "url")
        if not urls:
            raise ValueError('reading from pgmb needs .option("url", "postgresql://…")')
        read_urls = _urls(given, "readUrl") or urls
        if len(read_urls) != len(urls):
            raise ValueError(f"readUrl names {len(read_urls)} databases, url {len(urls)}: one for each")
        if "startingTimestamp" in given and "startingOffsets" in given:
            raise ValueError("startingTimestamp or startingOffsets, not both")
        if streaming:
            for name in ("endingOffsets", "endingTimestamp"):
                if name in given:
                    raise ValueError(f"{name} is for batch reads: a stream does not end")
        return cls(
            urls=urls,
            read_urls=read_urls,
            stream=given.text("stream") or given.text("path") or "main",
            subscribe=[
                asked.strip() for asked in (given.text("subscribe") or "").split(",") if asked.strip()
            ],
            subscribe_pattern=given.text("subscribePattern"),
            starting=(given.text("startingOffsets") or ("latest" if streaming else "earliest")).strip(),
            ending=(given.text("endingOffsets") or "latest").strip(),
            since=given.moment("startingTimestamp"),
            until=given.moment("endingTimestamp"),
            max_events=given.count("maxEventsPerTrigger"),
            max_bytes=given.count("maxBytesPerTrigger"),
            min_events=given.count("minEventsPerTrigger") or 0,
            max_delay=given.duration("maxTriggerDelay", 900.0),
            min_partitions=given.count("minPartitions") or 1,
            partition_events=given.count("maxRecordsPerPartition") or 500_000,
            fail_on_data_loss=given.truth("failOnDataLoss", True),
            reader=given.text("readerName"),
            replica_timeout=given.duration("replicaTimeout", 60.0),
        )


def _urls(given: Given, name: str) -> list[str]:
    """One connection string, or several as a JSON array or one a line: both forms of libpq hold commas."""
    text = (given.text(name) or "").strip()
    if text.startswith("["):
        try:
            return msgspec.json.decode(text, type=list[str])
        except msgspec.DecodeError as error:
            raise ValueError(f"{name} is not a JSON array of connection strings: {error}") from None
    return [line.strip() for line in text.splitlines() if line.strip()]


def offsets_given(text: str) -> dict[str, object] | None:
    """startingOffsets and endingOffsets as JSON; None for a word such as earliest."""
    if not text.startswith("{"):
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"offsets are earliest, latest or JSON: {error}") from None
    return dict(found)
