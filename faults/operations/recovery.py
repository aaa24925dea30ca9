"""How long each service is away after an outage: a table of fault and service, in seconds.

`pgmb serve` and a worker reach the server through a proxy. Each fault is injected while they are idle. The
time counts from the server's return or, where it never was away, from the fault, until the service has done
work that was given to it after that.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import psycopg

import pgmb
from harness import processes
from harness.server import Server
from harness.serving import serving
from harness.stalling import StallingProxy
from pgmb.app.running import work

_GOAL_SECONDS = 5.0
_PATIENCE_SECONDS = 60.0
_FROZEN_SECONDS = 8.0
_SERVICES = ("ticker", "janitor", "scheduler", "dispatcher", "http", "worker")


@dataclass
class Table:
    rows: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        return all(seconds <= _GOAL_SECONDS for row in self.rows.values() for seconds in row.values())

    def __str__(self) -> str:
        lines = [f"{'':28}" + "".join(f"{name:>11}" for name in _SERVICES)]
        for fault, row in self.rows.items():
            lines.append(f"{fault:28}" + "".join(f"{row[name]:10.1f}s" for name in _SERVICES))
        times = [seconds for row in self.rows.values() for seconds in row.values()]
        lines.append(f"{len(times)} recoveries, slowest {max(times):.1f} s")
        return "\n".join(lines)


class _Worker:
    """A worker in a thread of this process."""

    def __init__(self, dsn: str) -> None:
        self.handled = 0
        self._app = pgmb.App(dsn)
        self._app.on("work", queue="recovery")(self._handle)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    async def _handle(self, payload: int) -> None:
        self.handled = payload

    def _run(self) -> None:
        self._loop.run_until_complete(work(self._app.work_spec(), self._stop))

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)


class _Stage:
    def __init__(self, server: Server, dsn: str, url: str, worker: _Worker) -> None:
        self.server = server
        self._dsn = dsn
        self._url = url
        self._worker = worker
        self._number = 0

    def measure(self, since: float | None = None) -> dict[str, float]:
        """Give every service something to do, and wait until each has done it."""
        began = time.monotonic() if since is None else since
        found: dict[str, float] = {}
        with psycopg.connect(self._dsn, autocommit=True) as db:
            done = self._tasks(db)
            while done and time.monotonic() - began < _PATIENCE_SECONDS:
                for name, is_done in list(done.items()):
                    if is_done():
                        found[name] = time.monotonic() - began
                        del done[name]
                time.sleep(0.02)
        return {name: found.get(name, float("inf")) for name in _SERVICES}

    def _tasks(self, db: psycopg.Connection[Any]) -> dict[str, Callable[[], bool]]:
        def value(statement: str) -> Any:
            row = db.execute(statement.encode()).fetchone()
            return None if row is None else row[0]

        self._number += 1
        number = self._number
        ticks = "select coalesce(max(id), 0) from pgmb.tick"
        sealed = "select count(*) from pgmb.segment where sealed_at is not null"
        fired = "select count(*) from pgmb.log_main where topic = 'scheduled'"
        beats = "select max(heartbeat_at) from pgmb.dispatcher"
        before = {statement: value(statement) for statement in (ticks, sealed, fired, beats)}
        db.execute("select pgmb.publish('work', to_json(%s::int))", [number])
        db.execute("select pgmb.rotate()")
        db.execute("update pgmb.schedule set next_at = clock_timestamp()")
        return {
            "ticker": lambda: value(ticks) > before[ticks],
            "janitor": lambda: value(sealed) > before[sealed],
            "scheduler": lambda: value(fired) > before[fired],
            "dispatcher": lambda: before[beats] is None or value(beats) > before[beats],
            "http": self._ready,
            "worker": lambda: self._worker.handled >= number,
        }

    def _ready(self) -> bool:
        try:
            return httpx.get(f"{self._url}/readyz", timeout=0.3).status_code == 200
        except httpx.HTTPError:
            return False


@contextmanager
def _frozen(server: Server) -> Generator[None]:
    family = [*processes.children(server.postmaster_pid), server.postmaster_pid]
    for pid in family:
        processes.send(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in reversed(family):
            processes.send(pid, signal.SIGCONT)


def run(server: Server, dsn: str, outages: Sequence[float] = (20.0,)) -> Table:
    table = Table()
    # Over TCP, as services on other machines.
    with StallingProxy(dsn) as proxy:
        with pgmb.connect(dsn) as broker:
            broker.create_schedule("recovery", "0 0 1 1 *", "scheduled")
        worker = _Worker(proxy.dsn)
        try:
            with serving(proxy.dsn, "serve", "--no-access-log") as served:
                stage = _Stage(server, dsn, served.url, worker)
                # At work, before anything happens.
                stage.measure()
                _faults(table, stage, proxy, outages)
        finally:
            worker.stop()
    return table


def _faults(table: Table, stage: _Stage, proxy: StallingProxy, outages: Sequence[float]) -> None:
    server = stage.server
    server.restart("fast")
    table.rows["restart, fast"] = stage.measure()
    server.restart("immediate")
    table.rows["restart, immediate"] = stage.measure()
    server.kill()
    server.start_again()
    table.rows["SIGKILL of all processes"] = stage.measure()
    for seconds in outages:
        server.stop("fast")
        time.sleep(seconds)
        server.start_again()
        table.rows[f"outage of {seconds:.0f} s"] = stage.measure()
    with _frozen(server):
        time.sleep(_FROZEN_SECONDS)
    table.rows[f"frozen for {_FROZEN_SECONDS:.0f} s"] = stage.measure()
    began = time.monotonic()
    proxy.stall()
    table.rows["connections stalled"] = stage.measure(began)
    server.admin().execute(
        "select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'pgmb%'"
    )
    table.rows["backends terminated"] = stage.measure()
