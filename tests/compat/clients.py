"""PyPI's PGMQ clients behind one face: sync and async classes are called alike, with plain calls."""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import Callable, Generator
from typing import Any

from pgmq import AsyncPGMQueue, SQLAlchemyAsyncPGMQueue, SQLAlchemyPGMQueue, SyncPGMQueue
from psycopg.conninfo import conninfo_to_dict

CLASSES: dict[str, Any] = {
    "sync": SyncPGMQueue,
    "async": AsyncPGMQueue,
    "sqlalchemy": SQLAlchemyPGMQueue,
    "sqlalchemy-async": SQLAlchemyAsyncPGMQueue,
}

Steps = Generator[tuple[Any, ...], Any, None]
"""What to call inside a transaction: yields (method, argument, ...) and is sent the answer."""


class Client:
    """Calls a client's method by its name and waits for the answer where it is a coroutine."""

    def __init__(self, kind: str, dsn: str) -> None:
        parts = conninfo_to_dict(dsn)
        self.kind = kind
        self._loop = asyncio.new_event_loop()
        self.queue = CLASSES[kind](
            host=parts["host"],
            port=str(parts["port"]),
            database=parts["dbname"],
            username=parts["user"],
            password="any",
            init_extension=False,
            pool_size=2,
        )
        if hasattr(self.queue, "init"):
            self._wait(self.queue.init())

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.queue, name)

        def call(*args: Any, **options: Any) -> Any:
            with warnings.catch_warnings():
                # list_queues() warns of its own change of type.
                warnings.simplefilter("ignore", UserWarning)
                return self._wait(method(*args, **options))

        return call

    def in_transaction(self, steps: Steps) -> None:
        """Makes the calls that `steps` yields in one transaction."""
        if self.kind == "sync":
            with self.queue.pool.connection() as connection, connection.transaction():
                self._step(steps, connection)
        elif self.kind == "sqlalchemy":
            with self.queue.engine.begin() as connection:
                self._step(steps, connection)
        else:
            self._wait(self._in_async_transaction(steps))

    async def _in_async_transaction(self, steps: Steps) -> None:
        if self.kind == "async":
            async with self.queue.pool.acquire() as connection, connection.transaction():
                await self._step_async(steps, connection)
        else:
            async with self.queue.engine.begin() as connection:
                await self._step_async(steps, connection)

    def _step(self, steps: Steps, connection: Any) -> None:
        answer = None
        try:
            while True:
                name, *args = steps.send(answer)
                answer = getattr(self.queue, name)(*args, conn=connection)
        except StopIteration:
            pass

    async def _step_async(self, steps: Steps, connection: Any) -> None:
        answer = None
        try:
            while True:
                name, *args = steps.send(answer)
                answer = await getattr(self.queue, name)(*args, conn=connection)
        except StopIteration:
            pass

    def _wait(self, answer: Any) -> Any:
        return self._loop.run_until_complete(answer) if inspect.isawaitable(answer) else answer

    def close(self) -> None:
        if hasattr(self.queue, "dispose"):
            self.queue.dispose()
        else:
            self._wait(self.queue.close())
        self._loop.close()
