"""The statements of the client, one per SQL function and under its name.

Those on the hot path name every parameter, so that each is prepared once. The others name only the given
arguments and leave the defaults to SQL.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cache, lru_cache
from typing import Any, Final, LiteralString, NamedTuple, cast
from uuid import UUID

import msgspec
from psycopg import sql

from pgmb._core import durations, wire
from pgmb._core.lease import LeaseNumbers
from pgmb.errors import InvalidArgument
from pgmb.types import Duration, Event, Heartbeat, Position


class Statement(NamedTuple):
    text: LiteralString
    parameters: tuple[Any, ...]


class Filter(NamedTuple):
    """What an event must hold beside its topic."""

    equals: Mapping[str, Any] | None = None
    filter: str | None = None
    params: Mapping[str, Any] | None = None


TYPES: Final[dict[str, LiteralString]] = {
    "action": "text",
    "actor": "text",
    "after": "interval",
    "app": "text",
    "archive": "boolean",
    "attempts": "integer",
    "around": "timestamptz",
    "at": "timestamptz",
    "backends": "integer[]",
    "backoff_base": "interval",
    "backoff_factor": "double precision",
    "backoff_jitter": "double precision",
    "backoff_max": "interval",
    "batch": "integer",
    "body": "text",
    "bury_after": "interval",
    "condition": "text",
    "cron": "text",
    "dedup_for": "interval",
    "description": "text",
    "detail": "jsonb",
    "digest": "bytea",
    "drop_unread": "boolean",
    "endpoint": "text",
    "equals": "jsonb",
    "error": "text",
    "expires_at": "timestamptz",
    "fair_by": "text",
    "filter": "text",
    "gzip_above": "integer",
    "handled": "text[]",
    "headers": "json",
    "host": "text",
    "id": "uuid",
    "ids": "bigint[]",
    "keep_for": "interval",
    "keep_response": "boolean",
    "key": "text",
    "lanes": "text[]",
    "lease": "uuid",
    "lease_for": "interval",
    "log": "text",
    "look": "integer",
    "max": "integer",
    "max_attempts": "integer",
    "max_event_bytes": "bigint",
    "max_in_flight": "integer",
    "max_length": "bigint",
    "metadata": "jsonb",
    "missed": "text",
    "name": "text",
    "next_at": "timestamptz",
    "no_filter": "boolean",
    "ordered": "boolean",
    "overlap": "interval",
    "params": "jsonb",
    "patterns": "text[]",
    "payload": "json",
    "pid": "integer",
    "queue": "text",
    "queues": "text[]",
    "reader": "text",
    "reason": "text",
    "retry_after": "interval[]",
    "rotate_events": "bigint",
    "rotate_every": "interval",
    "rps": "double precision",
    "scopes": "text[]",
    "sealed": "bytea",
    "seqs": "bigint[]",
    "shards": "integer",
    "shared": "boolean",
    "since": "timestamptz",
    "starting": "pgmb.position",
    "state": "text",
    "stream": "text",
    "subject": "text",
    "tick": "bigint",
    "timeout": "interval",
    "timezone": "text",
    "to": "pgmb.position",
    "together": "boolean",
    "topic": "text",
    "ttl": "interval",
    "until": "timestamptz",
    "url": "text",
    "when_full": "text",
    "worker": "uuid",
}
"""The SQL type of each parameter by its name."""

TYPES_OF_FUNCTIONS: Final[dict[str, dict[str, LiteralString]]] = {
    "alter_endpoint": {"headers": "jsonb", "rps": "integer"},
    "bury": {"detail": "text"},
    "create_endpoint": {"headers": "jsonb", "rps": "integer"},
    "resend": {"ids": "uuid[]"},
    "retry": {"detail": "text"},
}
"""Where a function takes a parameter of that name as another type."""


@cache
def _text(function: LiteralString, kinds: tuple[tuple[str, str], ...]) -> LiteralString:
    arguments = ", ".join(f'"{name}" => %s::{kind}' for name, kind in kinds)
    text: LiteralString = cast("Any", f"select pgmb.{function}({arguments})")
    return text


def call(function: LiteralString, /, **arguments: Any) -> Statement:
    """A call with the arguments that are not None."""
    special = TYPES_OF_FUNCTIONS.get(function, {})
    given = [
        (name, special.get(name) or TYPES[name], value)
        for name, value in arguments.items()
        if value is not None
    ]
    text = _text(function, tuple((name, kind) for name, kind, _ in given))
    return Statement(text, tuple(_value(kind, value) for _, kind, value in given))


def _value(kind: str, value: Any) -> Any:
    if isinstance(value, wire.Array):
        return value
    if kind == "interval":
        return interval(value)
    if kind == "interval[]":
        return [interval(one) for one in value]
    if kind == "timestamptz":
        return value if isinstance(value, str) else aware(value)
    if kind == "pgmb.position":
        return str(value)
    if kind == "jsonb":
        return wire.json(value)
    if kind.endswith("[]"):
        return list(value)
    return value


def interval(value: Duration | None) -> timedelta | None:
    return None if value is None else durations.of(value)


def aware(value: datetime | None) -> datetime | None:
    if value is not None and value.tzinfo is None:
        raise InvalidArgument(f"a time needs a time zone, got {value}")
    return value


# -- publishing ----------------------------------------------------------------------------------------------

# What pgmb.publish does for an event without options, at about half its cost.
_INSERT: Final = (
    "insert into {log} (topic, payload, key, headers) values (%s::text, %s::json, %s::text, %s::json)"
    " returning seq, published_at, {told}"
)
_PUBLISH: Final = (
    "select pgmb.publish(topic => %s::text, payload => %s::json, key => %s::text, headers => %s::json,"
    " stream => %s::text, id => %s::uuid, delay => %s::interval, at => %s::timestamptz)"
)
_PUBLISH_ONCE: Final = (
    "select pgmb.publish(topic => %s::text, payload => %s::json, key => %s::text, headers => %s::json,"
    " stream => %s::text, id => %s::uuid, delay => %s::interval, at => %s::timestamptz,"
    " dedup_key => %s::text, dedup_for => %s::interval)"
)
_PUBLISH_UNIFORM: Final = (
    "select pgmb.publish_many(topic => %s::text, payloads => %s::json[], headers => %s::json,"
    " stream => %s::text)"
)
_PUBLISH_COLUMNS: Final = (
    "select pgmb.publish_many(topics => %s::text[], payloads => %s::json[], keys => %s::text[],"
    " headers => %s::json[], ids => %s::uuid[], stream => %s::text)"
)
_PUBLISH_COLUMNS_ONCE: Final = (
    "select pgmb.publish_many(topics => %s::text[], payloads => %s::json[], keys => %s::text[],"
    " headers => %s::json[], ids => %s::uuid[], stream => %s::text, dedup_keys => %s::text[],"
    " dedup_for => %s::interval)"
)


def insert(topic: str, payload: Any, key: str | None, headers: Any, stream: str) -> Statement:
    """Publishes an event; returns its seq, published_at and the oid of its segment's table."""
    wire.refuse_other_than_text(topic, key)
    text = _insert_into(stream, "tableoid::bigint")
    return Statement(text, (topic, wire.json(payload), key, wire.optional_json(headers)))


def insert_elsewhere(topic: str, payload: Any, key: str | None, headers: Any, stream: str) -> Statement:
    """The same in a database of which nothing is known; returns the stream's salt instead of the oid."""
    wire.refuse_other_than_text(topic, key)
    text = _insert_into(stream, "(select s.salt from pgmb.stream s where s.name = %s::text)")
    return Statement(text, (topic, wire.json(payload), key, wire.optional_json(headers), stream))


def salt_of(stream: str) -> Statement:
    return Statement("select s.salt from pgmb.stream s where s.name = %s::text", (stream,))


@lru_cache(256)
def _insert_into(stream: str, told: LiteralString) -> LiteralString:
    log = sql.Identifier("pgmb", f"log_{stream}").as_string().replace("%", "%%")
    text: Any = _INSERT.format(log=log, told=told)
    return cast("LiteralString", text)


def publish(
    topic: str,
    payload: Any,
    key: str | None,
    headers: Any,
    stream: str,
    given: UUID | None,
    delay: Duration | None,
    at: datetime | None,
    dedup_key: str | None = None,
    dedup_for: Duration | None = None,
) -> Statement:
    wire.refuse_other_than_text(topic, key, dedup_key)
    parameters = (
        topic,
        wire.json(payload),
        key,
        wire.optional_json(headers),
        stream,
        given,
        interval(delay),
        aware(at),
    )
    if dedup_key is None:
        return Statement(_PUBLISH, parameters)
    return Statement(_PUBLISH_ONCE, (*parameters, dedup_key, interval(dedup_for)))


def publish_uniform(
    topic: str, payloads: Sequence[bytes], headers: wire.Json | None, stream: str
) -> Statement:
    return Statement(_PUBLISH_UNIFORM, (topic, wire.JsonArray(payloads), headers, stream))


def publish_columns(
    topics: Sequence[bytes],
    payloads: Sequence[bytes],
    keys: Sequence[bytes | None] | None,
    headers: Sequence[bytes | None] | None,
    ids: Sequence[bytes | None] | None,
    stream: str,
    dedup_keys: Sequence[bytes | None] | None = None,
    dedup_for: Duration | None = None,
) -> Statement:
    parameters = (
        wire.TextArray(topics),
        wire.JsonArray(payloads),
        None if keys is None else wire.TextArray(keys),
        None if headers is None else wire.JsonArray(headers),
        None if ids is None else wire.UuidArray(ids),
        stream,
    )
    if dedup_keys is None:
        return Statement(_PUBLISH_COLUMNS, parameters)
    return Statement(_PUBLISH_COLUMNS_ONCE, (*parameters, wire.TextArray(dedup_keys), interval(dedup_for)))


# -- receiving -----------------------------------------------------------------------------------------------

_RECEIVE: Final = (
    "select seq, id, topic, key, payload, headers, published_at, attempt, lease from pgmb.receive("
    "queue => %s::text, max => %s::integer, lease_for => %s::interval, ack => %s::uuid,"
    " durable => %s::boolean, raw => true)"
)
# Claims a range and reads it. The planner cannot know a limit that is the range's own length, and takes it
# for a tenth of the rows: so it walks the index, also in a table of which it knows nothing.
_CLAIMED: Final = (
    "select e.seq, e.id, e.topic, e.key, e.payload, e.headers, e.published_at, 1, {claim} from {found}"
    "pgmb.claim_next(queue => %s::integer, max => %s::integer, token => %s::bigint,"
    " lease_for => %s::interval, ack => %s::bigint, ack_token => %s::bigint, durable => %s::boolean,"
    " known => %s::bigint, segment => {segment}, seen => pg_current_snapshot(),"
    " start => %s::bigint{opens}) c"
    " left join lateral (select s.seq, s.id, s.topic::text, s.key::text, s.payload, s.headers,"
    " s.published_at from pgmb.segment_{stream}_{segment} s where s.seq > c.lo and s.seq <= c.hi"
    " order by s.seq limit c.hi - c.lo) e on true"
)
# Looks for one more event than may be leased: only then is the end of the batch known. The statement's own
# snapshot decides which events are in it. Subqueries hide the parameters' values from the planner:
# otherwise a custom plan would look cheaper than the generic one, and PostgreSQL would plan every call.
_FOUND: Final = (
    "(select count(*) events, max(s.seq) last from (select s.seq from pgmb.segment_{stream}_{segment} s"
    " where s.seq > (select %s::bigint) order by s.seq limit (select %s::integer) + 1) s) f"
    " cross join lateral "
)
_OPENS: Final = ", counted => f.events, last => f.last"
_MORE: Final = "case when c.hi < f.last then -c.id else c.id end"
_RECEIVE_ANY: Final = (
    "select seq, id, topic, key, payload, headers, published_at, attempt, lease, queue from pgmb.receive_any("
    "queues => %s::text[], max => %s::integer, lease_for => %s::interval, durable => %s::boolean,"
    " raw => true)"
)
_HEARTBEAT: Final = (
    "pgmb.worker_heartbeat(worker => %s::uuid, host => %s::text, pid => %s::integer, queues => %s::text[],"
    " backends => %s::integer[], app => %s::text, shared => %s::boolean,"
    " handled => %s::text[])"
)
# The look depends on the heartbeat, so that this comes first, and comes also if there is nothing to receive.
_RECEIVE_ANY_ALIVE: Final = (
    "select r.seq, r.id, r.topic, r.key, r.payload, r.headers, r.published_at, r.attempt, r.lease, r.queue"
    " from "
    + _HEARTBEAT
    + " alive cross join lateral pgmb.receive_any(queues => case when alive then %s::text[] end,"
    " max => %s::integer, lease_for => %s::interval, durable => %s::boolean, raw => true) r"
)
_DEAD_LETTERS: Final = (
    "select seq, event_id, topic, key, payload, headers, published_at, attempt, id, died_at, error,"
    " errors::json from pgmb.dead_letters(queue => %s::text, topic => %s::text, error => %s::text,"
    " after => %s::bigint, max => %s::integer)"
)

SET_TIMEOUT: Final = Statement(
    "select set_config('statement_timeout', '5s', true) where current_setting('statement_timeout') = '0'", ()
)
"""How long SQL conditions may take in the rest of the transaction. No row where that was set already."""


NO_TIMEOUT: Final = Statement("select set_config('statement_timeout', '0', true)", ())


def receive(
    queue: str, limit: int, lease_for: Duration | None, ack: UUID | None, *, alone: bool
) -> Statement:
    """`alone`: nothing else is in the transaction, so that its commit need not wait for the disk."""
    durable = not alone or ack is not None
    return Statement(_RECEIVE, (queue, limit, interval(lease_for), ack, durable))


def claim(
    lease: LeaseNumbers,
    limit: int,
    lease_for: Duration | None,
    ack: LeaseNumbers | None,
    *,
    stream: int,
    segment: int,
    start: int,
    opens: bool,
) -> Statement:
    """Receives from the middle of a batch, or `opens` the one after the number `start`.

    It must be alone in its transaction. `lease`: a claim of the queue that the caller knows, and the token of
    the new lease. `start`: the last event of that claim's lease. `ack`: an earlier lease of the same queue.
    The last column is the new lease's claim, negative if the batch that it opens goes on. Null: nothing has
    happened, and `receive` must decide; 0: there is nothing to receive.
    """
    acked = (None, None) if ack is None else (ack.claim, ack.token)
    told = (lease.queue, limit, lease.token, interval(lease_for), *acked, ack is not None, lease.claim, start)
    text = _claim_in(stream, segment, opens=opens)
    return Statement(text, (start, limit, *told) if opens else told)


@lru_cache(256)
def _claim_in(stream: int, segment: int, *, opens: bool) -> LiteralString:
    found, opening, claim = (
        (_FOUND.format(stream=stream, segment=segment), _OPENS, _MORE) if opens else ("", "", "c.id")
    )
    text: Any = _CLAIMED.format(stream=stream, segment=segment, found=found, opens=opening, claim=claim)
    return cast("LiteralString", text)


def receive_any(
    queues: Iterable[str],
    limit: int,
    lease_for: Duration | None,
    heartbeat: Heartbeat | None = None,
    *,
    alone: bool,
) -> Statement:
    asked = (list(queues), limit, interval(lease_for), not alone)
    if heartbeat is None:
        return Statement(_RECEIVE_ANY, asked)
    return Statement(_RECEIVE_ANY_ALIVE, (*_told(heartbeat), *asked))


def _told(heartbeat: Heartbeat) -> tuple[Any, ...]:
    return msgspec.structs.astuple(heartbeat)


def stream_of(queue: str) -> Statement:
    return Statement("select stream, salt, timed from pgmb.stream_of(queue => %s::text)", (queue,))


def claims_from(queue: str) -> Statement:
    return Statement("select pgmb.claims_from(queue => %s::text)", (queue,))


def dead_letters(queue: str, topic: str | None, error: str | None, after: int, limit: int) -> Statement:
    return Statement(_DEAD_LETTERS, (queue, topic, error, after, limit))


def seqs_of(events: Event | Iterable[Event | int] | None) -> list[int] | None:
    """The events that a lease settles: None is all of them, an empty list none."""
    if events is None:
        return None
    if isinstance(events, Event):
        return [events.seq]
    return [event.seq if isinstance(event, Event) else event for event in events]


# -- status --------------------------------------------------------------------------------------------------

QUEUE_STATUS: Final = Statement(
    "select queue, stream, patterns, paused_at, paused_reason, waiting, oldest_age, leases, leased_events,"
    " retries, dead, received_per_second, oldest_lease_age, behind, at_least, at_most from pgmb.queue_status",
    (),
)
STREAM_STATUS: Final = Statement(
    "select stream, segments, unsealed, unarchived, events, delayed, published_per_second, last_tick_age,"
    " bytes, at_least from pgmb.stream_status",
    (),
)
READER_STATUS: Final = Statement(
    "select reader, stream, position::text, confirmed_at, waiting, waiting_bytes, lag, held_segments,"
    " held_for, lost from pgmb.reader_status",
    (),
)
WORKERS: Final = Statement(
    "select worker, host, pid, application, app, role::text, queues, backends, started_at, heartbeat_at,"
    " alive from pgmb.describe_workers()",
    (),
)
SINK_STATUS: Final = Statement(
    "select app, stream, version, events, committed_at, stages, staged_at from pgmb.sink_status", ()
)


def disagreements(name: str | None, worker: UUID | None) -> Statement:
    return Statement(
        "select queue, kind, message, hint from pgmb.queue_disagreements("
        "name => %s::text, worker => %s::uuid)",
        (name, worker),
    )


# -- positions -----------------------------------------------------------------------------------------------

_BETWEEN: Final = (
    "select seq, id, topic, key, payload, headers, published_at, 1, null from pgmb.between("
    "stream => %s::text, after => %s::pgmb.position, upto => %s::pgmb.position, after_seq => %s::bigint,"
    " max => %s::bigint)"
)
_BETWEEN_FILTERED: Final = (
    "select seq, id, topic, key, payload, headers, published_at, 1, null from pgmb.between_filtered("
    "stream => %s::text, after => %s::pgmb.position, upto => %s::pgmb.position, after_seq => %s::bigint,"
    " max => %s::bigint, equals => %s::jsonb, filter => %s::text, params => %s::jsonb)"
)
# Events of the log, then segments that only the lake has. These come last: a segment that is dropped while
# the log is read is among them.
_BOTH: Final = (
    "select seq, id, topic, key, payload, headers, published_at, 1, null::json from pgmb.{function}("
    "stream => %s::text, after => %s::pgmb.position, upto => %s::pgmb.position, after_seq => %s::bigint,"
    " max => %s::bigint, lake => true{filter})"
    " union all"
    " select null, null, null, null, null, null, null, null, to_json(kept)"
    " from pgmb.lake_between(stream => %s::text, after => %s::pgmb.position, upto => %s::pgmb.position,"
    " after_seq => %s::bigint) kept"
)
_BETWEEN_BOTH: Final = _BOTH.format(function="between", filter="")
_BETWEEN_FILTERED_BOTH: Final = _BOTH.format(
    function="between_filtered", filter=", equals => %s::jsonb, filter => %s::text, params => %s::jsonb"
)
_PASSING: Final = (
    "select pgmb.passing(seqs => %s::bigint[], topics => %s::text[], keys => %s::text[],"
    " payloads => %s::json[], headers => %s::json[], equals => %s::jsonb, filter => %s::text,"
    " params => %s::jsonb)"
)
_CONFIRM: Final = (
    "select pgmb.confirm(stream => %s::text, reader => %s::text, at => %s::pgmb.position,"
    " expected => %s::pgmb.position)"
)


def between(stream: str, after: Position, upto: Position, after_seq: int, limit: int) -> Statement:
    return Statement(_BETWEEN, (stream, str(after), str(upto), after_seq, limit))


def between_both(
    stream: str, after: Position, upto: Position, after_seq: int, limit: int, asked: Filter | None
) -> Statement:
    """Rows of the log, then segments that only the lake has, in the last column: their events come first."""
    where = (stream, str(after), str(upto), after_seq)
    text: Any = _BETWEEN_BOTH if asked is None else _BETWEEN_FILTERED_BOTH
    filtered = () if asked is None else _filter(asked)
    return Statement(text, (*where, limit, *filtered, *where))


def passing(events: Sequence[Event], asked: Filter) -> Statement:
    """The seqs of the events that pass a filter."""
    return Statement(
        _PASSING,
        (
            [event.seq for event in events],
            wire.TextArray([event.topic.encode() for event in events]),
            wire.TextArray([None if event.key is None else event.key.encode() for event in events]),
            wire.JsonArray([event.raw for event in events]),
            wire.JsonArray([event.raw_headers for event in events]),
            *_filter(asked),
        ),
    )


def _filter(asked: Filter) -> tuple[Any, ...]:
    return wire.optional_json(asked.equals), asked.filter, wire.optional_json(asked.params)


def seq_at(stream: str, at: datetime) -> Statement:
    return Statement("select pgmb.seq_at(stream => %s::text, at => %s::timestamptz)", (stream, aware(at)))


def between_filtered(
    stream: str, after: Position | None, upto: Position | None, after_seq: int, limit: int, asked: Filter
) -> Statement:
    """Without positions it only checks the filter."""
    return Statement(
        _BETWEEN_FILTERED,
        (
            stream,
            None if after is None else str(after),
            None if upto is None else str(upto),
            after_seq,
            limit,
            *_filter(asked),
        ),
    )


def confirm(stream: str, reader: str, at: Position, expected: Position | None = None) -> Statement:
    return Statement(_CONFIRM, (stream, reader, str(at), None if expected is None else str(expected)))


def position(
    function: LiteralString, *, stream: str, at: datetime | None = None, tick: int | None = None
) -> Statement:
    """A call of one of the functions that return a position, as text."""
    plain = call(function, stream=stream, at=at, tick=tick)
    return Statement(plain.text + "::text", plain.parameters)


# -- schedules -----------------------------------------------------------------------------------------------

NOW: Final = Statement("select clock_timestamp()", ())
"""The database's clock, which decides what is due."""
SCHEDULES: Final = Statement(
    "select name, cron, timezone, stream, topic, key, payload, headers, missed, next_at, last_at, paused_at,"
    " app, now from pgmb.schedules()",
    (),
)
_DUE_SCHEDULES: Final = (
    "select name, cron, timezone, missed, due_at, now, recompute_after"
    " from pgmb.due_schedules(ahead => %s::interval)"
)
_FIRE: Final = (
    "select pgmb.fire(name => %s::text, due_at => %s::timestamptz, next_at => %s::timestamptz,"
    " stands_for => %s::timestamptz)"
)
_RESCHEDULE: Final = (
    "select pgmb.reschedule(name => %s::text, due_at => %s::timestamptz, next_at => %s::timestamptz)"
)
_RESUME_SCHEDULE: Final = "select pgmb.resume_schedule(name => %s::text, next_at => %s::timestamptz)"


def due_schedules(ahead: Duration) -> Statement:
    return Statement(_DUE_SCHEDULES, (interval(ahead),))


def fire(name: str, due_at: datetime, next_at: datetime | None, stands_for: datetime | None) -> Statement:
    return Statement(_FIRE, (name, aware(due_at), aware(next_at), aware(stands_for)))


def reschedule(name: str, due_at: datetime | None, next_at: datetime | None) -> Statement:
    return Statement(_RESCHEDULE, (name, aware(due_at), aware(next_at)))


def resume_schedule(name: str, next_at: datetime | None) -> Statement:
    return Statement(_RESUME_SCHEDULE, (name, aware(next_at)))
