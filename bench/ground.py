"""Where it is measured: one server a contender, so that vacuum and checkpoints are charged to their cause."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import psycopg

from bench.contenders import contender
from bench.crew import Crew, Job
from harness.databases import create_database, drop_database
from harness.server import Server

if TYPE_CHECKING:
    from bench.spark.lab import Lab

SETTINGS: dict[str, str | int | float | bool] = {
    "fsync": "on",
    "synchronous_commit": "on",
    "shared_buffers": "512MB",
    "max_wal_size": "16GB",
    "checkpoint_timeout": "30min",
    "wal_keep_size": 0,
    "jit": "off",
    # PostgreSQL's default. The harness allows prepared transactions, and where they are possible a receive
    # tells its caller in a dearer way (docs/adr/0027).
    "max_prepared_transactions": 0,
}


class Site:
    """A contender's database."""

    def __init__(self, name: str, server: Server) -> None:
        self.contender = contender(name)
        self.server = server
        self.database = create_database(server)
        self.dsn = server.dsn(self.database)
        self.connection: psycopg.Connection[Any] = psycopg.connect(self.dsn, autocommit=True)
        self.contender.install(self.connection)

    def fill(self, events: int) -> None:
        self.contender.fill(self.connection, events)

    def settle(self) -> None:
        """Writes out what is dirty, so that the next measurement does not pay for what came before it."""
        self.connection.execute("checkpoint")

    def crew(self, *jobs: Job) -> Crew:
        return Crew(jobs, self.server.postmaster_pid)

    def close(self) -> None:
        self.connection.close()
        drop_database(self.server, self.database)


class Ground:
    """The servers, started when first needed and shared by the rows of one run."""

    def __init__(self, major: int) -> None:
        self.major = major
        self._servers: dict[str, Server] = {}

    @contextlib.contextmanager
    def sites(self, *contenders: str) -> Generator[dict[str, Site]]:
        """A fresh database for each, by name."""
        with contextlib.ExitStack() as stack:
            found: dict[str, Site] = {}
            for name in contenders:
                found[name] = self.site(name)
                stack.callback(found[name].close)
            yield found

    def site(self, name: str) -> Site:
        # "pgmb, ack apart" is pgmb: variants share a server.
        kind = name.split(",", maxsplit=1)[0]
        server = self._servers.get(kind)
        if server is None:
            server = self._servers[kind] = Server.start(self.major, settings=SETTINGS, name="bench")
        return Site(name, server)

    @cached_property
    def lab(self) -> Lab:
        """Spark, for the rows that need it."""
        from bench.spark.lab import Lab

        return Lab()

    def close(self) -> None:
        if "lab" in vars(self):
            self.lab.close()
        for server in self._servers.values():
            server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def transactions(connection: psycopg.Connection[Any]) -> int:
    """How many transactions the connection's database has ended so far."""
    connection.execute("select pg_stat_clear_snapshot()")
    row = connection.execute(
        "select xact_commit + xact_rollback from pg_stat_database where datname = current_database()"
    ).fetchone()
    return int(row[0]) if row is not None else 0
