"""Schedules as an app declares them, and the database brought to that."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from psycopg.errors import LockNotAvailable

from pgmb._async.broker import AsyncBroker
from pgmb._core import loggers, wire
from pgmb.app import settling
from pgmb.app.heartbeats import HEARTBEAT_EVERY_SECONDS
from pgmb.errors import PermissionDenied, translated

logger = loggers.logger("pgmb.app")

_DECLARE = "select pgmb.declare_schedules(%s::uuid, %s::jsonb)"
_AGAIN_EVERY_SECONDS = HEARTBEAT_EVERY_SECONDS


class Schedules:
    """What a worker process declares of its schedules, and the changes that wait for other workers to end."""

    def __init__(
        self,
        broker: AsyncBroker,
        worker: UUID,
        schedules: Mapping[str, dict[str, Any]],
        app: str | None = None,
    ) -> None:
        """`app`: its name. An app that has one owns the schedules that it creates."""
        self._broker = broker
        self._worker = worker
        self._app = app
        self._schedules = schedules
        self._pending = list(schedules)
        self._told = asyncio.Event()

    async def declare(self) -> bool:
        """Create the schedules that are not there, and change those that all live workers declare alike.

        False if there is none, or the role may not: others may have created them and fire them.
        """
        if not self._schedules:
            return False
        try:
            await self._tell()
        except PermissionDenied as error:
            logger.warning("using the existing schedules: %s", error)
            self._schedules, self._pending = {}, []
            return False
        await self._warn()
        return True

    async def _warn(self) -> None:
        """Log which schedules stay as they are, and why."""
        if not self._pending:
            return
        owners = {one.name: one.app for one in await self._broker.schedules()}
        owned = [name for name in self._pending if self._app and owners.get(name) not in (None, self._app)]
        for name in owned:
            logger.warning(
                "schedule %s belongs to app %r, and this is app %r: it stays as it is. Take another name for"
                " it (name=...), or drop the other: pgmb schedules drop %s",
                name,
                owners[name],
                self._app,
                name,
            )
        if others := [name for name in self._pending if name not in owned]:
            logger.warning(
                "schedules %s: live workers declare them otherwise; they stay as they are until those end",
                ", ".join(others),
            )

    def repeat(self) -> None:
        """Declare all of them again: others may have changed what this worker declares."""
        self._pending = list(self._schedules)
        self._told.set()

    async def run(self) -> None:
        """Make the changes that wait, once the workers that declare otherwise are gone. Until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), _AGAIN_EVERY_SECONDS if self._pending else None)
            self._told.clear()
            try:
                await self._tell()
            except settling.DATABASE_ERRORS as error:
                logger.warning("cannot declare schedules: %s", str(error).strip())

    async def _tell(self) -> None:
        pending = self._pending
        digests = {name: _digest(settings) for name, settings in self._schedules.items()}
        try:
            async with self._broker.own_connection() as conn, conn.transaction():
                with translated():
                    cursor = await conn.execute(_DECLARE, [self._worker, json.dumps(digests)])
                    ((agreed,),) = await cursor.fetchall()
                changing = [name for name in pending if name in agreed]
                for name in changing:
                    await self._broker.create_schedule(
                        name, **self._schedules[name], app=self._app, conn=conn
                    )
        except LockNotAvailable:
            return  # another process declares its own at this moment
        # A repeat that was asked for meanwhile is still to come.
        if self._pending is pending:
            self._pending = [name for name in pending if name not in changing]


def _digest(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(wire.json(sorted(settings.items()))).hexdigest()
