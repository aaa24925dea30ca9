"""small-traffic: the server CPU of an installation with little traffic, beside an earlier revision.

`pgmb serve` with ten endpoints and fifty clients of server-sent events, and two workers on five queues. Both
revisions run at the same time, each with its own package on a server of its own, and get the same events.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg

from bench import cpu
from bench.forms import Form
from bench.ground import SETTINGS, Ground, transactions
from bench.outcome import Outcome, Reading
from bench.revision import before, sources
from harness.databases import create_database
from harness.receiver import ReceiverProcess
from harness.server import Server
from harness.serving import serving
from harness.states import queue_names

CHECKS = [f"small traffic, server CPU before vs now, {rate} a second" for rate in (2, 20)]
_GOAL = 3.0
_TOPICS, _ENDPOINTS, _CLIENTS, _WORKERS = 5, 10, 50, 2
_SETTLE_SECONDS = 3.0
_APP = f"""
import pgmb

app = pgmb.App()
for topic in range({_TOPICS}):
    app.on(f"topic{{topic}}", queue=f"queue{{topic}}")(lambda event: None)
"""


def run(ground: Ground, form: Form) -> Outcome:
    rates = (2, 20) if form.name == "tiny" else (0, 2, 20, 200)
    rounds = {"tiny": 1, "brief": 3}.get(form.name, 9)
    seconds = {"tiny": 1.0, "brief": 5.0}.get(form.name, 10.0)
    outcome = Outcome(
        "small-traffic",
        f"{_WORKERS} workers, {_ENDPOINTS} endpoints, {_CLIENTS} SSE clients, against {before()}",
    )
    with contextlib.ExitStack() as stack:
        package = stack.enter_context(sources(before()))
        sites = {
            "now": stack.enter_context(_Installation(ground.major, None)),
            "before": stack.enter_context(_Installation(ground.major, package)),
        }
        for rate in rates:
            _publish(sites, rate, _SETTLE_SECONDS if form.name != "tiny" else 0.5)
            for _ in range(rounds):
                outcome.readings += _round(sites, rate, seconds)
        published = {name: site.published * _ENDPOINTS // _TOPICS for name, site in sites.items()}
        for name, site in sites.items():
            # Each event goes to two endpoints. Both revisions must have posted all of them.
            site.receiver.wait_for(published[name])
    for check, rate in zip(CHECKS, (2, 20), strict=True):
        outcome.checks.append(outcome.compare(check, f"now, {rate}/s", f"before, {rate}/s", _GOAL))
    for rate in rates:
        now, then = (
            f"{100 * outcome.middle(f'{name}, {rate}/s', 'cores'):.1f} % of a core,"
            f" {outcome.middle(f'{name}, {rate}/s', 'transactions'):.0f} transactions a second"
            for name in ("now", "before")
        )
        outcome.notes.append(f"{rate} events a second: {now}; before: {then}")
    return outcome


class _Installation:
    """A server with `pgmb serve`, workers and clients. `package`: another revision's sources."""

    def __init__(self, major: int, package: Path | None) -> None:
        self._stack = contextlib.ExitStack()
        self._major = major
        self._package = package
        self.published = 0

    def __enter__(self) -> Self:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="pgmb-small-")))
        (folder / "small_traffic_app.py").write_text(_APP)
        self.server = self._stack.enter_context(Server.start(self._major, settings=SETTINGS, name="bench"))
        self.receiver = self._stack.enter_context(ReceiverProcess())
        dsn = self.server.dsn(create_database(self.server))
        paths = [str(path) for path in (self._package, folder) if path is not None]
        environment = {"PYTHONPATH": os.pathsep.join(paths), "PGMB_DSN": dsn}
        everything = {**os.environ, **environment}

        def pgmb(*arguments: str) -> str:
            command = [sys.executable, "-m", "pgmb", *arguments]
            return subprocess.run(
                command, env=everything, cwd=folder, check=True, capture_output=True, text=True
            ).stdout

        pgmb("install")
        self.connection: psycopg.Connection[Any] = self._stack.enter_context(
            psycopg.connect(dsn, autocommit=True)
        )
        for number in range(_ENDPOINTS):
            self.connection.execute(
                "select pgmb.create_endpoint(%s, %s, %s)",
                [f"endpoint{number}", f"{self.receiver.url}/{number}", [f"topic{number % _TOPICS}"]],
            )
        key = pgmb("keys", "create", "clients", "--scope", "read:main").strip().splitlines()[-1].split()[-1]
        served = self._stack.enter_context(
            serving(dsn, "serve", "--allow", "127.0.0.0/8", environment=environment)
        )
        for _ in range(_WORKERS):
            worker = subprocess.Popen(
                [sys.executable, "-m", "pgmb", "work", "small_traffic_app:app"],
                env=everything,
                cwd=folder,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            self._stack.callback(worker.wait)
            self._stack.callback(worker.kill)
        threading.Thread(target=asyncio.run, args=[_clients(served.port, key)], daemon=True).start()
        self._wait_for_workers()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def publish(self) -> None:
        topic = f"topic{self.published % _TOPICS}"
        self.connection.execute("select pgmb.publish(%s, '{}')", [topic], prepare=True)
        self.published += 1

    def cpu(self) -> float:
        return cpu.of_server(self.server.postmaster_pid)

    def transactions(self) -> int:
        return transactions(self.connection)

    def _wait_for_workers(self) -> None:
        deadline = time.monotonic() + 60
        while sum(name.startswith("queue") for name in queue_names(self.connection)) != _TOPICS:
            if time.monotonic() > deadline:
                raise TimeoutError("the workers do not start")
            time.sleep(0.1)


async def _clients(port: int, key: str) -> None:
    async def read(topic: str) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.closing(writer):
            writer.write(
                f"GET /v1/streams/main/events?topic={topic} HTTP/1.1\r\nHost: pgmb\r\n"
                f"Authorization: Bearer {key}\r\n\r\n".encode()
            )
            while await reader.read(65536):
                pass

    topics = [f"topic{number % _TOPICS}" for number in range(_CLIENTS)]
    await asyncio.gather(*map(read, topics), return_exceptions=True)


def _publish(sites: dict[str, _Installation], rate: float, seconds: float) -> int:
    """The same events to all, at an even pace. Returns how many to each."""
    start, count = time.monotonic(), 0
    while (passed := time.monotonic() - start) < seconds:
        if rate and passed >= count / rate:
            for site in sites.values():
                site.publish()
            count += 1
            continue
        due = count / rate if rate else seconds
        time.sleep(max(0.0, min(due, seconds) - passed))
    return count


def _round(sites: dict[str, _Installation], rate: int, seconds: float) -> list[Reading]:
    started = {name: (site.cpu(), site.transactions()) for name, site in sites.items()}
    began = time.monotonic()
    count = _publish(sites, rate, seconds)
    wall = time.monotonic() - began
    readings = []
    for name, site in sites.items():
        used = site.cpu() - started[name][0]
        ended = site.transactions() - started[name][1]
        extra = {"cores": used / wall, "transactions": ended / wall}
        readings.append(Reading(f"{name}, {rate}/s", count, wall, used, 0.0, extra))
    return readings
