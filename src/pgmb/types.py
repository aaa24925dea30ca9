"""What travels between the client and the log: events, positions, dead letters. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, Self, TypeAlias
from uuid import UUID

import msgspec
from msgspec.structs import force_setattr

Duration: TypeAlias = timedelta | float | str
"""A timedelta, seconds, or text such as "15 minutes", "5m" or "1h30m"."""

WhenFull: TypeAlias = Literal["refuse", "drop_oldest"]
"""What becomes of a queue that has reached its length."""

EndpointBody: TypeAlias = Literal["payload", "cloudevents"]
"""What is posted: the payload with the rest in headers, or a CloudEvents document."""

AttemptLog: TypeAlias = Literal["failures", "all"]
"""Which attempts of an endpoint are written down."""

_decode = msgspec.json.decode
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_EPOCH_OFFSET_MICROSECONDS = 946_684_800_000_000
_ERASED = b'{"pgmb-erased":'
"""How the headers of a tombstone begin."""


class LakeAccess(msgspec.Struct, frozen=True):
    """How a reader gets at the lake of a stream, where the database's word and the environment do not do."""

    url: str | None = None
    """Of the table, if this machine has it under another one."""
    options: dict[str, str] = {}
    """Of the storage, by the names of `deltalake`, such as AWS_ENDPOINT_URL."""

    @property
    def key(self) -> tuple[object, ...]:
        """What tells it from others."""
        return self.url, *sorted(self.options.items())


class Source(msgspec.Struct, frozen=True, gc=False):
    """The stream that events come from, and what their ids are derived with."""

    stream: str
    salt: int


class Event(msgspec.Struct, frozen=True, eq=False, gc=False):
    """An event as a reader gets it.

    Payload, headers, id and time are decoded on first access: making them all would
    cost as much as the rest of receiving (500 events, client CPU: id and time made at once 0.9 ms, when asked
    0.5 ms; decoding all payloads 0.5 ms more). `gc=False` is safe: nothing inside refers back to the event.
    """

    seq: int
    """Its place in the stream: reading order, and the name by which a lease settles it."""
    _id: bytes | None
    topic: str
    key: str | None
    raw: bytes
    """The payload as JSON text, unchanged."""
    raw_headers: bytes | None
    """The headers as JSON text, unchanged."""
    _published_at: int
    attempt: int
    """1 at the first delivery."""
    _source: Source
    _payload: Any = msgspec.UNSET
    subscriptions: tuple[UUID, ...] = ()
    """Of an event that a group reads: the group's subscriptions that it matches."""

    @property
    def id(self) -> UUID:
        if self._id is None:
            return derive_id(self.seq, self._published_at, self._source.salt)
        return UUID(bytes=self._id)

    @property
    def stream(self) -> str:
        return self._source.stream

    @property
    def payload(self) -> Any:
        """The payload decoded, once."""
        if self._payload is msgspec.UNSET:
            force_setattr(self, "_payload", _decode(self.raw))
        return self._payload

    @property
    def headers(self) -> dict[str, Any]:
        """The headers decoded; empty where there are none."""
        return {} if self.raw_headers is None else _decode(self.raw_headers)

    @property
    def published_at(self) -> datetime:
        return moment(self._published_at)

    @property
    def erased(self) -> bool:
        """Whether it is a tombstone: its key, payload and headers were erased."""
        return self.raw_headers is not None and self.raw_headers.startswith(_ERASED)

    def __eq__(self, other: object) -> bool:
        """Whether it is the same event in the same attempt."""
        if not isinstance(other, Event):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[str, int, int, int]:
        return (self.stream, self.seq, self._published_at, self.attempt)

    def __repr__(self) -> str:
        return (
            f"Event(stream={self.stream!r}, seq={self.seq}, id={self.id}, topic={self.topic!r},"
            f" key={self.key!r}, attempt={self.attempt}, raw={self.raw!r})"
        )


def copy(event: Event) -> Event:
    """The same event with a payload of its own, not decoded yet."""
    return msgspec.structs.replace(event, _payload=msgspec.UNSET)


def live(events: Iterable[Event]) -> list[Event]:
    """Without tombstones: there is nothing left to handle."""
    return [event for event in events if event.raw_headers is None or not event.erased]


def is_erased(headers: str | None) -> bool:
    """Whether headers are those of a tombstone."""
    return headers is not None and headers.startswith(_ERASED.decode())


class NewEvent(msgspec.Struct, frozen=True):
    """An event to be published by `publish_many`."""

    topic: str
    payload: Any
    key: str | None = None
    headers: Any = None
    id: UUID | None = None
    dedup_key: str | None = None
    """Not published if the stream had an event under this key lately: see `publish`."""


_FOUND: Final[dict[str, str]] = {
    "delayed": "It is delayed and enters the log when it is due.",
    "copy": "Retention dropped it from the log. A retry or dead letter holds a copy.",
    "archived": "Retention dropped it from the log. It is archived in the lake.",
    "dropped": "Retention dropped it from the log.",
    "uncommitted": "Its transaction has not committed: it was rolled back, or is still open.",
}


def _when(word: str, moment: datetime | None) -> str:
    return "" if moment is None else f"{word} {moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


class FailedAttempt(msgspec.Struct, frozen=True):
    """An attempt at an event that failed."""

    attempt: int
    at: datetime
    error: str | None = None
    detail: str | None = None
    """The traceback of a Python handler: its end, at most 2,000 bytes."""


class DeadLetter(msgspec.Struct, frozen=True):
    """An event that a queue gave up, with the last error. `id` names it to `redrive` and `drop_dead`."""

    id: int
    died_at: datetime
    error: str | None
    event: Event
    errors: list[FailedAttempt] = []
    """The last ten attempts that failed, the newest last."""

    @property
    def attempt(self) -> int:
        """How often it was tried."""
        return self.event.attempt


_POSITION = re.compile(r'\((\d+),(\d+),(\d+),(\d+),"?(\d+:\d+:[\d,]*)"?,(\d+),(\d+)\)', re.ASCII)


class Position(msgspec.Struct, frozen=True):
    """A point in a stream's history. `str(position)` is its text in SQL, `Position.parse` reads it back.

    `epoch`, `stream`, `tick` and `proof` say where it belongs: the database refuses a position of another
    stream, of a log that was restored, and of a history that a failover lost.
    """

    epoch: int
    stream: int
    tick: int
    proof: int
    snapshot: str
    seq: int
    next: int

    @classmethod
    def parse(cls, text: str) -> Self:
        found = _POSITION.fullmatch(text)
        if found is None:
            raise ValueError(
                f"invalid position: {text!r}; expected (epoch,stream,tick,proof,snapshot,seq,next)"
                " as pgmb.position() returns it"
            )
        epoch, stream, tick, proof, snapshot, seq, following = found.groups()
        return cls(int(epoch), int(stream), int(tick), int(proof), snapshot, int(seq), int(following))

    def __str__(self) -> str:
        belongs = f"{self.epoch},{self.stream},{self.tick},{self.proof}"
        return f'({belongs},"{self.snapshot}",{self.seq},{self.next})'


class QueueStatus(msgspec.Struct, frozen=True):
    """A queue as `queue_status` sees it. Counts are exact, except those named in `at_least` and `at_most`."""

    queue: str
    stream: str
    patterns: list[str]
    paused_at: datetime | None
    paused_reason: str | None
    waiting: int
    oldest_age: timedelta | None
    leases: int
    leased_events: int
    retries: int
    dead: int
    received_per_second: float
    oldest_lease_age: timedelta | None
    behind: int
    """Numbers of the stream after the queue's position, whatever they match."""
    at_least: list[str]
    """The fields that stopped at their bound: the true value may be higher."""
    at_most: list[str]
    """The fields that count too much: an SQL condition or a costly filter is not evaluated for them."""

    @classmethod
    def of(cls, row: tuple[Any, ...]) -> Self:
        """From a row in the order of the fields, times in binary."""
        queue, stream, patterns, paused_at, *rest = row
        return cls(queue, stream, patterns, None if paused_at is None else moment(paused_at), *rest)


FateState: TypeAlias = Literal["waiting", "leased", "retrying", "dead", "done", "not taken", "unknown"]
FoundIn: TypeAlias = Literal["log", "delayed", "copy", "archived", "dropped", "uncommitted", "unknown"]


class Holder(msgspec.Struct, frozen=True):
    """The process that holds a lease, as far as the database knows it."""

    backend: int
    """The server process of the connection that received."""
    host: str | None = None
    pid: int | None = None
    """The process on that host. Workers and dispatchers say both in their heartbeats."""
    application: str | None = None
    worker: UUID | None = None
    role: str | None = None
    """Only admins see role and address."""
    address: str | None = None
    gone: bool = False
    """Whether that session has ended."""

    def __str__(self) -> str:
        if self.host is not None:
            process = f"{self.host}:{self.pid}"
        else:
            process = self.address or f"server process {self.backend}"
        named = process if self.application is None else f"{process} ({self.application})"
        return f"{named}, disconnected" if self.gone else named


class Fate(msgspec.Struct, frozen=True):
    """Where an event stands in a queue or at an endpoint. Fields that do not apply are None."""

    kind: Literal["queue", "endpoint"]
    name: str
    state: FateState
    queue: str | None = None
    """Of an endpoint: the queue that feeds it."""
    reason: str | None = None
    attempt: int | None = None
    """The attempt that runs, comes next, or was the last."""
    at: datetime | None = None
    """When it was leased, died, or was done, if that is known."""
    until: datetime | None = None
    """When the lease expires, or the next attempt is due."""
    received_at: datetime | None = None
    ahead: int | None = None
    """At most how many events of the stream come first."""
    error: str | None = None
    errors: list[FailedAttempt] = []
    """The last ten attempts that failed, the newest last."""
    holder: Holder | None = None
    dead_letter: int | None = None
    """The id of the dead letter, for `redrive` and `drop_dead`."""

    def told(self) -> str:
        """What is known of the state, in words: since when, until when, by whom, why."""
        parts: list[str] = []
        if self.state == "leased":
            parts.append(f"by {self.holder}" if self.holder else "")
            parts.append(f"attempt {self.attempt}")
            parts.append(_when("until", self.until))
        elif self.state == "retrying":
            parts += [f"attempt {self.attempt}", _when("at", self.until)]
        elif self.state == "dead":
            attempts = "1 attempt" if self.attempt == 1 else f"{self.attempt} attempts"
            parts += [_when("since", self.at), attempts, f"dead letter {self.dead_letter}", self.error or ""]
        elif self.state == "done":
            parts += [_when("at", self.at), _when("received at", self.received_at)]
        elif self.state == "waiting" and self.ahead is not None:
            parts.append("next" if self.ahead == 0 else f"at most {self.ahead:,} ahead of it")
        parts.append(self.reason or "")
        return ", ".join(part for part in parts if part)


class LakeCopy(msgspec.Struct, frozen=True):
    """Where a segment is archived."""

    url: str
    version: int


class EventFate(msgspec.Struct, frozen=True):
    """What became of an event, as `event_fate` sees it."""

    id: UUID
    found: FoundIn
    """`log`; `delayed` until `due_at`; `copy`: retention dropped it, and a retry or dead letter holds it;
    `archived` in the `lake` or `dropped`, by retention; `uncommitted`: its transaction has not committed.
    """
    stream: str | None = None
    seq: int | None = None
    topic: str | None = None
    key: str | None = None
    published_at: datetime | None = None
    due_at: datetime | None = None
    dropped_at: datetime | None = None
    payload: str | None = None
    """The beginning of its JSON: 300 characters."""
    bytes: int | None = None
    """The length of the whole payload."""
    consumers: list[Fate] = []
    more: bool = False
    """Whether there are more consumers than were asked for."""
    lake: LakeCopy | None = None
    looked: int | None = None
    """Of an unknown id: how many events were looked at."""

    @property
    def where(self) -> str | None:
        """Where it is if it is not in the log, in words."""
        return _FOUND.get(self.found)


class NextEvent(msgspec.Struct, frozen=True):
    """An event that a queue would deliver."""

    seq: int
    id: UUID
    topic: str
    key: str | None
    payload: str
    """The beginning of its JSON: 300 characters."""
    bytes: int
    """The length of the whole payload."""
    published_at: datetime
    attempt: int
    """The attempt that comes: 1 for a fresh event."""
    due_at: datetime | None = None
    """When a retry was due, or its lease expired. None for a fresh event."""
    error: str | None = None
    """Why the last attempt failed."""


class NextEvents(msgspec.Struct, frozen=True):
    """What a queue would deliver next, as `next_events` sees it."""

    events: list[NextEvent]
    looked: int
    """How many numbers of the log were looked at."""
    more: bool
    """Whether it stopped before the end of the log."""


class WorkerStatus(msgspec.Struct, frozen=True):
    """A process that runs handlers, as its heartbeats describe it."""

    worker: UUID
    host: str
    pid: int
    application: str | None
    app: str | None
    """The name of its app: `App(name=...)`."""
    role: str
    queues: list[str]
    backends: list[int]
    """The server processes of its connections. Behind a pooler they are not known."""
    started_at: datetime
    heartbeat_at: datetime
    alive: bool

    @classmethod
    def of(cls, row: tuple[Any, ...]) -> Self:
        """From a row in the order of the fields, times and ids in binary."""
        worker, *told, started_at, heartbeat_at, alive = row
        fields: list[Any] = [UUID(bytes=worker), *told, moment(started_at), moment(heartbeat_at), alive]
        return cls(*fields)


class Heartbeat(msgspec.Struct, frozen=True):
    """What a worker says of itself every few seconds."""

    worker: UUID
    host: str
    pid: int
    queues: list[str]
    backends: list[int]
    app: str | None = None
    shared: bool = False
    handled: list[str] | None = None


class Disagreement(msgspec.Struct, frozen=True):
    """Where the live workers of a queue declare it differently, or their code has left it behind."""

    queue: str
    kind: str
    """A kind of disagreement, such as patterns or unbound: see pgmb.queue_disagreements."""
    message: str
    hint: str
    """What to do."""


class StreamStatus(msgspec.Struct, frozen=True):
    """A stream as `stream_status` sees it."""

    stream: str
    segments: int
    unsealed: int
    unarchived: int
    events: int
    delayed: int
    published_per_second: float | None
    last_tick_age: timedelta | None
    bytes: int
    at_least: list[str]
    """The fields that stopped at their bound: `delayed`, counted up to 10,000."""


class ReaderStatus(msgspec.Struct, frozen=True):
    """A durable reader as `reader_status` sees it. `waiting` counts what was rolled back, too."""

    reader: str
    stream: str
    position: Position
    confirmed_at: datetime
    waiting: int
    waiting_bytes: int
    lag: timedelta | None
    """The age of the first event that it has not read; None where there is none."""
    held_segments: int
    """How many segments retention would have dropped but for this reader, and since when that is so."""
    held_for: timedelta | None
    lost: bool
    """Whether retention dropped what it has not read."""

    @classmethod
    def of(cls, row: tuple[Any, ...]) -> Self:
        """From a row in the order of the fields, times in binary, the position as text."""
        reader, stream, position, confirmed_at, *rest = row
        fields: list[Any] = [reader, stream, Position.parse(position), moment(confirmed_at), *rest]
        return cls(*fields)


class SinkStatus(msgspec.Struct, frozen=True):
    """An application that publishes by versions, as `sink_status` sees it: Spark's sink."""

    app: str
    stream: str
    version: int | None
    """The last one that was published; None before the first."""
    events: int | None
    committed_at: datetime | None
    stages: int
    """Tables that hold what is not yet published: of a version under way, or left over by a failed one."""
    staged_at: datetime | None

    @classmethod
    def of(cls, row: tuple[Any, ...]) -> Self:
        """From a row in the order of the fields, times in binary."""
        app, stream, version, events, committed_at, stages, staged_at = row
        times = [None if at is None else moment(at) for at in (committed_at, staged_at)]
        return cls(app, stream, version, events, times[0], stages, times[1])


class Subscription(msgspec.Struct, frozen=True):
    """What one reader of a group asks for. A paused one raised, and is passed over."""

    id: UUID
    group: str
    stream: str
    patterns: list[str]
    equals: dict[str, Any] | None
    """By the fields' paths: `{"payload.room": 7}`."""
    filter: str | None
    condition: str | None
    params: dict[str, Any]
    expires_after: timedelta | None
    active_at: datetime
    created_at: datetime
    paused_at: datetime | None
    paused_reason: str | None

    @classmethod
    def of(cls, row: tuple[Any, ...]) -> Self:
        """From a row in the order of the fields, times and ids in binary, JSON decoded."""
        id, *asked, active_at, created_at, paused_at, reason = row
        paused = None if paused_at is None else moment(paused_at)
        fields: list[Any] = [UUID(bytes=id), *asked, moment(active_at), moment(created_at), paused, reason]
        return cls(*fields)


class Schedule(msgspec.Struct, frozen=True):
    """A recurring publish. Without `next_at` its expression never falls due again."""

    name: str
    cron: str
    timezone: str
    stream: str
    topic: str
    key: str | None
    payload: Any
    headers: dict[str, Any] | None
    missed: str
    next_at: datetime | None
    last_at: datetime | None
    """The due time that was published last."""
    paused_at: datetime | None
    app: str | None = None
    """The app that owns it: no app of another name changes it."""

    @classmethod
    def of(cls, row: tuple[Any, ...]) -> Self:
        """From a row in the order of the fields and one more, times and JSON in binary."""
        name, cron, timezone, stream, topic, key, payload, headers, missed, *times, app, _ = row
        next_at, last_at, paused_at = (None if at is None else moment(at) for at in times)
        return cls(
            name,
            cron,
            timezone,
            stream,
            topic,
            key,
            _decode(payload),
            None if headers is None else _decode(headers),
            missed,
            next_at,
            last_at,
            paused_at,
            app,
        )


class DueSchedule(msgspec.Struct, frozen=True):
    """A schedule that is due, or soon will be, by the database's clock `now`."""

    name: str
    cron: str
    timezone: str
    missed: str
    due_at: datetime | None
    """None only if `recompute_after` is set."""
    now: datetime
    recompute_after: datetime | None = None
    """Set if the clock is or was wrong: the right one is the first after this moment."""


class NewEndpoint(msgspec.Struct, frozen=True):
    """An endpoint that was created, and the secret that was made for it. Its repr does not show that."""

    id: UUID
    secret: str | None
    """What receivers verify signatures with; None where it has none, or had one before."""
    public_key: str | None = None
    """The same where the secret is a private key."""

    def __repr__(self) -> str:
        return f"NewEndpoint(id={self.id!r}, secret={None if self.secret is None else '…'})"


class EndpointStatus(msgspec.Struct, frozen=True):
    """An endpoint as `pgmb.endpoints` shows it: what it asks for, how it is, what it did."""

    id: UUID
    name: str
    url: str
    state: Literal["active", "paused", "throttled", "tripped", "disabled"]
    reason: str | None
    queue: str | None
    """That feeds it; None for a worker without one."""
    stream: str | None
    patterns: list[str] | None
    equals: dict[str, Any] | None
    filter: str | None
    condition: str | None
    params: dict[str, Any]
    ordered: bool
    batch: int
    body: EndpointBody
    rps: int | None
    max_in_flight: int
    timeout: timedelta
    headers: list[str]
    """The names of those that it adds."""
    retry_after: list[timedelta] | None
    """None: as the queue says."""
    gzip_above: int | None
    log: AttemptLog
    keep_response: bool
    description: str | None
    metadata: Any
    secrets: int
    delivered: int
    failed: int
    error: str | None
    """What went wrong last."""
    waiting: int
    """Events that wait for it. Of a shared queue, those that a dispatcher holds count once they failed."""
    oldest_age: timedelta | None
    """Since the oldest of these was published."""
    at_least: list[str]
    """The fields that stopped at their bound: `waiting`, counted up to 10,000."""
    delivered_at: datetime | None
    failed_at: datetime | None
    failing_since: datetime | None
    probe_at: datetime | None
    """When a throttled or tripped endpoint is tested."""
    created_at: datetime
    changed_at: datetime

    @classmethod
    def of(cls, row: tuple[Any, ...]) -> Self:
        """From a row in the order of the fields, times and ids in binary, JSON decoded."""
        id, *told = row[:-6]
        times = [None if at is None else moment(at) for at in row[-6:]]
        fields: list[Any] = [UUID(bytes=id), *told, *times]
        return cls(*fields)


class Attempt(msgspec.Struct, frozen=True):
    """A request to an endpoint that was written down, for each event in it."""

    id: int
    at: datetime
    seq: int | None
    event_id: UUID | None
    topic: str | None
    attempt: int
    status: int | None
    """None where nothing came back."""
    seconds: float
    error: str | None
    """What went wrong, in a word; None where nothing did."""
    detail: str | None
    response: str | None
    """At most 1 KB of what came back, where the endpoint keeps it."""

    @classmethod
    def of(cls, row: tuple[Any, ...]) -> Self:
        """From a row in the order of the fields, times and ids in binary."""
        id, at, seq, event_id, *rest = row
        fields: list[Any] = [id, moment(at), seq, None if event_id is None else UUID(bytes=event_id), *rest]
        return cls(*fields)


class NewKey(msgspec.Struct, frozen=True):
    """A key for HTTP that was made. Its repr does not show it."""

    name: str
    key: str

    def __repr__(self) -> str:
        return f"NewKey(name={self.name!r}, key='…')"


class ApiKey(msgspec.Struct, frozen=True):
    """A key for HTTP as `pgmb.api_keys` shows it: what it may do, not the key itself."""

    id: int
    name: str
    scopes: list[str]
    created_at: datetime
    expires_at: datetime | None
    used_at: datetime | None
    """To the minute; None if it never was."""

    @classmethod
    def of(cls, row: tuple[Any, ...]) -> Self:
        """From a row in the order of the fields, times in binary."""
        id, name, scopes, *times = row
        created_at, expires_at, used_at = (None if at is None else moment(at) for at in times)
        return cls(id, name, scopes, created_at, expires_at, used_at)  # type: ignore[arg-type]


class AuditEntry(msgspec.Struct, frozen=True):
    """Something that was changed, and by whom: `key:NAME` over HTTP, `cli:USER` on the command line."""

    id: int
    at: datetime
    actor: str
    action: str
    subject: str | None
    detail: dict[str, Any]

    @classmethod
    def of(cls, row: tuple[Any, ...]) -> Self:
        """From a row in the order of the fields, times and JSON in binary."""
        id, at, actor, action, subject, detail = row
        return cls(id, moment(at), actor, action, subject, _decode(detail))


def moment(microseconds: int) -> datetime:
    """A timestamp of PostgreSQL's binary format, microseconds since 2000."""
    return _EPOCH + timedelta(microseconds=microseconds)


def microseconds(moment: datetime) -> int:
    """The same back."""
    return (moment - _EPOCH) // timedelta(microseconds=1)


def derive_id(seq: int, published_at: int, salt: int) -> UUID:
    """The id of an event that was published without one: what pgmb.derive_id makes of the same three.

    A version 7 UUID. The time goes through floating point as it does there, to the same last digit.
    """
    milliseconds = round((published_at + _EPOCH_OFFSET_MICROSECONDS) / 1_000_000.0 * 1000.0)
    low = ((seq + salt) & (1 << 62) - 1) | 1 << 63
    return UUID(int=milliseconds << 80 | 7 << 76 | (salt & 0xFFF) << 64 | low)
