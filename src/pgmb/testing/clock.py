"""A clock that stands still until it is told to advance.

The database's own clock cannot be set. Instead everything in it that waits for a time is moved: back by as
much as the clock advances, and forward by as much as the real one went on meanwhile.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Self, cast

import psycopg
from psycopg import sql

from pgmb import cron
from pgmb._async.broker import AsyncBroker
from pgmb._core.connecting import connect
from pgmb._core.statements import interval
from pgmb.testing.source import Source, dsn_of
from pgmb.types import Duration

_TIMES: dict[str, tuple[str, ...]] = {
    "attempt": ("at",),
    "claim": ("at", "expires_at", "swept", "paid_until"),
    "dead": ("died_at",),
    "dedup": ("expires_at",),
    "delayed": ("due_at",),
    "delivery": ("due_at",),
    "dispatcher": ("heartbeat_at",),
    "endpoint": ("probe_at",),
    "endpoint_activity": ("paid_until", "failing_since", "delivered_at", "failed_at"),
    "endpoint_secret": ("expires_at",),
    "retry": ("due_at",),
    "segment": ("attached_at", "closed_at", "sealed_at", "last_published_at", "dropped_at"),
    "tick": ("at",),
    "worker": ("heartbeat_at",),
}
"""What waits for a time, or is as old as one."""

_SHIFT = "update pgmb.{table} set {columns}"
# What was written since, by a transaction other than the clock's last, is younger than that. By how much is
# not known: it is left as it is, rather too old than too young.
_MOVED = (
    "{column} = {column} + case when xmin = %(last)s::xid then %(passed)s else interval '0' end"
    " - %(ahead)s::interval"
)
# A claim that is settled and not its queue's newest waits for nothing.
_WHICH = {
    "claim": " where state in ('leased', 'leased_retries') or (queue, id) in"
    " (select newest.queue, max(newest.id) from pgmb.claim newest group by newest.queue)"
}

# An event's age counts where a queue has a time to live. Its id is derived from its time: it is written down.
_LOGS = """
select distinct s.id, s.salt, g.number from pgmb.queue q join pgmb.stream s on s.id = q.stream
join pgmb.segment g on g.stream = s.id and g.sealed_at is null and g.dropped_at is null
where q.ttl is not null
"""
_SHIFT_LOG = (
    "update pgmb.{segment} set id = coalesce(id, pgmb.derive_id(seq, published_at, %(salt)s)), "
    + _MOVED.format(column="published_at")
)
_SCHEDULES = (
    "select name, cron, timezone, next_at, xmin = %s::xid from pgmb.schedule where next_at is not null"
)

_STALE = timedelta(milliseconds=20)


class FrozenClock:
    """For a database that belongs to one test: no time passes in it but by `advance`.

    Delays, retries, leases, deduplication windows, times to live, rate limits, retention, schedules and what
    endpoints wait for go by it, whoever receives. It holds the rest still whenever `drain`, `hold` or
    `advance` is called. What was written since then is as old as it really is: to the real time that a test
    takes.
    """

    def __init__(self, broker: Source) -> None:
        self._connection: psycopg.Connection[Any] = connect(dsn_of(broker))
        self._connection.cursor_factory = psycopg.ClientCursor
        # A test that left a transaction open is told so instead of hanging.
        self._connection.execute("set lock_timeout = '20s'")
        self._last = "0"
        self._real = self.now = self._real_now()
        """What time it is by this clock."""
        self.hold()
        _frozen[self._name] = self

    def advance(self, duration: Duration) -> datetime:
        """Let that much time pass at once. Returns what time it is now."""
        ahead = cast("timedelta", interval(duration))
        if ahead < timedelta(0):
            raise ValueError("the clock cannot go back")
        self._shift(ahead)
        return self.now

    def hold(self) -> None:
        """Take back the time that really passed."""
        self._shift(timedelta(0))

    def hold_if_stale(self) -> None:
        """The same, unless it was done a moment ago."""
        if datetime.now(UTC) - self._held_at > _STALE:
            self.hold()

    async def fire_schedules(self, broker: AsyncBroker) -> int:
        """Publish what schedules say up to now, each due time that they ask for. Returns how many."""
        fired = 0
        # Between the due times in the database, by the real clock, and those that cron expressions mean.
        ahead = self.now - self._real
        for schedule in await broker.due_schedules():
            if schedule.due_at is None:
                continue
            expression, timezone = schedule.cron, schedule.timezone
            due: datetime | None = schedule.due_at + ahead
            while due is not None and due <= self.now:
                last = cron.newest(expression, timezone, due, self.now) if schedule.missed == "last" else due
                following = cron.next_after(expression, timezone, last)
                moved = None if following is None else following - ahead
                fired += await broker.fire(schedule.name, due - ahead, moved, last) is not None
                due = following
        return fired

    def close(self) -> None:
        """Let time pass again."""
        if _frozen.get(self._name) is self:
            del _frozen[self._name]
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _shift(self, ahead: timedelta) -> None:
        with self._connection.transaction():
            real = self._real_now()
            times = {"last": self._last, "passed": real - self._real, "ahead": ahead}
            for table, columns in _TIMES.items():
                moved = ", ".join(_MOVED.format(column=column) for column in columns)
                self._execute(_SHIFT.format(table=table, columns=moved) + _WHICH.get(table, ""), times)
            for stream, salt, number in self._connection.execute(_LOGS).fetchall():
                segment = _SHIFT_LOG.format(segment=f"segment_{stream}_{number}")
                self._execute(segment, {**times, "salt": salt})
            self._shift_schedules(real, ahead)
            if ahead:
                # As a ticker does: what is due comes with the next receive.
                self._connection.execute("select pgmb.tick(stream => name) from pgmb.stream")
            (last,) = self._connection.execute("select pg_current_xact_id()::xid::text").fetchone() or ("0",)
        self._last, self._real = last, real
        self.now += ahead
        self._held_at = datetime.now(UTC)

    def _shift_schedules(self, real: datetime, ahead: timedelta) -> None:
        """Due times stay where the cron expression puts them, by this clock."""
        for name, expression, timezone, next_at, known in self._connection.execute(
            _SCHEDULES, [self._last]
        ).fetchall():
            due = next_at + (self.now - self._real)
            if not known:
                due = cron.first_after(expression, timezone, self.now)
            self._connection.execute(
                "update pgmb.schedule set next_at = %s where name = %s",
                [due - (self.now + ahead - real), name],
            )

    def _execute(self, statement: str, parameters: dict[str, Any]) -> None:
        self._connection.execute(sql.SQL(cast("Any", statement)), parameters)

    def _real_now(self) -> datetime:
        (now,) = self._connection.execute("select clock_timestamp()").fetchone() or (None,)
        return cast("datetime", now)

    @property
    def _name(self) -> tuple[str, int, str]:
        return database(self._connection)


_frozen: dict[tuple[str, int, str], FrozenClock] = {}


def database(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> tuple[str, int, str]:
    """Which database a connection leads to."""
    return connection.info.host, connection.info.port, connection.info.dbname


def frozen_in(connection: psycopg.AsyncConnection[Any]) -> FrozenClock | None:
    """The clock that holds the time in a connection's database, if one does."""
    return _frozen.get(database(connection))
