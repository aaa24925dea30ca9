"""The programs by name, each with the counts of its brief and its complete run."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.correctness import (
    cancels,
    control,
    expiry,
    failover,
    isolation,
    keys,
    positions,
    shortened,
    soak,
    supersession,
    two_phase,
)
from faults.correctness.run import Result
from harness.postgres import Server, create_database


@dataclass(frozen=True)
class Program:
    run: Callable[..., Result]
    about: str
    brief: Mapping[str, Any]
    full: Mapping[str, Any]


_FAIR = ", fair_by => 'key'"

PROGRAMS = {
    "control": Program(control.run, "consumers that cheat are reported", {"events": 200}, {"events": 2000}),
    "expiry": Program(
        expiry.run,
        "leases that expire while their events are being settled",
        {"events": 5000, "workers": 24},
        {"events": 100_000, "workers": 24},
    ),
    "fair-expiry": Program(
        expiry.run,
        "the same in a fair queue, of which some tenants lag",
        {"events": 3000, "workers": 12, "options": _FAIR},
        {"events": 50_000, "workers": 24, "options": _FAIR},
    ),
    "supersession": Program(
        supersession.run,
        "transactions that stay open after their receive, and consumers that supersede them",
        {"rounds": 5, "queues": 6},
        {"rounds": 100, "queues": 8},
    ),
    "keys": Program(
        keys.run,
        "events of one key settled by several transactions at once, in an ordered queue",
        {"events": 1500, "workers": 8},
        {"events": 30_000, "workers": 12, "patience": 200.0},
    ),
    "shortened": Program(
        shortened.run,
        "leases shortened, released and retried in transactions that stay open",
        {"events": 600, "workers": 8},
        {"events": 20_000, "workers": 12},
    ),
    "positions": Program(
        positions.run, "the server killed right after positions were taken", {"crashes": 5}, {"crashes": 100}
    ),
    "synchronous-failover": Program(
        failover.run,
        "a synchronous standby promoted",
        {"failovers": 1, "synchronous": True},
        {"failovers": 20, "synchronous": True, "spark": 2},
    ),
    "asynchronous-failover": Program(
        failover.run,
        "an asynchronous standby promoted that missed the last events",
        {"failovers": 1, "synchronous": False},
        {"failovers": 20, "synchronous": False, "spark": 5},
    ),
    "spark-failover": Program(
        failover.run,
        "the same with a Spark query that goes on from its checkpoint",
        {"failovers": 1, "synchronous": False, "spark": 1, "sse": False},
        {"failovers": 3, "synchronous": False, "spark": 3, "sse": False},
    ),
    "isolation": Program(
        isolation.run,
        "REPEATABLE READ callers with old snapshots",
        {"seconds": 12, "workers": 4},
        {"seconds": 120, "workers": 8},
    ),
    "cancels": Program(
        cancels.run,
        "statements cancelled and sessions terminated at random moments",
        {"kills": 600, "workers": 8},
        {"kills": 20_000, "workers": 12},
    ),
    "fair-cancels": Program(
        cancels.run,
        "the same in a fair queue, of which some tenants lag",
        {"kills": 300, "workers": 6, "options": _FAIR},
        {"kills": 10_000, "workers": 12, "options": _FAIR},
    ),
    "two-phase": Program(
        two_phase.run,
        "publishers and consumers that prepare their transactions",
        {"seconds": 8, "publishers": 6, "workers": 6},
        {"seconds": 120, "publishers": 8, "workers": 8},
    ),
    "soak": Program(
        soak.run,
        "all kinds of queue at once; limits, rates and shares are judged too",
        {"seconds": 8},
        {"seconds": 600},
    ),
}


def run(name: str, *, major: int, seed: int, full: bool) -> Result:
    """Runs a program on a server of its own."""
    program = PROGRAMS[name]
    arguments = dict(program.full if full else program.brief)
    wanted = inspect.signature(program.run).parameters
    if "folder" in wanted:
        with tempfile.TemporaryDirectory(prefix="pgmb-faults-") as folder:
            return program.run(major=major, folder=Path(folder), seed=seed, **arguments)
    with _database(major) as (server, dsn):
        if "server" in wanted:
            arguments["server"] = server
        return program.run(dsn=dsn, seed=seed, **arguments)


@contextmanager
def _database(major: int) -> Iterator[tuple[Server, str]]:
    from pgmb import schema

    with Server.start(major, name="faults", settings={"max_wal_size": "1GB"}) as server:
        dsn = server.dsn(create_database(server))
        schema.install(dsn)
        yield server, dsn
