"""The fault programs about operations as commands: their options, and one run of each."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from faults.command import command, option
from faults.database import database


@command(
    "numbers",
    "every figure of status and /metrics against an exact count, under traffic",
    option("--rounds", type=int, default=5),
)
def numbers(arguments: argparse.Namespace) -> bool:
    from faults.operations import numbers

    with database(arguments.pg) as (_, dsn):
        tally = numbers.run(dsn, rounds=arguments.rounds, seed=arguments.seed)
    print(tally)
    return tally.holds


@command(
    "fates",
    "an event's six fates in CLI, HTTP and dashboard, at a cost that no log changes",
    option("--small", type=int, default=10_000, help="events in the log at first"),
    option("--large", type=int, default=500_000, help="and in the end"),
)
def fates(arguments: argparse.Namespace) -> bool:
    from faults.operations import fates

    with database(arguments.pg, fates.SETTINGS) as (_, dsn):
        tally = fates.run(dsn, small=arguments.small, large=arguments.large)
    print(tally)
    return tally.holds


@command(
    "upkeep",
    "pgmb work alone, its handlers blocking, its upkeep killed and stopped: all is kept up",
    option("--full", action="store_true", help="ten minutes, with a rotation each minute"),
)
def upkeep(arguments: argparse.Namespace) -> bool:
    from faults.operations import upkeep

    seconds, rotate_every, block = (600.0, 60.0, 25.0) if arguments.full else (8.0, 1.0, 6.0)
    with database(arguments.pg) as (_, dsn), tempfile.TemporaryDirectory() as name:
        result = upkeep.run(dsn, Path(name), seconds=seconds, rotate_every=rotate_every, block=block)
    print(result)
    return result.holds


@command(
    "recovery",
    "seconds until each service works again, after every kind of outage",
    option("--outages", type=float, nargs="+", help="seconds that the server is down"),
)
def recovery(arguments: argparse.Namespace) -> bool:
    from faults.operations import recovery

    with database(arguments.pg) as (server, dsn):
        table = recovery.run(server, dsn, outages=[20.0] if arguments.outages is None else arguments.outages)
    print(table)
    return table.holds


@command(
    "upgrade",
    "a rolling upgrade and its way back under load: no call fails, no event is lost",
    option("--seconds", type=float, default=4.0, help="how long each stage lasts"),
)
def upgrade(arguments: argparse.Namespace) -> bool:
    from faults.operations import upgrade

    with database(arguments.pg) as (_, dsn):
        result = upgrade.run(dsn, arguments.seconds)
    print(result)
    return result.holds


@command(
    "deploy",
    "rolling deploys of workers under load: no event is lost, dead or stuck",
    option("--runs", type=int, default=2),
)
def deploy(arguments: argparse.Namespace) -> bool:
    from faults.operations import deploy

    with database(arguments.pg) as (server, _):
        result = deploy.run(server, arguments.runs, arguments.seed)
    print(result)
    return result.holds
