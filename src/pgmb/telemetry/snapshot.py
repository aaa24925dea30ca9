"""What a scrape asks of the database, in one statement whatever the number of queues."""

from __future__ import annotations

from typing import Final

import msgspec

QUERY: Final = """
select json_build_object(
  'queues', coalesce((select json_agg(json_build_object(
    'queue', queue, 'stream', stream, 'paused', paused_at is not null, 'waiting', waiting,
    'oldest_age', extract(epoch from oldest_age), 'leases', leases, 'leased_events', leased_events,
    'retries', retries, 'dead', dead, 'received_per_second', received_per_second,
    'oldest_lease_age', extract(epoch from oldest_lease_age), 'behind', behind,
    'at_least', at_least, 'at_most', at_most))
    from pgmb.queue_status), '[]'),
  'streams', coalesce((select json_agg(json_build_object(
    'stream', stream, 'segments', segments, 'unsealed', unsealed, 'unarchived', unarchived,
    'events', events, 'delayed', delayed, 'published_per_second', published_per_second,
    'last_tick_age', extract(epoch from last_tick_age), 'bytes', bytes))
    from pgmb.stream_status), '[]'),
  'readers', coalesce((select json_agg(json_build_object(
    'reader', reader, 'stream', stream, 'waiting', waiting, 'waiting_bytes', waiting_bytes,
    'lag', extract(epoch from lag), 'confirmed_age', extract(epoch from clock_timestamp() - confirmed_at),
    'held_for', extract(epoch from held_for), 'lost', lost))
    from pgmb.reader_status), '[]'),
  'retention', coalesce((select json_agg(json_build_object(
    'stream', stream, 'kind', kind, 'holder', holder, 'segments', segments,
    'held_for', extract(epoch from held_for)))
    from pgmb.describe_retention()), '[]'),
  'broker', (select json_build_object('dead_letters', dead_letters, 'dispatchers', dispatchers,
    'workers', (select count(*) from pgmb.describe_workers() where alive),
    'maintained_age', extract(epoch from maintained_age)) from pgmb.describe_broker()),
  'xmin_holders', coalesce((select json_agg(json_build_object(
    'kind', kind, 'count', count, 'age', extract(epoch from age), 'xids', xids))
    from (select kind, count(*) count, max(age) age, max(xids) xids
      from pgmb.xmin_holders group by kind) holders), '[]'))::text
"""


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


class Snapshot(msgspec.Struct):
    queues: list[Queue]
    streams: list[Stream]
    readers: list[Reader]
    retention: list[RetentionHolder]
    broker: BrokerStatus
    xmin_holders: list[XminHolders]


decode = msgspec.json.Decoder(Snapshot).decode
