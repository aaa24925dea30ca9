"""Worker processes: made ready first, then let go together, as often as one likes."""

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
"""The measured part, run again and again. What it returns goes back; `messages` is how many it handled."""

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


class Crew:
    """Workers, one process a job, made ready at the start. `results` come in the jobs' order."""

    def __init__(self, jobs: Sequence[Job], postmaster: int) -> None:
        self._postmaster = postmaster
        self._workers = []
        for job in jobs:
            ours, theirs = _processes.Pipe()
            process = _processes.Process(target=_worker, args=(job, theirs), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        try:
            self._answers()
        except BaseException:
            self.close()
            raise

    def work(self) -> Shift:
        """Lets all of them do their part once more, and measures until the last is done."""
        before, started = cpu.of_server(self._postmaster), time.perf_counter()
        for _, pipe in self._workers:
            pipe.send("go")
        results = self._answers()
        wall, server = time.perf_counter() - started, cpu.of_server(self._postmaster) - before
        return Shift(results, wall, server, sum(result["backend_cpu"] for result in results))

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.join(10)
            if process.is_alive():
                process.kill()

    def _answers(self) -> list[Any]:
        answers = [pipe.recv() for _, pipe in self._workers]
        for failed in (answer for answer in answers if isinstance(answer, str) and answer != "ready"):
            raise RuntimeError(f"a worker failed:\n{failed}")
        return answers


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


def _worker(job: Job, pipe: Connection) -> None:
    try:
        chosen = contender(job.contender)
        with contextlib.closing(Client(job.dsn, chosen.settings)) as client:
            measured = job.make(client, chosen, **job.arguments)
            pipe.send("ready")
            while True:
                pipe.recv()
                backend, own = cpu.of_process(client.backend), time.process_time()
                result = measured()
                result["client_cpu"] = time.process_time() - own
                result["backend_cpu"] = cpu.of_process(client.backend) - backend
                pipe.send(result)
    except EOFError:
        return  # the crew was closed
    except BaseException:
        pipe.send(traceback.format_exc())
