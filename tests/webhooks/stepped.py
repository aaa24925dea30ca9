"""A dispatcher whose time passes only when a test says so, before a server that answers as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import psycopg

import pgmb
from harness.receiver import Answer, Receiver
from harness.states import deliveries, pass_time
from pgmb.webhooks.client import WebhookClient
from pgmb.webhooks.dispatcher import DispatchLoop
from pgmb.webhooks.egress import Guard

LOOPBACK = ("127.0.0.0/8",)

_MOVED = {
    "endpoint": ("probe_at",),
    "endpoint_activity": ("failing_since", "paid_until"),
}


class SteppedDispatcher:
    """The process's clock and whatever in the database waits for a time go by `advance`."""

    def __init__(
        self,
        dsn: str,
        db: psycopg.Connection[Any],
        answer: Answer = lambda _: 204,
        *,
        lease_for: float = 3600.0,
    ) -> None:
        self.db = db
        self.now = 1000.0
        self.receiver = Receiver(answer)
        self._dsn = dsn
        self._lease_for = lease_for

    async def __aenter__(self) -> Self:
        await self.receiver.__aenter__()
        self._poster = await WebhookClient(Guard(LOOPBACK)).__aenter__()
        self._broker = await pgmb.aconnect(self._dsn, max_size=1)
        self._dispatch = DispatchLoop(self._poster, lease_for=self._lease_for, clock=lambda: self.now)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._dispatch.stop(self._broker)
        await self._broker.close()
        await self._poster.__aexit__(None, None, None)
        await self.receiver.__aexit__(None, None, None)

    def endpoint(self, name: str = "e", **settings: Any) -> None:
        """Create one that gets all events of topic t."""
        more = "".join(f", {setting} => %({setting})s" for setting in settings)
        statement = f"select pgmb.create_endpoint(%(name)s, %(url)s, '{{t}}'{more})"
        self.db.execute(statement, {"name": name, "url": f"{self.receiver.url}/{name}", **settings})

    def publish(self, count: int = 1) -> None:
        self.db.execute("select pgmb.publish('t', to_json(n)) from generate_series(1, %s) n", [count])

    def value(self, statement: str) -> Any:
        ((only,),) = self.db.execute(statement).fetchall()
        return only

    def waits(self) -> list[float]:
        """In how many seconds each delivery that waits is due, soonest first."""
        return sorted(event.due_in or 0 for event in deliveries(self.db) if not event.leased)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        pass_time(self.db, seconds)
        for table, columns in _MOVED.items():
            moved = ", ".join(f"{column} = {column} - %s" for column in columns)
            span = timedelta(seconds=seconds)
            self.db.execute(f"update pgmb.{table} set {moved}", [span] * len(columns))

    async def turn(self) -> None:
        """One turn of the dispatcher."""
        await self._dispatch.turn(self._broker)
        await asyncio.sleep(0.001)

    async def until(self, done: Callable[[], object], turns: int = 400) -> None:
        """Take turns until something is so, with requests in flight."""
        for _ in range(turns):
            await self.turn()
            await asyncio.sleep(0.005)
            if done():
                return
            self.now += 0.3
        raise TimeoutError(f"it was not so after {turns} turns")

    async def play(self) -> int:
        """Let the dispatcher do all that is due now. Returns how many requests that made."""
        before = len(self.receiver.requests)
        quiet = 0
        async with asyncio.timeout(120):
            while quiet < 5:
                came = len(self.receiver.requests)
                await self._dispatch.turn(self._broker)
                await asyncio.sleep(0.01)
                # A little of its time, so that it looks again: far less than anything here waits for.
                self.now += 0.3
                busy = self._dispatch.busy or len(self.receiver.requests) > came
                quiet = 0 if busy else quiet + 1
        return len(self.receiver.requests) - before
