"""Readers of server-sent events while everything around them goes wrong: each gets every event once.

Two processes serve them. Readers leave and come back, to either; some stop reading for a while and are let
go; processes are killed and started again; segments rotate; transactions commit late, and some roll back.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import psycopg

import pgmb
from harness.ports import free_port
from harness.serving import Served, serving
from harness.sse_readers import GROUPS, SseReaders, payload

RATE = 100
_PHANTOM = 1 << 20
"""Rolled back under numbers from here on."""
_LATEST_COMMIT = 2.0
_MOST_MEMORY = 400 << 20
_KILL_EVERY = 5.0


@dataclass(frozen=True, slots=True)
class Result:
    readers: int
    published: int
    report: dict[str, Any]
    kills: int
    rotations: int
    memory: int
    seconds: float

    @property
    def holds(self) -> bool:
        told = self.report
        return (
            not told["missing"]
            and not told["repeated"]
            and not told["phantoms"]
            and not told["resets"]
            and told["events"] > 0
            and self.memory < _MOST_MEMORY
        )

    def __str__(self) -> str:
        told = self.report
        return (
            f"server-sent events {'hold' if self.holds else 'VIOLATED'}: {self.readers} readers, "
            f"{self.published} published, {told['events']} arrived | {told['missing']} missed, "
            f"{told['repeated']} repeated, {told['phantoms']} phantom, {told['resets']} resets | "
            f"{told['came_back']} came back, {told['lost']} connections lost, {self.kills} kills, "
            f"{self.rotations} rotations | at most {self.memory >> 20} MB a process | {self.seconds:.0f} s"
        )


def run(dsn: str, *, readers: int, seconds: float, seed: int) -> Result:
    began = time.monotonic()
    chance = random.Random(seed)
    with pgmb.connect(dsn, max_size=1) as broker:
        key = broker.create_api_key("readers", ["read:main"]).key
    with ExitStack() as stack:
        servers = [stack.enter_context(Restarting(dsn)) for _ in range(2)]
        sse = SseReaders([server.port for server in servers], key)
        stack.callback(sse.close)
        sse.tell("connect", readers, 0)
        kills = rotations = memory = 0
        with _publishing(dsn, seed) as published, psycopg.connect(dsn, autocommit=True) as admin:
            until = time.monotonic() + seconds
            kill_at = time.monotonic() + _KILL_EVERY
            while time.monotonic() < until:
                sse.tell("churn", readers // 10, 2.0)
                sse.tell("stop", readers // 10, chance.uniform(0.5, 3))
                admin.execute("select pgmb.rotate()")
                rotations += 1
                memory = max(memory, *(server.memory for server in servers))
                time.sleep(2)
                if time.monotonic() > kill_at:
                    chance.choice(servers).restart()
                    kills += 1
                    kill_at = time.monotonic() + _KILL_EVERY
        report = sse.tell("finish", published[0])
        memory = max(memory, *(server.memory for server in servers))
    return Result(readers, published[0], report, kills, rotations, memory, time.monotonic() - began)


class Restarting:
    """A server on one port, killed and started again there."""

    def __init__(self, dsn: str) -> None:
        self.port = free_port()
        self._dsn = dsn
        self._stack = ExitStack()
        self._served: Served | None = None

    def __enter__(self) -> Restarting:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def pid(self) -> int:
        assert self._served is not None
        return self._served.process.pid

    @property
    def memory(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss)

    def restart(self) -> None:
        self._stack.close()
        self._start()

    def _start(self) -> None:
        self._served = self._stack.enter_context(
            serving(self._dsn, "serve", "--services", "http,ticker", "--in-one-process", port=self.port)
        )


@contextmanager
def _publishing(dsn: str, seed: int) -> Generator[list[int]]:
    """Events at an even pace, some of them in transactions that commit late, until the end; how many."""
    stop = threading.Event()
    published = [0]
    lock = threading.Lock()
    failed: list[BaseException] = []

    def number() -> int:
        with lock:
            published[0] += 1
            return published[0] - 1

    def in_time() -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            while not stop.wait(1 / RATE):
                connection.execute("select pgmb.publish('readers', %s)", [payload(number())])

    def late(chance: random.Random) -> None:
        with psycopg.connect(dsn) as connection:
            rolled_back = _PHANTOM
            while not stop.wait(chance.random() * 0.1):
                commits = chance.random() < 0.8
                for _ in range(chance.randint(1, 3)):
                    rolled_back += GROUPS + 1
                    given = number() if commits else rolled_back
                    connection.execute("select pgmb.publish('readers', %s)", [payload(given)])
                    stop.wait(chance.random() * _LATEST_COMMIT / 3)
                if commits:
                    connection.commit()
                else:
                    connection.rollback()

    def guarded(work: Any, *arguments: Any) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=guarded, args=(in_time,))]
    threads += [threading.Thread(target=guarded, args=(late, random.Random(seed + n))) for n in range(5)]
    for thread in threads:
        thread.start()
    try:
        yield published
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if failed:
        raise failed[0]
