"""What a scrape asks of the database, in one statement for each family of metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final, LiteralString, TypeVar

import msgspec
from psycopg import sql

SECTIONS: Final[dict[str, LiteralString]] = {
    "broker": """
select json_build_object('dead_letters', dead_letters, 'dispatchers', dispatchers,
  'workers', (select count(*) from pgmb.describe_workers() where alive),
  'maintained_age', extract(epoch from maintained_age))::text from pgmb.describe_broker()
""",
    "xmin_holders": """
select coalesce(json_agg(json_build_object(
  'kind', kind, 'count', count, 'age', extract(epoch from age), 'xids', xids)), '[]')::text
from (select kind, count(*) count, max(age) age, max(xids) xids from pgmb.xmin_holders group by kind) holders
""",
    "streams": """
select coalesce(json_agg(json_build_object(
  'stream', stream, 'segments', segments, 'unsealed', unsealed, 'unarchived', unarchived,
  'events', events, 'delayed', delayed, 'published_per_second', published_per_second,
  'last_tick_age', extract(epoch from last_tick_age), 'bytes', bytes)), '[]')::text
from pgmb.stream_status
""",
    "queues": """
select coalesce(json_agg(json_build_object(
  'queue', queue, 'stream', stream, 'paused', paused_at is not null, 'waiting', waiting,
  'oldest_age', extract(epoch from oldest_age), 'leases', leases, 'leased_events', leased_events,
  'retries', retries, 'dead', dead, 'received_per_second', received_per_second,
  'oldest_lease_age', extract(epoch from oldest_lease_age), 'behind', behind,
  'at_least', at_least, 'at_most', at_most)), '[]')::text
from pgmb.queue_status
""",
    "retention": """
select coalesce(json_agg(json_build_object(
  'stream', stream, 'kind', kind, 'holder', holder, 'segments', segments,
  'held_for', extract(epoch from held_for))), '[]')::text
from pgmb.describe_retention()
""",
    "lakes": """
select coalesce(json_agg(json_build_object(
  'stream', stream, 'waiting_for', extract(epoch from waiting_for), 'lag', extract(epoch from lag),
  'damaged', damaged)), '[]')::text
from pgmb.lake_health()
""",
    "readers": """
select coalesce(json_agg(json_build_object(
  'reader', reader, 'stream', stream, 'waiting', waiting, 'waiting_bytes', waiting_bytes,
  'lag', extract(epoch from lag), 'confirmed_age', extract(epoch from clock_timestamp() - confirmed_at),
  'held_for', extract(epoch from held_for), 'lost', lost)), '[]')::text
from pgmb.describe_readers(500)
""",
}
"""What a scrape asks: a statement for each family of metrics, the cheap ones first."""


class Budget:
    """The time of a scrape. A statement may take half of what is left, so that each of them has some."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = clock() + seconds

    def statement(self, query: LiteralString) -> sql.Composed:
        """A transaction with one statement. It leaves nothing behind on a connection that a pooler shares."""
        milliseconds = max(50, int((self._until - self._clock()) * 500))
        return sql.SQL("begin read only; set local statement_timeout = {}; {}; commit").format(
            sql.Literal(milliseconds), sql.SQL(query)
        )


class Queue(msgspec.Struct):
    queue: str
    stream: str
    paused: bool
    waiting: float
    oldest_age: float | None
    leases: float
    leased_events: float
    retries: float
    dead: float
    received_per_second: float | None
    oldest_lease_age: float | None
    behind: float
    at_least: list[str]
    at_most: list[str]


class Stream(msgspec.Struct):
    stream: str
    segments: float
    unsealed: float
    unarchived: float
    events: float
    delayed: float
    published_per_second: float | None
    last_tick_age: float | None
    bytes: float


class Reader(msgspec.Struct):
    reader: str
    stream: str
    waiting: float
    waiting_bytes: float
    lag: float | None
    confirmed_age: float
    held_for: float | None
    lost: bool


class RetentionHolder(msgspec.Struct):
    """A queue, reader or archive that keeps segments which are older than their stream keeps them."""

    stream: str
    kind: str
    holder: str
    segments: float
    held_for: float


class Lake(msgspec.Struct):
    """The archive of a stream."""

    stream: str
    waiting_for: float | None
    lag: float | None
    damaged: float


class BrokerStatus(msgspec.Struct):
    dead_letters: float
    dispatchers: float
    workers: float
    maintained_age: float | None


class XminHolders(msgspec.Struct):
    """Sessions, prepared transactions or replication slots that keep old row versions alive."""

    kind: str
    count: float
    age: float | None
    xids: float | None


class Snapshot(msgspec.Struct, kw_only=True):
    """What a scrape has found. None: it was not told in time."""

    queues: list[Queue] | None = None
    streams: list[Stream] | None = None
    readers: list[Reader] | None = None
    retention: list[RetentionHolder] | None = None
    lakes: list[Lake] | None = None
    broker: BrokerStatus | None = None
    xmin_holders: list[XminHolders] | None = None


AnyFound = TypeVar("AnyFound")


def decode(sections: Mapping[str, str], kind: type[AnyFound] = Snapshot) -> AnyFound:  # type: ignore[assignment]
    """What statements told, as one struct."""
    members = ",".join(f'"{name}":{text}' for name, text in sections.items())
    return msgspec.json.decode(f"{{{members}}}", type=kind)
