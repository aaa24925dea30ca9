"""The processes of `pgmb serve` and `pgmb up`: which services each runs, and how."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final
from uuid import UUID, uuid4

import psycopg
from psycopg_pool import PoolTimeout

from pgmb import aconnect
from pgmb._core.logs import LogFormat
from pgmb.cli import output
from pgmb.errors import PgmbError
from pgmb.services import SERVICES, Dispatcher, Http, HttpSettings, Leadership, Service, Turns
from pgmb.services import serve as serve_services
from pgmb.services.fork import Board
from pgmb.services.parent import Parent
from pgmb.services.resources import Resources, raise_file_limit
from pgmb.services.supervisor import Child

if TYPE_CHECKING:
    from prometheus_client import Metric

logger = logging.getLogger("pgmb.services")

EXTRAS: Final = {"dispatcher": "webhooks", "http": "server"}
MODULES: Final = {
    "dispatcher": ("aiohttp", "cryptography"),
    "http": ("starlette", "uvicorn", "jinja2", "prometheus_client"),
}
"""What a service imports that only an extra brings."""

_END_WITHIN_SECONDS = 28.0
"""After SIGTERM, beside --drain-for: orchestrators kill a process after 30 seconds."""


def is_installed(service: str) -> bool:
    return all(find_spec(module) is not None for module in MODULES.get(service, ()))


def installed() -> list[str]:
    """The services whose extras are installed."""
    return sorted(filter(is_installed, SERVICES))


def sayer(log_format: LogFormat) -> Callable[[str], None]:
    """Returns a function that says a line: on stdout, or to machines that read JSON in the log."""
    return output.line if log_format is LogFormat.TEXT else logger.info


class Parts:
    """Services, and the processes that run them: for strangers, for receivers, and for the upkeep."""

    def __init__(
        self,
        names: Sequence[str],
        settings: HttpSettings,
        allow: Sequence[str] = (),
        egress_proxy: str | None = None,
        dsn: str = "",
        families: Callable[[], Iterator[Metric]] | None = None,
    ) -> None:
        """Takes the port. `families` are further metrics for /metrics."""
        self.dsn = dsn
        self.board = Board()
        self.http: Http | None = None
        self._end_within = settings.drain_for + _END_WITHIN_SECONDS
        self._turns = Turns()
        self._resources = Resources()
        self._families = families
        self._services: list[Service] = []
        for name in names:
            if name == "dispatcher":
                self._services.append(Dispatcher(allow, egress_proxy))
            elif name == "http":
                self.http = Http(dsn, settings, self._hung, self._metrics)
                self.http.bind()
                self._services.append(self.http)
            else:
                self._services.append(SERVICES[name]())
        self.processes: dict[str, list[Service]] = {}
        """Services by the process that runs them."""
        for service in self._services:
            process = service.name if service.name in ("http", "dispatcher") else "upkeep"
            self.processes.setdefault(process, []).append(service)

    def connect_to(self, dsn: str) -> None:
        """Name the database, if it was not known before. Call it before anything runs."""
        self.dsn = dsn
        if self.http is not None:
            self.http.dsn = dsn

    def greet(self, say: Callable[[str], None], left_out: Sequence[str] = (), *, keyless: bool) -> None:
        """Say what is served, and what is not."""
        say(f"Serving {', '.join(service.name for service in self._services)}.")
        for name in left_out:
            note = output.note if say is output.line else say
            note(f"{name} is not installed: pip install 'pgmb[{EXTRAS[name]}]'")
        if self.http is not None:
            say(f"HTTP at {self.http.url}, the dashboard at {self.http.url}/ui.")
        if keyless:
            say("There is no API key yet. Create one: pgmb keys create admin --scope operate")

    def children(self) -> list[Child]:
        """A fork for each process. They share the memory of what they need, which this imports."""
        if "http" in self.processes:
            import pgmb.server
            import pgmb.services.http_server
        if "dispatcher" in self.processes:
            import pgmb.webhooks.dispatcher  # noqa: F401
        _fast_loop()
        gc.collect()
        gc.freeze()
        return [self._child(name, services) for name, services in self.processes.items()]

    def run(self, greet: Callable[[], None]) -> None:
        """Run all services in this process."""
        self.board.close()
        self._run(self._services, uuid4(), greet=greet)

    def _hung(self) -> list[str]:
        return [*self._turns.hung(), *self._resources.lacking(), *self.board.troubled()]

    def _metrics(self) -> Iterator[Metric]:
        from pgmb.server.processes import families_of

        yield from families_of(
            (one.name, one.pid, one.restarts, one.troubled) for one in self.board.processes()
        )
        if self._families is not None:
            yield from self._families()

    def _child(self, name: str, services: Sequence[Service]) -> Child:
        # The successor of a process that died goes on leading at once.
        process = uuid4()

        def run(parent: Parent) -> int:
            if self.http is not None and self.http not in services:
                self.http.release()
            return self._run(services, process, parent)

        return Child(name, background=name == "upkeep", run=run)

    def _run(
        self,
        services: Sequence[Service],
        process: UUID,
        parent: Parent | None = None,
        greet: Callable[[], None] | None = None,
    ) -> int:
        """Run services in this process. Returns its exit code."""
        raise_file_limit()
        fast = any(isinstance(service, Http) for service in services)
        with asyncio.Runner(loop_factory=_fast_loop() if fast else None) as runner:
            try:
                runner.run(self._serve(services, process, parent, greet))
            except (psycopg.Error, PoolTimeout, PgmbError) as error:
                if parent is None:
                    raise
                logger.error("%s", str(error).strip())
                return 1
        return 0

    async def _serve(
        self,
        services: Sequence[Service],
        process: UUID,
        parent: Parent | None,
        greet: Callable[[], None] | None,
    ) -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def end() -> None:
            stop.set()
            # Whatever may hang, the process ends.
            last = threading.Timer(self._end_within, os._exit, [1])
            last.daemon = True
            last.start()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, end)
        if greet is not None:
            greet()
        reporting = None
        if parent is not None:
            parent.when_gone(end)
            reporting = asyncio.create_task(parent.keep_reporting(self._turns.hung))
        async with await aconnect(
            self.dsn, max_size=len(services) + 1, max_wait=5.0, fallback_application_name="pgmb serve"
        ) as broker:
            leadership = Leadership([service.name for service in services], "pgmb serve", process)
            elected = leadership if leadership.services else None
            await serve_services(broker, services, stop, turns=self._turns, leadership=elected)
        if reporting is not None:
            reporting.cancel()


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop
