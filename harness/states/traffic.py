"""Backlogs, leases in flight, and old segments, mostly made by public calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from uuid import UUID

from harness.states.leases import age_leases
from harness.states.running import Connection, Db, rows

_BETWEEN_SWEEPS = 0.06
"""Seconds. A receive looks for leases that ended at most every 50 ms."""


def publish(
    db: Connection, events: int, *, topic: str = "t", keys: Sequence[str] = (), stream: str = "main"
) -> None:
    """Publish `events` in one transaction, with these keys in turn."""
    db.execute(
        "select pgmb.publish_many(array_fill(%(topic)s::text, array[%(events)s]),"
        " array(select to_json(n) from generate_series(1, %(events)s) n),"
        " array(select (%(keys)s::text[])[1 + n %% greatest(cardinality(%(keys)s::text[]), 1)]"
        "   from generate_series(0, %(events)s - 1) n),"
        " stream => %(stream)s)",
        {"topic": topic, "events": events, "keys": list(keys), "stream": stream},
    )


def fill(db: Connection, events: int, *, topic: str = "t", stream: str = "main") -> None:
    """Publish many events of one topic by COPY, which costs least."""
    with db.cursor() as cursor, cursor.copy(f'copy pgmb."log_{stream}" (topic, payload) from stdin') as copy:
        copy.write(f"{topic}\t1\n" * events)


def receive(db: Connection, queue: str = "q", size: int = 1, lease_for: str = "1 hour") -> UUID | None:
    """Lease up to `size` events: the lease, or None if there was nothing."""
    rows = db.execute(
        "select lease from pgmb.receive(%s, %s, %s::interval)", [queue, size, lease_for]
    ).fetchall()
    return rows[0][0] if rows else None


def hold_leases(
    db: Connection, leases: int, queue: str = "q", *, size: int = 1, lease_for: str = "1 hour"
) -> list[UUID]:
    """So many leases in flight, of `size` events each, which must wait in the queue."""
    held: list[UUID] = []
    while len(held) < leases:
        lease = receive(db, queue, size, lease_for)
        if lease is None:
            # An ordered queue leases nothing for a moment after a lease, because its keys may soon be free.
            age_leases(db)
            lease = receive(db, queue, size, lease_for)
        assert lease is not None, f"queue {queue} gave {len(held)} of {leases} leases"
        held.append(lease)
    return held


def open_batch(db: Connection, queue: str = "q", *, events: int = 100, topic: str = "t") -> UUID:
    """A queue in the middle of a batch: `events` are published together, and the first of them is leased."""
    publish(db, events, topic=topic)
    (lease,) = hold_leases(db, 1, queue)
    return lease


def expire(db: Connection, *leases: UUID) -> None:
    """End leases as if their time was over. The next receive sends their events back."""
    for lease in leases:
        db.execute("select pgmb.extend(%s, '1 microsecond')", [lease])
    time.sleep(_BETWEEN_SWEEPS)


def fail(db: Connection, *leases: UUID, after: str = "0") -> None:
    """Retry all events of the leases after that time."""
    for lease in leases:
        db.execute("select pgmb.retry(%s, null, %s::interval, 'failed')", [lease, after])


def drain(db: Connection, queue: str = "q", *, size: int = 1000) -> int:
    """Receive and ack until the queue gives nothing more: how many leases there were."""
    leases = 0
    while (lease := receive(db, queue, size)) is not None:
        db.execute("select pgmb.ack(%s)", [lease])
        leases += 1
    return leases


def age_segments(db: Connection, by: str) -> None:
    """Make all closed segments older, for retention."""
    db.execute(
        "update pgmb.segment set closed_at = closed_at - %(by)s::interval,"
        " last_published_at = last_published_at - %(by)s::interval where closed_at is not null",
        {"by": by},
    )


def take_snapshot(db: Db) -> None:
    """Take the snapshot of a transaction that was begun repeatable read or serializable."""
    rows(db, "select 1")


def pin_xmin(connect: Callable[..., Connection]) -> Connection:
    """A transaction that keeps vacuum from removing dead rows, until it is rolled back."""
    pinned = connect(autocommit=False)
    pinned.execute("set transaction isolation level repeatable read")
    pinned.execute("select pg_current_xact_id()")
    return pinned


def publish_aged(db: Connection, ages: Sequence[str], *, topic: str = "t", key: str | None = None) -> None:
    """Publish one event for each of these ages, as if it had been published that long ago."""
    db.execute(
        "insert into pgmb.log_main (topic, key, payload, published_at)"
        " select %s, %s, to_json(n), clock_timestamp() - age"
        " from unnest(%s::interval[]) with ordinality a (age, n) order by n",
        [topic, key, list(ages)],
    )
