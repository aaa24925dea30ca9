"""Events outside the order of the log: retries of queues, and what waits for one endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from harness.states.running import Db, rows, value

_OF_QUEUE = (
    "(%(queue)s::text is null or queue in (select q.id from pgmb.queue q"
    " left join pgmb.queue head on head.id = q.lane_of where coalesce(head.name, q.name) = %(queue)s))"
)


# -- what there is -------------------------------------------------------------------------------------------


class Waiting(NamedTuple):
    """An event that is to be tried again."""

    seq: int
    id: UUID
    topic: str
    key: str | None
    payload: Any
    text: str
    """The payload as it was published."""
    published_at: datetime
    attempt: int
    error: str | None
    leased: bool
    due_at: datetime | None
    """None: it is leased, or waits behind another event of its key."""
    due_in: float | None
    """Seconds."""
    together: int | None
    """Events with the same number are tried again together."""
    endpoint: UUID | None


_WAITING = (
    "select seq, event_id, topic, key, payload, payload::text, published_at, attempt, error,"
    " lease is not null, nullif(due_at, 'infinity'),"
    " extract(epoch from nullif(due_at, 'infinity') - clock_timestamp())::float8"
)


def retries(db: Db, queue: str | None = None) -> list[Waiting]:
    """What a queue, or all, have to try again, in the order in which it began to wait."""
    found = rows(
        db, f"{_WAITING}, together, null from pgmb.retry where {_OF_QUEUE} order by id", {"queue": queue}
    )
    return [Waiting(*row) for row in found]


def retries_waiting(db: Db, queue: str | None = None) -> int:
    """How many events a queue, or all, have to try again, leased ones included."""
    return int(value(db, f"select count(*) from pgmb.retry where {_OF_QUEUE}", {"queue": queue}))


def copy_retries(db: Db, queue: str, table: str) -> None:
    """Copy what a queue has to try again to a new temporary table: seq, id, key, payload, published_at."""
    rows(
        db,
        f"create temporary table {table} as select r.seq, r.event_id id, r.key, r.payload::text payload,"
        " r.published_at from pgmb.retry r join pgmb.queue q on q.id = r.queue where q.name = "
        f"'{queue}'",
    )


def retries_leased(db: Db) -> int:
    """How many of the events that are tried again are leased."""
    return int(value(db, "select count(*) from pgmb.retry where lease is not null"))


def deliveries(db: Db) -> list[Waiting]:
    """What waits for single endpoints of shared queues, in the order of the log."""
    found = rows(
        db,
        f"{_WAITING}, null, endpoint from (select d.id, d.endpoint, d.seq, d.event_id, d.topic, d.key,"
        " b.payload, d.published_at, d.attempt, d.error, d.lease, d.due_at from pgmb.delivery d"
        " left join lateral pgmb_internal.delivery_bodies(array[d.id]) b on true) d order by seq, id",
    )
    return [Waiting(*row) for row in found]


def bytes_waiting(db: Db) -> int:
    """How much space what waits for single endpoints takes."""
    return int(value(db, "select pg_total_relation_size('pgmb.delivery')"))


def deliveries_waiting(db: Db, *, leased: bool = True) -> int:
    """How many events wait for single endpoints, with or without those that are leased."""
    return int(value(db, "select count(*) from pgmb.delivery where lease is null or %s", [leased]))


def claimed_deliveries(db: Db, lease: UUID | None) -> list[int]:
    """The rows by which a lease of pgmb.claim_deliveries is settled."""
    return [row for (row,) in rows(db, "select id from pgmb.delivery where lease = %s", [lease])]


# -- time ----------------------------------------------------------------------------------------------------


def make_due(db: Db, queue: str | None = None) -> None:
    """End the backoff of what a queue, or all, try again, for endpoints too. What waits behind others of its
    key keeps waiting."""
    for table, waits in (("retry", "due_at < 'infinity'"), ("delivery", "lease is null")):
        rows(
            db,
            f"update pgmb.{table} set due_at = clock_timestamp()"
            f" where {_OF_QUEUE} and due_at > clock_timestamp() and {waits}",
            {"queue": queue},
        )


def age_waiting(db: Db, by: str, queue: str | None = None, *, seq: int | None = None) -> None:
    """Make what a queue, or all, try again due that much sooner; later, if `by` is negative. With `seq`, one
    event of it."""
    for table, waits in (("retry", "due_at < 'infinity'"), ("delivery", "lease is null")):
        rows(
            db,
            f"update pgmb.{table} set due_at = due_at - %(by)s::interval"
            f" where {_OF_QUEUE} and {waits} and seq = coalesce(%(seq)s, seq)",
            {"by": by, "queue": queue, "seq": seq},
        )


def pass_time(db: Db, seconds: float) -> None:
    """Make everything that waits, and every lease of what waits for an endpoint, due that much sooner."""
    for table in ("retry", "delivery"):
        rows(db, f"update pgmb.{table} set due_at = due_at - %s * interval '1 s'", [seconds])


def slow_down(db: Db, seconds: float) -> None:
    """Make every statement that gives events back, or buries them, take that long."""
    rows(
        db,
        "create function pgmb.delay() returns trigger language plpgsql as"
        f" $$ begin perform pg_sleep({seconds}); return null; end $$",
    )
    for table in ("retry", "dead"):
        rows(
            db,
            f"create trigger delay after insert on pgmb.{table} for each statement"
            " execute function pgmb.delay()",
        )


def date_releases(db: Db, ago: str) -> None:
    """Make the first release of events that nobody could handle that long ago."""
    rows(
        db,
        "update pgmb.retry set released_at = clock_timestamp() - %s::interval where released_at is not null",
        [ago],
    )


def age_waiting_events(db: Db, by: str, seq: int | None = None) -> None:
    """Make what is to be tried again, or one event of it, older, as if it had been published earlier."""
    for table in ("retry", "delivery"):
        rows(
            db,
            f"update pgmb.{table} set published_at = published_at - %(by)s::interval"
            " where seq = coalesce(%(seq)s, seq)",
            {"by": by, "seq": seq},
        )


# -- many ----------------------------------------------------------------------------------------------------


def add_retries(
    db: Db, events: int, queue: str = "q", *, due: str = "1 hour", step: str = "1 ms", topic: str = "t"
) -> None:
    """Make events that failed once and are tried again after `due`, each `step` later than the one before."""
    rows(
        db,
        "insert into pgmb.retry (queue, due_at, attempt, seq, event_id, topic, payload, published_at)"
        " select q.id, now() + %(due)s::interval + g * %(step)s::interval, 2, g, gen_random_uuid(),"
        " %(topic)s, '1', now()"
        " from pgmb.queue q, generate_series(1, %(events)s::int) g where q.name = %(queue)s",
        {"due": due, "step": step, "topic": topic, "events": events, "queue": queue},
    )


def add_retries_of_keys(db: Db, events: int, queue: str, *, suspects: bool, topic: str = "t") -> None:
    """Make retries of 20 keys in an ordered queue. With `suspects`, two leases of each have expired; without,
    all but the first of each key wait behind it."""
    rows(
        db,
        "insert into pgmb.retry (queue, due_at, attempt, expiries, seq, event_id, topic, key, payload,"
        " published_at, ordered, origin)"
        " select q.id, case when %(suspects)s or g <= 20 then now() else 'infinity' end,"
        " case when %(suspects)s then 3 else 1 end, case when %(suspects)s then 2 else 0 end, g,"
        " gen_random_uuid(), %(topic)s, 'k' || g %% 20, '1', now(), q.ordered, 1"
        " from pgmb.queue q, generate_series(1, %(events)s::int) g where q.name = %(queue)s order by g",
        {"queue": queue, "events": events, "suspects": suspects, "topic": topic},
    )


def repeat_retries(db: Db) -> None:
    """Make everything that is tried again wait twice."""
    rows(
        db,
        "insert into pgmb.retry (queue, due_at, attempt, seq, event_id, topic, payload, published_at)"
        " select queue, due_at, attempt, seq, event_id, topic, payload, published_at from pgmb.retry",
    )


def add_deliveries(
    db: Db,
    events: int = 1,
    *,
    endpoint: str | UUID | None = None,
    queue: str = "webhooks",
    first: int = 1,
    due: str = "0 s",
    attempt: int = 2,
    error: str | None = None,
    age: str = "0 s",
    older: str = "0 s",
    payload: str | None = None,
    headers: str | None = None,
) -> None:
    """Make events that wait for an endpoint of a shared queue, or for each that there is.

    They are numbered from `first`, which is also their payload unless one is given. The first is `age` old,
    each later one `older` more.
    """
    rows(
        db,
        "insert into pgmb.delivery (queue, endpoint, due_at, attempt, error, seq, event_id, topic, payload,"
        " headers, published_at)"
        " select q.id, e.id, clock_timestamp() + %(due)s::interval, %(attempt)s, %(error)s, n,"
        " gen_random_uuid(), 't', coalesce(%(payload)s::json, to_json(n)), %(headers)s::json,"
        " now() - %(age)s::interval - (n - %(first)s::int) * %(older)s::interval"
        " from pgmb.queue q, pgmb.endpoint e, "
        " generate_series(%(first)s::int, %(first)s::int + %(events)s::int - 1) n"
        " where q.name = %(queue)s and %(endpoint)s in (e.name, e.id::text, '') order by n",
        {
            "events": events,
            "endpoint": str(endpoint or ""),
            "queue": queue,
            "first": first,
            "due": due,
            "attempt": attempt,
            "error": error,
            "age": age,
            "older": older,
            "payload": payload,
            "headers": headers,
        },
    )


def add_deliveries_of_keys(db: Db, keys: Sequence[str], *, queue: str, error: str) -> None:
    """Make the log's events of these keys wait for each endpoint, due never."""
    rows(
        db,
        "insert into pgmb.delivery (queue, endpoint, due_at, attempt, error, seq, event_id, topic, key,"
        " payload, published_at)"
        " select q.id, p.id, 'infinity', 2, %(error)s, e.seq, gen_random_uuid(), e.topic, e.key, e.payload,"
        " now()"
        " from pgmb.endpoint p, pgmb.log_main e, pgmb.queue q"
        " where e.key = any (%(keys)s) and q.name = %(queue)s",
        {"error": error, "keys": list(keys), "queue": queue},
    )


def analyze_waiting(db: Db) -> None:
    """Let the planner know how many events wait to be tried again."""
    rows(db, "vacuum analyze pgmb.retry")


def stop_vacuum(db: Db) -> None:
    """Keep autovacuum away from tables that consumers write, for figures that it would change."""
    for table in ("claim", "delayed", "retry"):
        rows(db, f"alter table pgmb.{table} set (autovacuum_enabled = off)")
