"""The fault programs about webhooks as commands: their options, and one run of each."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from faults.command import command, option
from faults.database import database


@command(
    "delivery-limits",
    "limits of endpoints hold across dispatchers",
    option("--dispatchers", type=int, default=3),
    option("--endpoints", type=int, default=200, help="with a low limit each"),
    option("--seconds", type=float, default=20.0, help="over which rates are measured"),
)
def delivery_limits(arguments: argparse.Namespace) -> bool:
    from faults.webhook import limits

    with database(arguments.pg) as (_, dsn):
        result = limits.run(
            dsn, dispatchers=arguments.dispatchers, many=arguments.endpoints, measured=arguments.seconds
        )
    print(result)
    return result.holds


@command(
    "delivery-kills",
    "SIGKILL to dispatchers at each step of a delivery: nothing is lost",
    option("--times", type=int, default=50, help="at each of the six steps"),
)
def delivery_kills(arguments: argparse.Namespace) -> bool:
    from faults.webhook import kills

    with database(arguments.pg) as (_, dsn), tempfile.TemporaryDirectory() as name:
        result = kills.run(dsn, Path(name), times=arguments.times, seed=arguments.seed)
    print(result)
    return result.holds


@command(
    "delivery-chaos",
    "endpoints that misbehave: the others get all, a canary nothing",
    option("--deliveries", type=int, default=20_000),
    option("--dispatchers", type=int, default=2),
)
def delivery_chaos(arguments: argparse.Namespace) -> bool:
    from faults.webhook import chaos

    with database(arguments.pg) as (_, dsn):
        result = chaos.run(dsn, deliveries=arguments.deliveries, dispatchers=arguments.dispatchers)
    print(result)
    return result.holds


@command(
    "delivery-storm",
    "dispatchers killed, stopped and restarted before endpoints of every kind",
    option("--seconds", type=float, default=120.0, help="of faults"),
)
def delivery_storm(arguments: argparse.Namespace) -> bool:
    from faults.webhook import storm

    with database(arguments.pg) as (server, dsn):
        result = storm.run(dsn, seconds=arguments.seconds, seed=arguments.seed, server=server)
    print(result)
    return result.holds
