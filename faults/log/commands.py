"""The fault programs about the log as commands: their options, and one run of each."""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path

from faults.command import command, option
from faults.database import database
from harness.postgres import create_database


@command(
    "late-commits",
    "commits late, early and rolled back: no reader misses a thing",
    option("--writers", type=int, default=50),
    option("--events", type=int, default=200_000),
    option("--delay", type=float, default=2.0, help="the longest wait before a commit, in seconds"),
    option("--size", type=int, default=60, help="events in one call, at most"),
    option("--rotate-every", type=float, default=5.0),
)
def late_commits(arguments: argparse.Namespace) -> bool:
    from faults.log import late_commits

    with database(arguments.pg) as (_, dsn):
        result = late_commits.run(
            dsn,
            writers=arguments.writers,
            events=arguments.events,
            delay=arguments.delay,
            size=arguments.size,
            rotate_every=arguments.rotate_every,
            seed=arguments.seed,
        )
    print(result)
    return result.holds


@command(
    "rotation",
    "rotation and retention under load, a publisher stopped meanwhile",
    option("--stopped-for", type=float, default=5.0, help="seconds, each time"),
    option("--rounds", type=int, default=4, help="of three stops each"),
    option("--publishers", type=int, default=4, help="that go on meanwhile"),
)
def rotation(arguments: argparse.Namespace) -> bool:
    from faults.log import rotation

    with database(arguments.pg, rotation.SETTINGS) as (server, dsn):
        result = rotation.run(
            server,
            dsn,
            stopped_for=arguments.stopped_for,
            rounds=arguments.rounds,
            publishers=arguments.publishers,
            seed=arguments.seed,
        )
    print(result)
    return result.holds


@command(
    "retention",
    "a backlog of segments is dropped beside publishers and consumers: nobody waits",
    option("--segments", type=int, default=1500),
)
def retention(arguments: argparse.Namespace) -> bool:
    from faults.log import retention

    with database(arguments.pg, retention.SETTINGS) as (_, dsn):
        result = retention.run(dsn, segments=arguments.segments)
    print(result)
    return result.holds


@command(
    "clock",
    "a server's clock that is wrong for a while: everything goes on afterwards",
    option("--steps", default="a year ahead", help="separated by commas"),
    option("--full", action="store_true", help="every step, in every order of two"),
    option("--wrong-for", type=float, default=4.0, help="seconds"),
)
def clock(arguments: argparse.Namespace) -> bool:
    from faults.log import clock
    from harness.clock import clocked
    from pgmb import schema

    steps = arguments.steps.split(",")
    if arguments.full:
        steps = [one for pair in itertools.permutations(clock.STEPS, 2) for one in pair]
    with clocked(arguments.pg) as (server, hands):
        dsn = server.dsn(create_database(server))
        schema.install(dsn)
        result = clock.run(dsn, hands, steps=steps, wrong_for=arguments.wrong_for, seed=arguments.seed)
    print(result)
    return result.holds


@command(
    "sizes",
    "a burst of large events beside small ones: all arrive, in bounded batches",
    option("--endpoints", type=int, default=40, help="that each get events of 4 MB"),
    option("--endpoint-events", type=int, default=12),
    option("--queue-events", type=int, default=30, help="of 40 MB, in queues"),
)
def sizes(arguments: argparse.Namespace) -> bool:
    from faults.log import sizes

    with database(arguments.pg) as (_, dsn):
        result = sizes.run(
            dsn,
            endpoints=arguments.endpoints,
            endpoint_events=arguments.endpoint_events,
            queue_events=arguments.queue_events,
        )
    print(result)
    return result.holds


@command(
    "due-times",
    "due times of cron expressions beside a walk over the wall clock",
    option("--years", type=int, default=1, help="of each zone, 10 at most"),
    option("--hours", type=float, default=3.0, help="before and after each change of the clock"),
)
def due_times(arguments: argparse.Namespace) -> bool:
    from datetime import timedelta

    from faults.log import due_times

    around = timedelta(hours=arguments.hours)
    result = due_times.run(years=arguments.years, around=around, around_seconds=timedelta(minutes=62))
    print(result)
    return result.holds


@command(
    "cron",
    "Schedulers in several processes, killed meanwhile: each due time once",
    option("--due-times", type=int, default=60, choices=range(2, 61), metavar="2..60"),
    option("--processes", type=int, default=3),
    option("--kills", type=int, default=3),
    option("--pace", type=float, default=0.3, help="seconds a due time"),
)
def cron(arguments: argparse.Namespace) -> bool:
    from faults.log import cron
    from harness.clock import clocked
    from pgmb import schema

    with clocked(arguments.pg) as (server, clock), tempfile.TemporaryDirectory() as name:
        dsn = server.dsn(create_database(server))
        schema.install(dsn)
        result = cron.run(
            dsn,
            clock,
            Path(name),
            due_times=arguments.due_times,
            processes=arguments.processes,
            kills=arguments.kills,
            pace=arguments.pace,
            seed=arguments.seed,
        )
    print(result)
    return result.holds
