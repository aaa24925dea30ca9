"""Worker processes: made ready first, then let go together, and measured until the last is done."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

from bench import cpu
from bench.contenders import contender
from bench.wire import Client

Work = Callable[[], dict[str, Any]]
"""The measured part. What it returns goes back to the parent; `messages` is how many it handled."""

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["bench.crew", "bench.loops", "bench.pacing"])


@dataclass(frozen=True)
class Job:
    """`make(client, contender, **arguments)` gets ready in the worker and returns its `Work`."""

    dsn: str
    contender: str
    make: Callable[..., Work]
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Shift:
    """What a crew did."""

    results: list[dict[str, Any]]
    wall: float
    server_cpu: float
    backend_cpu: float

    def total(self, key: str) -> float:
        return float(sum(result.get(key, 0) for result in self.results))


def work(jobs: Sequence[Job], postmaster: int) -> Shift:
    """Runs the jobs at once, each in a process of its own. `results` come in the jobs' order."""
    crew = []
    for job in jobs:
        ours, theirs = _processes.Pipe()
        process = _processes.Process(target=_worker, args=(job, theirs), daemon=True)
        process.start()
        theirs.close()
        crew.append((process, ours))
    try:
        for _, pipe in crew:
            _hear(pipe)
        before, started = cpu.of_server(postmaster), time.perf_counter()
        for _, pipe in crew:
            pipe.send("go")
        results = [_hear(pipe) for _, pipe in crew]
        # The workers are still connected: their backends' time is there to be read.
        wall, server = time.perf_counter() - started, cpu.of_server(postmaster) - before
        for _, pipe in crew:
            pipe.send("leave")
    finally:
        for process, pipe in crew:
            pipe.close()
            process.join(10)
            if process.is_alive():
                process.kill()
    return Shift(results, wall, server, sum(result["backend_cpu"] for result in results))


@contextlib.contextmanager
def beside(job: Job) -> Generator[None]:
    """Runs a job while the block lasts; its `make` gets `going`, which says whether to go on."""
    stop = _processes.Event()
    process = _processes.Process(target=_aside, args=(job, stop), daemon=True)
    process.start()
    try:
        yield
        if not process.is_alive():
            raise RuntimeError(f"{job.make.__name__} ended before its time")
    finally:
        stop.set()
        process.join(10)
        if process.is_alive():
            process.kill()


def _aside(job: Job, stop: Event) -> None:
    chosen = contender(job.contender)
    client = Client(job.dsn, chosen.settings)
    job.make(client, chosen, going=lambda: not stop.is_set(), **job.arguments)()
    client.close()


def _hear(pipe: Connection) -> Any:
    said = pipe.recv()
    if isinstance(said, str) and said != "ready":
        raise RuntimeError(f"a worker failed:\n{said}")
    return said


def _worker(job: Job, pipe: Connection) -> None:
    try:
        chosen = contender(job.contender)
        client = Client(job.dsn, chosen.settings)
        measured = job.make(client, chosen, **job.arguments)
        pipe.send("ready")
        pipe.recv()
        backend, own = cpu.of_process(client.backend), time.process_time()
        result = measured()
        result["client_cpu"] = time.process_time() - own
        result["backend_cpu"] = cpu.of_process(client.backend) - backend
        pipe.send(result)
        pipe.recv()
        client.close()
    except EOFError:
        return
    except BaseException:
        pipe.send(traceback.format_exc())
