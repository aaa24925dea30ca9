"""Workers say that they live: who holds a lease is known, and at rest that costs no statement."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import Any
from uuid import UUID

import pytest

import pgmb
from harness.waiting import until
from pgmb.app import heartbeats, idle
from tests.app.stage import working


async def test_a_worker_says_that_it_lives_and_holds_its_leases(dsn: str) -> None:
    """At rest its heartbeats travel with polls; a lease names the process; attempts keep their tracebacks."""
    app, hold = pgmb.App(dsn), asyncio.Event()

    @app.on("a", queue="q", concurrency=1, retry=[0.0, 3600.0])
    async def handle(number: int) -> None:
        if number == 0:
            await hold.wait()
        else:
            raise ValueError(f"no {number}")

    async with working(app) as broker:

        async def alive() -> bool:
            return [one.queues for one in await broker.workers() if one.alive] == [["q"]]

        await until(alive)
        (worker,) = await broker.workers()
        assert (worker.pid, worker.host, worker.application) == (
            os.getpid(),
            socket.gethostname(),
            "pgmb work",
        )
        held = await broker.publish("a", 0)

        async def fate(event: UUID) -> pgmb.Fate:
            (one,) = (await broker.event_fate(event)).consumers
            return one

        async def leased() -> bool:
            one = await fate(held)
            # The heartbeat that names the connection may come a moment later.
            return one.state == "leased" and one.holder is not None and one.holder.worker is not None

        await until(leased)
        holder = (await fate(held)).holder
        assert holder is not None
        assert (holder.pid, holder.host, holder.worker) == (os.getpid(), worker.host, worker.worker)
        hold.set()
        failing = await broker.publish("a", 1)

        async def failed_twice() -> bool:
            return len((await fate(failing)).errors) == 2

        await until(failed_twice)
        found = await fate(failing)
        assert (found.state, found.attempt, found.error) == ("retrying", 3, "ValueError: no 1")
        for number, attempt in enumerate(found.errors, 1):
            assert attempt.attempt == number
            assert attempt.detail is not None
            assert attempt.detail.startswith("Traceback")
            assert "in handle" in attempt.detail
            assert attempt.detail.endswith("ValueError: no 1")
        assert (await fate(held)).state == "done"
    async with await pgmb.aconnect(dsn) as broker:
        assert await broker.workers() == []


async def test_a_busy_worker_sends_its_heartbeats_by_themselves(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "HEARTBEAT_EVERY_SECONDS", 0.05)
    monkeypatch.setattr(heartbeats, "_POLLER_SECONDS", 0.05)
    monkeypatch.setattr(idle.IdlePoller, "run", lambda self, subscriptions: asyncio.sleep(3600))
    app = pgmb.App(dsn)
    app.on("a", queue="q")(lambda event: None)
    stop = asyncio.Event()
    async with await pgmb.aconnect(dsn) as broker:
        task = asyncio.create_task(app.work(stop))
        seen = set[Any]()

        async def beaten_thrice() -> bool:
            seen.update(one.heartbeat_at for one in await broker.workers())
            return len(seen) >= 3

        await until(beaten_thrice)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
