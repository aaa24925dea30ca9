"""Options of reads and writes: parsed, checked, and with their defaults."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Final, Literal, TypeAlias, cast

import msgspec

RECONNECT_SECONDS: Final = 30.0
"""How long the driver and tasks wait for a database that is away."""

_UNIT_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class SparkOptions:
    """The options of a read or a write, case-insensitive. Unknown ones are refused: they may be typos."""

    def __init__(
        self, options: Mapping[str, str], known: Iterable[str], of_spark: Iterable[str] = ()
    ) -> None:
        self._options = {name.lower(): value for name, value in options.items()}
        names = {name.lower(): name for name in known}
        for name in self._options:
            if name not in names and name not in of_spark:
                near = difflib.get_close_matches(name, names, 1)
                hint = (
                    f": did you mean {names[near[0]]}?"
                    if near
                    else f"; there are {', '.join(names.values())}"
                )
                raise ValueError(f"unknown option {name}{hint}")

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._options

    def text(self, name: str) -> str | None:
        return self._options.get(name.lower())

    def count(self, name: str) -> int | None:
        """A number of at least 1."""
        text = self.text(name)
        if text is not None and (not text.strip().isdecimal() or int(text) < 1):
            raise ValueError(f"{name} must be a number above 0, got {text!r}")
        return None if text is None else int(text)

    def truth(self, name: str, default: bool) -> bool:
        return self.one_of(name, *(("true", "false") if default else ("false", "true"))) == "true"

    def one_of(self, name: str, *allowed: str) -> str:
        """One of the allowed values; the first is the default."""
        value = (self.text(name) or allowed[0]).strip().lower()
        if value not in allowed:
            raise ValueError(f"{name} must be {' or '.join(allowed)}, got {value!r}")
        return value

    def duration(self, name: str, default: float) -> float:
        """Seconds, from texts such as 15m, 30s or 500ms."""
        text = self.text(name)
        if text is None:
            return default
        number = text.strip().rstrip("hms")
        try:
            return float(number) * _UNIT_SECONDS[text.strip()[len(number) :]]
        except (KeyError, ValueError):
            raise ValueError(f"{name} must be a duration such as 15m, 30s or 500ms, got {text!r}") from None

    def moment(self, name: str) -> int | None:
        """Microseconds since 1970, from ISO 8601 (UTC without a time zone) or Kafka's milliseconds."""
        text = self.text(name)
        if text is None:
            return None
        if text.strip().isdecimal():
            return int(text) * 1000
        try:
            at = datetime.fromisoformat(text.strip())
        except ValueError:
            raise ValueError(f"{name} must be a time such as 2026-01-31T10:00:00Z, got {text!r}") from None
        at = at if at.tzinfo else at.replace(tzinfo=UTC)
        return int(at.replace(microsecond=0).timestamp()) * 1_000_000 + at.microsecond


READ_OPTIONS: Final = (
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
    "maxBytesPerPartition",
    "failOnDataLoss",
    "readerName",
    "replicaTimeout",
    "tier",
    "lakeOptions",
    "projection",
)


_PARTITION_BYTES: Final = 128 << 20


class ReadOptions(msgspec.Struct, frozen=True):
    """The checked options of a read.

    urls           one per shard, to take positions from: primaries
    read_urls      one per shard, to read events from: the same, or replicas
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
    partition_bytes: int = _PARTITION_BYTES
    fail_on_data_loss: bool = True
    reader: str | None = None
    replica_timeout: float = 60.0
    read_lake: bool = True
    lake_options: dict[str, str] = {}

    @classmethod
    def of(cls, options: Mapping[str, str], streaming: bool) -> ReadOptions:
        given = SparkOptions(options, READ_OPTIONS)
        if "projection" in given:
            raise ValueError("a projection is read as a batch only: use spark.read")
        urls = _urls(given, "url")
        if not urls:
            raise ValueError('reading from pgmb needs .option("url", "postgresql://…"), or PGMB_DSN')
        read_urls = _urls(given, "readUrl") or urls
        if len(read_urls) != len(urls):
            raise ValueError(f"readUrl names {len(read_urls)} databases, url {len(urls)}: one for each")
        if "startingTimestamp" in given and "startingOffsets" in given:
            raise ValueError("set startingTimestamp or startingOffsets, not both")
        if streaming:
            for name in ("endingOffsets", "endingTimestamp"):
                if name in given:
                    raise ValueError(f"{name} is for batch reads only")
        ending = (given.text("endingOffsets") or "latest").strip()
        if ending != "latest" and offsets_given(ending) is None:
            raise ValueError(f"endingOffsets must be latest or JSON, got {ending!r}")
        return cls(
            urls=urls,
            read_urls=read_urls,
            stream=given.text("stream") or given.text("path") or "main",
            subscribe=[
                asked.strip() for asked in (given.text("subscribe") or "").split(",") if asked.strip()
            ],
            subscribe_pattern=given.text("subscribePattern"),
            starting=(given.text("startingOffsets") or ("latest" if streaming else "earliest")).strip(),
            ending=ending,
            since=given.moment("startingTimestamp"),
            until=given.moment("endingTimestamp"),
            max_events=given.count("maxEventsPerTrigger"),
            max_bytes=given.count("maxBytesPerTrigger"),
            min_events=given.count("minEventsPerTrigger") or 0,
            max_delay=given.duration("maxTriggerDelay", 900.0),
            min_partitions=given.count("minPartitions") or 1,
            partition_events=given.count("maxRecordsPerPartition") or 500_000,
            partition_bytes=given.count("maxBytesPerPartition") or _PARTITION_BYTES,
            fail_on_data_loss=given.truth("failOnDataLoss", True),
            reader=given.text("readerName"),
            replica_timeout=given.duration("replicaTimeout", 60.0),
            read_lake=given.one_of("tier", "auto", "log") == "auto",
            lake_options=lake_options(given),
        )


def lake_options(given: SparkOptions) -> dict[str, str]:
    """The options of the lake's storage, a JSON object."""
    try:
        return msgspec.json.decode(given.text("lakeOptions") or "{}", type=dict[str, str])
    except msgspec.DecodeError as error:
        raise ValueError(f"lakeOptions is not a JSON object of strings: {error}") from None


def _urls(given: SparkOptions, name: str) -> list[str]:
    """Connection strings: one, a JSON array, or one per line. libpq uses commas within them."""
    text = (given.text(name) or (_default_url() if name == "url" else "")).strip()
    if text.startswith("["):
        try:
            return msgspec.json.decode(text, type=list[str])
        except msgspec.DecodeError as error:
            raise ValueError(f"{name} is not a JSON array of connection strings: {error}") from None
    return [line.strip() for line in text.splitlines() if line.strip()]


def _default_url() -> str:
    """As for the client: queries in SQL need no connection string in their text."""
    return os.environ.get("PGMB_DSN", "")


def offsets_given(text: str) -> dict[str, object] | None:
    """startingOffsets or endingOffsets as JSON; None for a word such as `earliest`."""
    if not text.startswith("{"):
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"offsets must be earliest, latest or JSON: {error}") from None
    return dict(found)


Mode: TypeAlias = Literal["staged", "direct", "at-least-once"]

COLUMNS: Final = ("topic", "key", "payload", "headers", "id", "at")
"""The parts of an event, and their default column names. Options such as keyColumn change them."""

WRITE_OPTIONS: Final = (
    "url",
    "stream",
    "path",
    "topic",
    "key",
    *(f"{name}Column" for name in COLUMNS),
    "deliveryGuarantee",
    "commitMode",
    "repeatedBatches",
    "txnAppId",
    "txnVersion",
)

_SPARK_OWN_OPTIONS: Final = ("checkpointlocation", "queryname")
"""Options of Spark itself that it passes on."""


class WriteOptions(msgspec.Struct, frozen=True):
    """The checked options of a write.

    topic, key   of events whose column is NULL or missing
    columns      the column name of each of COLUMNS; "" for none
    mode         exactly once in one transaction (staged) or one per task (direct), or at-least-once
    app, version an application publishes each version once
    compares     a version that comes again must hold what was published
    """

    url: str
    stream: str = "main"
    topic: str | None = None
    key: str | None = None
    columns: dict[str, str] = {}
    mode: Mode = "staged"
    app: str | None = None
    version: int | None = None
    compares: bool = True

    @classmethod
    def of(cls, options: Mapping[str, str], streaming: bool) -> WriteOptions:
        given = SparkOptions(options, WRITE_OPTIONS, _SPARK_OWN_OPTIONS)
        url = (given.text("url") or _default_url()).strip()
        if not url or url.startswith("[") or "\n" in url:
            raise ValueError('writing to pgmb needs .option("url", "postgresql://…"), one database')
        guarantee = given.one_of("deliveryGuarantee", "exactly-once", "at-least-once")
        committed = given.one_of("commitMode", "staged", "direct")
        if guarantee == "at-least-once" and "commitMode" in given:
            raise ValueError("commitMode cannot be combined with deliveryGuarantee=at-least-once")
        repeated = given.one_of("repeatedBatches", "compare", "skip")
        if repeated == "skip" and (committed == "direct" or guarantee == "at-least-once"):
            raise ValueError("repeatedBatches=skip needs exactly-once writes with commitMode=staged")
        app, version = given.text("txnAppId"), _version(given.text("txnVersion"))
        if app is not None and not 0 < len(app) <= 500:
            raise ValueError("txnAppId must have 1 to 500 characters")
        if streaming and version is not None:
            raise ValueError("txnVersion is for batch writes only; a streaming write uses its batch number")
        if not streaming and (app is None) != (version is None):
            raise ValueError("txnAppId and txnVersion must be set together")
        named = {name: given.text(f"{name}Column") for name in COLUMNS}
        return cls(
            url=url,
            stream=given.text("stream") or given.text("path") or "main",
            topic=given.text("topic"),
            key=given.text("key"),
            columns={name: name if column is None else column for name, column in named.items()},
            mode=cast("Mode", committed if guarantee == "exactly-once" else guarantee),
            app=app,
            version=version,
            compares=repeated == "compare",
        )


def _version(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.strip().isdecimal() or int(text) >= 2**63:
        raise ValueError(f"txnVersion must be a number of at least 0, got {text!r}")
    return int(text)
