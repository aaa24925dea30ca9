"""The Scheduler publishes what schedules say, each due time once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import datetime
from typing import Final

import psycopg

from pgmb import cron
from pgmb._async.broker import AsyncBroker
from pgmb.errors import PgmbError
from pgmb.types import DueSchedule

logger = logging.getLogger("pgmb.services")

_RUNS_PER_TURN = 100

STEP: Final = 60.0
"""Seconds by which the database's clock must have run ahead of this process's own for that to be a step."""
STANDS_AFTER: Final = 15.0
"""Seconds after which a clock that stepped, ahead or back, is taken for right."""


class ClockSteps:
    """Tells a database's clock that jumped ahead a moment ago from one that can be believed.

    Events that were published by a wrong clock cannot be taken back. So a step ahead must have stood for a
    while. After a step back less is due; the Scheduler waits as long before it decides due times again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._offset: float | None = None
        self._stepped: tuple[float, float] | None = None
        """The offset after a step ahead, and since when it has stood."""

    @property
    def knows_a_time(self) -> bool:
        """Whether there is a time to compare with."""
        return self._offset is not None

    def believes(self, now: datetime) -> bool:
        """Whether `now`, which the database just said, can be believed."""
        at = self._clock()
        offset = now.timestamp() - at
        if self._offset is None or offset <= self._offset + STEP:
            self._offset, self._stepped = offset, None
            return True
        if self._stepped is None or abs(offset - self._stepped[0]) > STEP:
            logger.warning(
                "scheduler: the database's clock jumped ahead by %.0f s: waiting %.0f s to see if it stays",
                offset - self._offset,
                STANDS_AFTER,
            )
            self._stepped = offset, at
        if at - self._stepped[1] < STANDS_AFTER:
            return False
        self._offset, self._stepped = offset, None
        return True


class Scheduler:
    """Looks every `every` seconds, and when the next schedule falls due, by the database's clock.

    Any number may run: publishing and moving the schedule on is one step, which only one of them can take.
    """

    name = "scheduler"

    def __init__(self, every: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.every = every
        self._clock = clock
        self._steps = ClockSteps(clock)
        self._wrong_since: float | None = None
        """Since when there are due times that a clock decided which was wrong then, or is wrong now."""

    async def turn(self, broker: AsyncBroker) -> float:
        pause = self.every
        if not self._steps.knows_a_time:
            self._steps.believes(await _now(broker))
        schedules = await broker.due_schedules(self.every)
        if schedules and not self._steps.believes(schedules[0].now):
            return self.every
        stands = self._stands(any(schedule.recompute_after is not None for schedule in schedules))
        for schedule in schedules:
            due = schedule.due_at
            if schedule.recompute_after is not None:
                if not stands:
                    continue
                due = await self._correct(broker, schedule, schedule.recompute_after)
            elif due is not None and due <= schedule.now:
                due = await self._publish(broker, schedule, due)
            if due is not None:
                pause = min(pause, (due - schedule.now).total_seconds())
        return max(pause, 0.0)

    def _stands(self, wrong: bool) -> bool:
        """Whether due times that a wrong clock decided have been found for a while."""
        if not wrong:
            self._wrong_since = None
            return False
        if self._wrong_since is None:
            self._wrong_since = self._clock()
        return self._clock() - self._wrong_since >= STANDS_AFTER

    async def _correct(self, broker: AsyncBroker, schedule: DueSchedule, after: datetime) -> datetime | None:
        """Decides a due time again that a wrong clock decided."""
        try:
            due = cron.next_after(schedule.cron, schedule.timezone, after)
        except PgmbError as error:
            logger.warning("scheduler: %s: %s", schedule.name, error)
            return None
        if await broker.reschedule(schedule.name, schedule.due_at, due):
            logger.info("scheduler: %s: due %s, which was %s", schedule.name, due, schedule.due_at)
        return due

    async def _publish(self, broker: AsyncBroker, schedule: DueSchedule, due: datetime) -> datetime | None:
        """Publishes what is due of one schedule, and says when it falls due again."""
        name, expression, timezone = schedule.name, schedule.cron, schedule.timezone
        try:
            if schedule.missed == "last":
                last = cron.newest(expression, timezone, due, schedule.now)
                following = cron.next_after(expression, timezone, last)
                await self._fire(broker, name, due, following, last)
                return following
            for _ in range(_RUNS_PER_TURN):
                following = cron.next_after(expression, timezone, due)
                await self._fire(broker, name, due, following, due)
                if following is None or following > schedule.now:
                    return following
                due = following
            return due
        except (PgmbError, psycopg.DatabaseError) as error:
            if isinstance(error, psycopg.OperationalError):
                raise
            # A full queue, a time zone unknown to this machine: it stays due and is tried again.
            logger.warning("scheduler: %s: %s", name, error)
            return None

    async def _fire(
        self, broker: AsyncBroker, name: str, due: datetime, following: datetime | None, stands_for: datetime
    ) -> None:
        published = await broker.fire(name, due, following, stands_for)
        outcome = "somebody was faster" if published is None else "published"
        logger.debug("scheduler: %s of %s: %s", name, stands_for, outcome)


async def _now(broker: AsyncBroker) -> datetime:
    async with broker.own_connection() as connection:
        rows = await (await connection.execute("select clock_timestamp()")).fetchall()
    now: datetime = rows[0][0]
    return now
