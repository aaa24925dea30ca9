"""The fault programs about the HTTP server as commands: their options, and one run of each."""

from __future__ import annotations

import argparse

from faults.command import command, option
from faults.database import database


@command(
    "sse",
    "readers of server-sent events come back, and each gets every event once",
    option("--readers", type=int, default=1000),
    option("--seconds", type=float, default=180.0),
)
def sse(arguments: argparse.Namespace) -> bool:
    from faults.server import sse

    with database(arguments.pg) as (_, dsn):
        result = sse.run(dsn, readers=arguments.readers, seconds=arguments.seconds, seed=arguments.seed)
    print(result)
    return result.holds


@command(
    "filters",
    "readers with filters come back during bursts and kills, and each gets every event once",
    option("--seconds", type=float, default=180.0),
)
def filters(arguments: argparse.Namespace) -> bool:
    from faults.server import filters

    with database(arguments.pg) as (_, dsn):
        result = filters.run(dsn, seconds=arguments.seconds, seed=arguments.seed)
    print(result)
    return result.holds


@command(
    "server-fuzz",
    "malformed requests of all kinds: no server error, no leak between keys",
    option("--requests", type=int, default=100_000),
)
def server_fuzz(arguments: argparse.Namespace) -> bool:
    from faults.server import fuzz

    with database(arguments.pg) as (_, dsn):
        result = fuzz.run(dsn, requests=arguments.requests, seed=arguments.seed)
    print(result)
    return result.holds


@command(
    "connections",
    "strangers hold connections in each of their states: others are answered, and memory stays bounded",
    option("--only", help="attacks with this in their name"),
)
def connections(arguments: argparse.Namespace) -> bool:
    from faults.server import connections

    with database(arguments.pg) as (_, dsn):
        return connections.run(dsn, only=arguments.only, say=print)


@command("proxies", "requests, server-sent events and long polls through nginx and Caddy, as deploy has them")
def proxies(arguments: argparse.Namespace) -> bool:
    from faults.server import proxies

    with database(arguments.pg) as (_, dsn):
        wrong = proxies.run(dsn)
    for name, found in wrong.items():
        print(f"{name}: {'holds' if not found else '; '.join(found)}")
    return not any(wrong.values())


@command("parts", "each process of pgmb serve fails in four ways, comes back, and the others go on")
def parts(arguments: argparse.Namespace) -> bool:
    from faults.server import parts

    with database(arguments.pg) as (_, dsn):
        outcomes = parts.run(dsn)
    for outcome in outcomes:
        print(outcome)
    return all(outcome.holds for outcome in outcomes)
