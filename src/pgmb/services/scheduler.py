"""The Scheduler publishes what schedules say, each due time once."""

from __future__ import annotations

import logging
from datetime import datetime

import psycopg

from pgmb import cron
from pgmb._async.broker import AsyncBroker
from pgmb.errors import PgmbError
from pgmb.types import DueSchedule

logger = logging.getLogger("pgmb.services")

_RUNS_PER_TURN = 100


class Scheduler:
    """Looks every `every` seconds, and when the next schedule falls due, by the database's clock.

    Any number may run: publishing and moving the schedule on is one step, which only one of them can take.
    """

    name = "scheduler"

    def __init__(self, every: float = 1.0) -> None:
        self.every = every

    async def turn(self, broker: AsyncBroker) -> float:
        pause = self.every
        for schedule in await broker.due_schedules(self.every):
            due: datetime | None = schedule.due_at
            if schedule.due_at <= schedule.now:
                due = await self._publish(broker, schedule)
            if due is not None:
                pause = min(pause, (due - schedule.now).total_seconds())
        return max(pause, 0.0)

    async def _publish(self, broker: AsyncBroker, schedule: DueSchedule) -> datetime | None:
        """Publishes what is due of one schedule, and says when it falls due again."""
        name, expression, timezone = schedule.name, schedule.cron, schedule.timezone
        due = schedule.due_at
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
