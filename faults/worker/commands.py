"""The fault programs about workers as commands: their options, and one run of each."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

from faults.command import command, option
from faults.database import database


@command(
    "requests",
    "requests are answered once while workers are killed",
    option("--requests", type=int, default=10_000),
    option("--every", type=float, default=0.3, help="seconds between kills"),
    option("--spared", action="store_true", help="kill none, and judge the times"),
)
def requests(arguments: argparse.Namespace) -> bool:
    from faults.worker import requests

    with database(arguments.pg) as (_, dsn):
        every = None if arguments.spared else arguments.every
        result = requests.run(dsn, requests=arguments.requests, every=every, seed=arguments.seed)
    print(result)
    return result.holds


@command(
    "kills",
    "SIGKILL to consumers, producers, or the server: what was told stands",
    option("whom", choices=("consumers", "producers", "server")),
    option("--kills", type=int, default=200),
    option("--events", type=int, default=20_000, help="published while consumers are killed"),
)
def kills(arguments: argparse.Namespace) -> bool:
    from faults.worker import kills

    with database(arguments.pg) as (server, dsn), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.whom == "consumers":
            result = kills.consumers(
                dsn, folder, kills=arguments.kills, events=arguments.events, seed=arguments.seed
            )
        elif arguments.whom == "producers":
            result = kills.producers(dsn, folder, kills=arguments.kills, seed=arguments.seed)
        else:
            half = arguments.kills // 2
            result = kills.crashes(
                server, dsn, folder, backends=arguments.kills - half, servers=half, seed=arguments.seed
            )
    print(result)
    return result.holds


@command(
    "memory",
    "a worker's memory stays flat, and no event sees the context of another",
    option("--events", type=int, default=300_000),
)
def memory(arguments: argparse.Namespace) -> bool:
    from faults.worker import memory

    with database(arguments.pg) as (_, dsn):
        result = asyncio.run(memory.run(dsn, arguments.events, arguments.seed))
    print(result)
    return result.holds


@command(
    "poison",
    "payloads and handlers that fail in every way: the rest goes on",
    option("--events", type=int, default=2000, help="of which one in a hundred does not fit"),
    option("--processes", type=int, default=2),
)
def poison(arguments: argparse.Namespace) -> bool:
    from faults.worker import poison

    with database(arguments.pg) as (_, dsn), tempfile.TemporaryDirectory() as name:
        result = poison.run(
            dsn,
            Path(name),
            events=arguments.events,
            processes=arguments.processes,
            seed=arguments.seed,
        )
    print(result)
    return result.holds
