"""Leases, and the position that each leaves behind: how many there are, how old, and when they end."""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple
from uuid import UUID

from harness.states.running import Db, rows, value

_IN_FLIGHT = "state in ('leased', 'leased_retries')"
_NEWEST = "from pgmb.claim c join pgmb.queue q on q.id = c.queue where q.name = %s order by c.id desc limit 1"


# -- what there is -------------------------------------------------------------------------------------------


def leases_in_flight(db: Db) -> int:
    """Leases that are neither settled nor taken over, of all queues."""
    return int(value(db, f"select count(*) from pgmb.claim where {_IN_FLIGHT}"))


def kept_claims(db: Db) -> int:
    """Rows that leases and positions have left, of all queues. Maintenance leaves one for each queue."""
    return int(value(db, "select count(*) from pgmb.claim"))


def newest_claim(db: Db, queue: str = "q") -> int:
    """The number of a queue's newest lease. It changes when something is received."""
    return int(value(db, f"select c.id {_NEWEST}", [queue]))


def lease_durations(db: Db) -> list[timedelta]:
    """How long each lease in flight lasts, from the time of its decision."""
    lasting = f"select expires_at - coalesce(extended_at, at) from pgmb.claim where {_IN_FLIGHT}"
    return [duration for (duration,) in rows(db, lasting)]


def lease_state(db: Db, claim: int) -> str:
    """What became of the lease with that number."""
    return str(value(db, "select state::text from pgmb.claim where id = %s", [claim]))


def holds_retries(db: Db, lease: UUID | str) -> bool:
    """Whether a lease holds events that are tried again, not events of the log."""
    return bool(
        value(
            db,
            "select state = 'leased_retries' from pgmb.claim"
            " where queue = pgmb_internal.lease_queue(%(lease)s)"
            " and id = pgmb_internal.lease_claim(%(lease)s)",
            {"lease": lease},
        )
    )


def leased_events(db: Db, queue: str = "q") -> tuple[int, int]:
    """How many events of a queue are in flight, and how many were ever leased, as far as claims are kept."""
    ((leased, ever),) = rows(
        db,
        f"select coalesce(sum(c.events) filter (where c.{_IN_FLIGHT}), 0)::int,"
        " coalesce(sum(c.events), 0)::int"
        " from pgmb.claim c join pgmb.queue q on q.id = c.queue where q.name = %s",
        [queue],
    )
    return leased, ever


def settled_singly(db: Db) -> int:
    """Events of leases in flight that were settled one by one."""
    return int(value(db, "select count(*) from pgmb.settlement"))


def leases_left_by_sweeps(db: Db, queue: str = "q") -> int:
    """Expired leases that sweeps left, because they were locked or time was short."""
    return int(value(db, f"select coalesce(cardinality(c.held), 0) {_NEWEST}", [queue]))


def leases_noted(db: Db, queue: str = "q") -> int:
    """Rows that note older leases of a queue that limits or orders. Some of them may have ended since."""
    return int(
        value(
            db,
            "select count(*) from pgmb.noted_lease n join pgmb.queue q on q.id = n.queue where q.name = %s",
            [queue],
        )
    )


def leases_behind_sweep(db: Db) -> int:
    """Leases that every sweep looks at, because a sweep may have passed their end."""
    return int(value(db, "select count(*) from pgmb.shortened"))


# -- how far a queue has come --------------------------------------------------------------------------------


class Claiming(NamedTuple):
    """What a client that claims by statements of its own must know of a queue."""

    stream: int
    segment: int
    queue: int
    claim: int
    start: int
    ended: bool


def claiming(db: Db, queue: str = "q") -> Claiming:
    (found,) = rows(
        db,
        "select q.stream, greatest(c.place, c.batch_seq) >> 40, q.id, c.id, c.batch_seq, c.place >= c.upto"
        f" {_NEWEST}",
        [queue],
    )
    return Claiming(*found)


def place(db: Db, queue: str = "q") -> int:
    """Up to which number of the log a queue has consumed or leased the batch that it reads."""
    return int(value(db, f"select c.place {_NEWEST}", [queue]))


def batch_start(db: Db, queue: str = "q") -> int:
    """The number that was the log's last when the batch that a queue reads was taken."""
    return int(value(db, f"select c.batch_seq {_NEWEST}", [queue]))


def batch_xmax(db: Db, queue: str = "q") -> int:
    """The first transaction that the batch of a queue does not cover."""
    return int(value(db, f"select pg_snapshot_xmax(c.batch_snapshot)::text::bigint {_NEWEST}", [queue]))


def unfinished_batches(db: Db) -> int:
    """Claims that left a part of their batch to later ones."""
    return int(value(db, "select count(*) from pgmb.claim where upto > place"))


def lagging_tenants(db: Db, queue: str = "q") -> list[int]:
    """Of a fair queue: how many numbers each tenant lags behind its position, the next to be served first."""
    return [
        lag
        for (lag,) in rows(
            db,
            f"select l.upto - l.place from (select c.lagging {_NEWEST}) newest,"
            " unnest(newest.lagging) with ordinality l order by l.ordinality",
            [queue],
        )
    ]


def ever_lagged(db: Db) -> bool:
    """Whether a tenant of a fair queue lagged at any lease, as far as claims are kept."""
    return bool(value(db, "select exists (select from pgmb.claim where lagging is not null)"))


# -- time ----------------------------------------------------------------------------------------------------


def age_leases(db: Db, by: str = "1 minute") -> None:
    """Make all leases that old. They end when they would have."""
    rows(db, "update pgmb.claim set at = at - %s::interval", [by])


def rejuvenate_leases(db: Db) -> None:
    """Make every lease look as if it had been given this moment."""
    rows(db, "update pgmb.claim set at = clock_timestamp()")


def until_leases_are_old(db: Db) -> None:
    """Wait until no lease is so young that an ordered queue does not look behind it."""
    rows(db, "select pg_sleep_until(max(at) + interval '120 ms') from pgmb.claim")


def until_swept(db: Db, *, retries: bool = False) -> None:
    """Wait until every short lease has ended and the next receive sweeps; with `retries`, also until those
    are due that wait shortly."""
    rows(
        db,
        "select pg_sleep_until(greatest(max(swept),"
        " max(expires_at) filter (where expires_at < clock_timestamp() + interval '5 s'),"
        " (select max(due_at) from pgmb.retry where %s and due_at < clock_timestamp() + interval '5 s'))"
        " + interval '60 ms') from pgmb.claim",
        [retries],
    )


def sweep_at_once(db: Db) -> None:
    """Make the next receive sweep. Receives sweep at most every 50 ms."""
    rows(db, "update pgmb.claim set swept = '-infinity'")


def expire_all(db: Db, ago: str = "1 ms") -> None:
    """End all leases, that long ago, and make the next receive take them over."""
    ended = f"update pgmb.claim set expires_at = clock_timestamp() - %s::interval where {_IN_FLIGHT}"
    rows(db, ended, [ago])
    sweep_at_once(db)


def end_behind_sweep(db: Db, lease: UUID) -> None:
    """End a lease at a time that sweeps have passed. No call leaves a lease like that."""
    rows(
        db,
        "update pgmb.claim set expires_at = swept"
        " where (queue, id) = (pgmb_internal.lease_queue(%(lease)s), pgmb_internal.lease_claim(%(lease)s))",
        {"lease": lease},
    )


def lose_leases(db: Db, claim: int | None = None) -> None:
    """Make leases in flight, or the one with that number, such as others have taken over."""
    rows(
        db,
        f"update pgmb.claim set state = 'expired' where id = %(claim)s or %(claim)s is null and {_IN_FLIGHT}",
        {"claim": claim},
    )


def age_rate(db: Db, by: str) -> None:
    """Make the time up to which rate limits are paid for that much earlier, as if it had passed."""
    rows(db, "update pgmb.claim set paid_until = paid_until - %s::interval", [by])


# -- many ----------------------------------------------------------------------------------------------------


def add_settled_claims(db: Db, claims: int, queue: str | None = None, *, nth: int = 1) -> None:
    """Make a queue, or all, that have been received from and settled that often. Numbers are taken below the
    newest; `nth` counts the calls for a queue."""
    rows(
        db,
        "insert into pgmb.claim (queue, id, token, state, events, lo, hi, place, upto,"
        " done_snapshot, done_seq, done_next, batch_snapshot, batch_seq, batch_next, expires_at, swept)"
        " select queue, id - %(nth)s * 10000000 + g, token, 'settled', 1, 0, 0, place, upto,"
        " done_snapshot, done_seq, done_next, batch_snapshot, batch_seq, batch_next,"
        " swept - g * interval '1 ms', swept"
        " from (select distinct on (c.queue) c.* from pgmb.claim c join pgmb.queue q on q.id = c.queue"
        "   where q.name = coalesce(%(queue)s, q.name) order by c.queue, c.id desc) newest,"
        "  generate_series(1, %(claims)s::int) g",
        {"nth": nth, "queue": queue, "claims": claims},
    )


def add_leases(db: Db, leases: int, queue: str = "q") -> None:
    """Make a queue with that many leases in flight, which end tomorrow. They cannot be settled."""
    add_settled_claims(db, leases, queue)
    rows(
        db,
        "update pgmb.claim set state = 'leased', expires_at = now() + interval '1 day'"
        " where state = 'settled' and queue = (select id from pgmb.queue where name = %s)",
        [queue],
    )


def add_leases_of_retries(db: Db, leases: int, queue: str = "q") -> None:
    """Make a queue whose newest leases hold retries, that many of them. They cannot be settled."""
    rows(
        db,
        "insert into pgmb.claim (queue, id, token, state, events, lo, hi, place, upto, done_seq,"
        " done_next, batch_seq, batch_next, at, expires_at, swept, done_snapshot, batch_snapshot, openings)"
        " select c.queue, c.id + n, 0, 'leased_retries', 1, c.lo, c.hi, c.place, c.upto,"
        " c.done_seq, c.done_next, c.batch_seq, c.batch_next, clock_timestamp(), now() + interval '1 day',"
        " c.swept, c.done_snapshot, c.batch_snapshot, c.openings"
        f" from (select c.* {_NEWEST}) c, generate_series(1, %s::int) n",
        [queue, leases],
    )


def add_settlements(db: Db, settlements: int) -> None:
    """Make that many single settlements, early ends and notes of leases, of a queue that is gone."""
    for table, values in (
        ("shortened (queue, claim, ends_at)", "-1, n, now()"),
        ("settlement (queue, claim, seq)", "-1, n, n"),
        ("noted_lease (queue, claim, events)", "-1, n, 1"),
        ("noted_key (queue, hash, claim)", "-1, n, n"),
    ):
        rows(
            db,
            f"insert into pgmb.{table} select {values} from generate_series(1, %s::int) n",
            [settlements],
        )


def use_up_lease_numbers(db: Db, queue: str = "q", *, left: int) -> None:
    """Make a queue that has been received from about a trillion times, and can be `left` times more."""
    rows(
        db,
        "update pgmb.claim c set id = (c.id >> 40 << 40) + (1::bigint << 40) - 1 - %s"
        " where (c.queue, c.id) in (select q.id, max(c.id) from pgmb.queue q"
        "   join pgmb.claim c on c.queue = q.id where q.name = %s group by q.id)",
        [left, queue],
    )
