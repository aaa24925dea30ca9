"""Recurring publishes: create, change, drop, and which there are."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from pgmb import cron as expressions
from pgmb._async.calls import AsyncCalls
from pgmb._core import statements, wire
from pgmb._core.statements import call
from pgmb.errors import ScheduleNotFound
from pgmb.outbox import AsyncConnectionLike
from pgmb.types import DueSchedule, Duration, Schedule, moment


class AsyncSchedules(AsyncCalls):
    async def create_schedule(
        self,
        name: str,
        cron: str,
        topic: str,
        payload: Any = None,
        *,
        timezone: str = "UTC",
        key: str | None = None,
        headers: Any = None,
        stream: str = "main",
        missed: Literal["last", "all"] = "last",
        app: str | None = None,
        conn: AsyncConnectionLike | None = None,
    ) -> bool:
        """Publish an event at each time that `cron` names, by a clock in `timezone`; or change that schedule.

        A Scheduler publishes: `pgmb work` runs one. Of the times when none was running the last is
        published, with `missed="all"` all are. True if it was created, False if there was one of that name.
        `app`: the app that declares it; what an app owns stays its own until it is dropped.
        """
        now = moment(await self._value(statements.NOW, conn))
        next_at = expressions.first_after(cron, timezone, now)
        return bool(
            await self._value(
                call(
                    "create_schedule",
                    name=name,
                    cron=cron,
                    topic=topic,
                    payload=wire.json(payload),
                    next_at=next_at,
                    timezone=timezone,
                    key=key,
                    headers=wire.optional_json(headers),
                    stream=stream,
                    missed=missed,
                    app=app,
                ),
                conn,
            )
        )

    async def drop_schedule(self, name: str, *, conn: AsyncConnectionLike | None = None) -> bool:
        """Drop a schedule. True if there was one."""
        return bool(await self._value(call("drop_schedule", name=name), conn))

    async def pause_schedule(self, name: str, *, conn: AsyncConnectionLike | None = None) -> None:
        """Stop a schedule until `resume_schedule`."""
        await self._value(call("pause_schedule", name=name), conn)

    async def resume_schedule(self, name: str, *, conn: AsyncConnectionLike | None = None) -> None:
        """Let a schedule go on from now: what was due while it was paused is not made up for."""
        for row in await self._rows(statements.SCHEDULES, conn):
            if row[0] == name:
                _, cron, timezone, *_, now = row
                next_at = expressions.next_after(cron, timezone, moment(now))
                await self._value(statements.resume_schedule(name, next_at), conn)
                return
        missing = ScheduleNotFound(f"schedule {name!r} does not exist")
        missing.advise("Create it with create_schedule.")
        raise missing

    async def run_schedule(self, name: str, *, conn: AsyncConnectionLike | None = None) -> UUID:
        """Publish a schedule's event now, also if it is paused, and return the event's id.

        The schedule stays as it is: its next due time is published too.
        """
        return wire.uuid(await self._value(call("run_schedule", name=name), conn))

    async def schedules(self, *, conn: AsyncConnectionLike | None = None) -> list[Schedule]:
        """Every schedule, by name."""
        return [Schedule.of(row) for row in await self._rows(statements.SCHEDULES, conn)]

    async def due_schedules(
        self, ahead: Duration = 0, *, conn: AsyncConnectionLike | None = None
    ) -> list[DueSchedule]:
        """The schedules that are due, or will be within `ahead`, soonest first: what a Scheduler asks."""
        rows = await self._rows(statements.due_schedules(ahead), conn)
        return [
            DueSchedule(
                name,
                cron,
                timezone,
                missed,
                None if due_at is None else moment(due_at),
                moment(now),
                None if recompute_after is None else moment(recompute_after),
            )
            for name, cron, timezone, missed, due_at, now, recompute_after in rows
        ]

    async def reschedule(
        self,
        name: str,
        due_at: datetime | None,
        next_at: datetime | None,
        *,
        conn: AsyncConnectionLike | None = None,
    ) -> bool:
        """Correct the due time of a schedule that a wrong clock decided: what a Scheduler does.

        Returns whether the schedule still stood at `due_at`, decided by such a clock.
        """
        return bool(await self._value(statements.reschedule(name, due_at, next_at), conn))

    async def fire(
        self,
        name: str,
        due_at: datetime,
        next_at: datetime | None,
        stands_for: datetime | None = None,
        *,
        conn: AsyncConnectionLike | None = None,
    ) -> UUID | None:
        """Publish a schedule's event and move it on, if it still stands at `due_at`: what a Scheduler does.

        The event's id, or None where another was faster.
        """
        given = await self._value(statements.fire(name, due_at, next_at, stands_for), conn)
        return None if given is None else wire.uuid(given)
