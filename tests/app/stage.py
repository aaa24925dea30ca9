"""What tests of apps share: an app at work, and real worker processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import pgmb
from harness.waiting import PATIENCE, until


@contextlib.asynccontextmanager
async def working(app: pgmb.App, **options: Any) -> AsyncGenerator[pgmb.AsyncBroker]:
    """The app at work, its consumers started; at the end it stops, and whatever it raised is raised."""
    stop = asyncio.Event()
    async with await pgmb.aconnect(app.dsn) as broker:
        others = asyncio.all_tasks()
        task = asyncio.create_task(app.work(stop, **options))

        def consuming() -> bool:
            started = asyncio.all_tasks() - others
            return task.done() or "pgmb idle" in {one.get_name() for one in started}

        try:
            await until(consuming)
            if not task.done():
                yield broker
        finally:
            stop.set()
            async with asyncio.timeout(PATIENCE):
                await task


async def settled(broker: pgmb.AsyncBroker, queue: str) -> bool:
    """Whether nothing waits, is leased or is to be retried."""
    # In this order: what leaves one is found in the next.
    if await broker.queue_depth(queue):
        return False
    (status,) = [one for one in await broker.queue_status() if one.queue == queue]
    # What an ordered queue has leased may wait again since the first look.
    return not (status.leases or status.retries or status.waiting)


class Workers:
    """`pgmb work` in a process of its own, with an app in a file of its own."""

    def __init__(self, folder: Path, dsn: str, source: str) -> None:
        self.folder = folder
        (folder / "shop.py").write_text(textwrap.dedent(source).replace("DSN", repr(dsn)))
        self.log = folder / "log.txt"

    @contextlib.contextmanager
    def running(
        self, *options: str, target: str = "shop:app", services: bool = False
    ) -> Generator[subprocess.Popen[bytes]]:
        command = [sys.executable, "-m", "pgmb", "work", target, *options]
        command += [] if services else ["--no-services"]
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                # As a shell starts it: a terminal signals the group.
                process_group=0,
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def lines(self, name: str = "seen.txt") -> list[str]:
        """What the app wrote down, a line each."""
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def logged(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
