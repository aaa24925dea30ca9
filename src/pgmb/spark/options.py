"""What a reader may be asked for, by Spark's and Kafka's habits."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

import msgspec

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
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


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
    def of(cls, given: Mapping[str, str], streaming: bool) -> ReadOptions:
        options = {name.lower(): value for name, value in given.items()}
        _refuse_unknown(options)
        urls = _urls(options, "url")
        if not urls:
            raise ValueError('reading from pgmb needs .option("url", "postgresql://…")')
        read_urls = _urls(options, "readUrl") or urls
        if len(read_urls) != len(urls):
            raise ValueError(
                f"readUrl names {len(read_urls)} databases, url {len(urls)}: one for each, in order"
            )
        if "startingtimestamp" in options and "startingoffsets" in options:
            raise ValueError("startingTimestamp or startingOffsets, not both")
        if streaming:
            for name in ("endingOffsets", "endingTimestamp"):
                if name.lower() in options:
                    raise ValueError(f"{name} is for batch reads: a stream does not end")
        return cls(
            urls=urls,
            read_urls=read_urls,
            stream=options.get("stream") or options.get("path") or "main",
            subscribe=[
                pattern.strip() for pattern in options.get("subscribe", "").split(",") if pattern.strip()
            ],
            subscribe_pattern=options.get("subscribepattern"),
            starting=options.get("startingoffsets", "latest" if streaming else "earliest").strip(),
            ending=options.get("endingoffsets", "latest").strip(),
            since=_moment(options, "startingTimestamp"),
            until=_moment(options, "endingTimestamp"),
            max_events=_count(options, "maxEventsPerTrigger"),
            max_bytes=_count(options, "maxBytesPerTrigger"),
            min_events=_count(options, "minEventsPerTrigger") or 0,
            max_delay=_duration(options, "maxTriggerDelay", 900.0),
            min_partitions=_count(options, "minPartitions") or 1,
            partition_events=_count(options, "maxRecordsPerPartition") or 500_000,
            fail_on_data_loss=_truth(options, "failOnDataLoss", True),
            reader=options.get("readername"),
            replica_timeout=_duration(options, "replicaTimeout", 60.0),
        )


def _refuse_unknown(options: Mapping[str, str]) -> None:
    known = {name.lower(): name for name in KNOWN}
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f": did you mean {known[near[0]]}?" if near else f"; there are {', '.join(KNOWN)}"
            raise ValueError(f"pgmb does not know the option {name}{hint}")


def _urls(options: Mapping[str, str], name: str) -> list[str]:
    """One connection string, or several as a JSON array or one a line: both forms of libpq hold commas."""
    text = options.get(name.lower(), "").strip()
    if text.startswith("["):
        try:
            return msgspec.json.decode(text, type=list[str])
        except msgspec.DecodeError as error:
            raise ValueError(f"{name} is not a JSON array of connection strings: {error}") from None
    return [line.strip() for line in text.splitlines() if line.strip()]


def _count(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name.lower())
    if text is None:
        return None
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError(f"{name} is a number above 0, not {text!r}")
    return int(text)


def _truth(options: Mapping[str, str], name: str, default: bool) -> bool:
    text = options.get(name.lower(), str(default)).strip().lower()
    if text not in ("true", "false"):
        raise ValueError(f"{name} is true or false, not {text!r}")
    return text == "true"


def _duration(options: Mapping[str, str], name: str, default: float) -> float:
    """Seconds, from 15m, 30s, 500ms."""
    text = options.get(name.lower())
    if text is None:
        return default
    number = text.strip().rstrip("hms")
    unit = text.strip()[len(number) :]
    try:
        return float(number) * _UNITS[unit]
    except (KeyError, ValueError):
        raise ValueError(f"{name} is a time such as 15m, 30s or 500ms, not {text!r}") from None


def _moment(options: Mapping[str, str], name: str) -> int | None:
    """Microseconds since 1970, from ISO 8601 (UTC unless it says otherwise) or Kafka's milliseconds."""
    text = options.get(name.lower())
    if text is None:
        return None
    if text.strip().isdecimal():
        return int(text) * 1000
    try:
        at = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(f"{name} is a time such as 2026-01-31T10:00:00Z, not {text!r}") from None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    seconds = int(at.replace(microsecond=0).timestamp())
    return seconds * 1_000_000 + at.microsecond


def offsets_given(text: str) -> dict[str, object] | None:
    """startingOffsets and endingOffsets as JSON; None for a word such as earliest."""
    if not text.startswith("{"):
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"offsets are earliest, latest or JSON: {error}") from None
    return dict(found)
