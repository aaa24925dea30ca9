"""The fault programs about queues as commands: their options, and one run of each."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from faults.command import command, option
from faults.database import database


@command(
    "model",
    "a queue does what a model of it does, whatever is done to it",
    option("--examples", type=int, default=2000),
    option("--steps", type=int, default=50),
    option("--processes", type=int, default=1, help="that share the examples"),
    option(
        "--kind",
        choices=("plain", "ordered", "fair", "limited fair", "filtered fair"),
        default="plain",
        help="of queue",
    ),
    option("--shrink", action="store_true", help="a failure to its least steps (minutes)"),
)
def model(arguments: argparse.Namespace) -> bool:
    from faults.queue import fair_machine, machine, ordered_machine

    kinds = {
        "plain": machine.QueueMachine,
        "ordered": ordered_machine.OrderedMachine,
        "fair": fair_machine.FairMachine,
        "limited fair": fair_machine.LimitedFairMachine,
        "filtered fair": fair_machine.FilteredFairMachine,
    }
    began = time.monotonic()
    done = machine.run_in_processes(
        arguments.processes,
        major=arguments.pg,
        kind=kinds[arguments.kind],
        examples=arguments.examples,
        steps=arguments.steps,
        seed=arguments.seed,
        shrink=arguments.shrink,
    )
    print(
        f"model holds: {done['examples']} examples, {done['steps']} steps, {done['receives']} receives of "
        f"{done['deliveries']} events ({done['claims']} by one statement, "
        f"{done['claims that open']} opened a batch, {done['claims that open more']} a long one, "
        f"{done['claims of nothing']} of nothing), "
        f"{done['settled']} settled, {done['refused']} refused as lost | "
        f"{time.monotonic() - began:.1f} s"
    )
    return True


@command(
    "fair",
    "tenants of a fair queue beside one with a backlog: their delay, its price",
    option("--backlog", type=int, default=100_000, help="events of the one tenant"),
    option("--seconds", type=float, default=20.0, help="of a span with or without the backlog"),
    option("--rounds", type=int, default=3, help="of two spans each"),
)
def fair(arguments: argparse.Namespace) -> bool:
    from faults.queue import fair

    with database(arguments.pg) as (_, dsn):
        result = fair.run(
            dsn,
            backlog=arguments.backlog,
            seconds=arguments.seconds,
            rounds=arguments.rounds,
            seed=arguments.seed,
        )
    print(result)
    return result.holds


@command(
    "crowd",
    "hundreds of consumers of one queue: none is superseded, and a message costs no more",
    option("--consumers", type=int, default=300),
    option("--kinds", nargs="+", default=["plain", "ordered", "limited", "fair"]),
    option("--seconds", type=float, default=10.0, help="how long each stage is measured"),
)
def crowd(arguments: argparse.Namespace) -> bool:
    from faults.queue import crowd

    with database(arguments.pg, crowd.settings(arguments.consumers)) as (server, dsn):
        result = crowd.run(
            server,
            dsn,
            kinds=arguments.kinds,
            consumers=arguments.consumers,
            seconds=arguments.seconds,
        )
    print(result)
    return result.holds


@command(
    "keyed-retries",
    "SIGKILL to producers, who retry under the same key",
    option("--kills", type=int, default=200),
)
def keyed_retries(arguments: argparse.Namespace) -> bool:
    from faults.queue import keyed

    with database(arguments.pg) as (_, dsn), tempfile.TemporaryDirectory() as name:
        result = keyed.run(dsn, Path(name), kills=arguments.kills, seed=arguments.seed)
    print(result)
    return result.holds


@command(
    "ordered",
    "workers of an ordered queue killed: the order holds, and its price",
    option("--keys", type=int, default=200),
    option("--events", type=int, default=500, help="of each key"),
    option("--workers", type=int, default=4, help="processes"),
    option("--bare", action="store_true", help="loops of receive and ack, not `pgmb work`"),
    option("--size", type=int, default=100, help="of a bare loop's leases"),
    option("--kill-every", type=float, default=2.0, help="seconds"),
    option("--rounds", type=int, default=5),
    option("--shards", type=int, help="of the ordered queue"),
    option("--goal", type=float, default=0.6, help="of the unordered queue's throughput"),
)
def ordered(arguments: argparse.Namespace) -> bool:
    from faults.queue import ordered

    with database(arguments.pg) as (_, dsn), tempfile.TemporaryDirectory() as name:
        result = ordered.run(
            dsn,
            Path(name),
            keys=arguments.keys,
            events=arguments.events,
            workers=arguments.workers,
            size=arguments.size,
            bare=arguments.bare,
            kill_every=arguments.kill_every,
            rounds=arguments.rounds,
            shards=arguments.shards,
            goal=arguments.goal,
            seed=arguments.seed,
        )
    print(result)
    return result.holds


@command(
    "limits",
    "limits on rate and events in flight hold across processes",
    option("--processes", type=int, default=4),
    option("--seconds", type=float, default=20.0, help="over which the rate is measured"),
)
def limits(arguments: argparse.Namespace) -> bool:
    from faults.queue import limits

    with database(arguments.pg) as (_, dsn), tempfile.TemporaryDirectory() as name:
        result = limits.run(dsn, Path(name), processes=arguments.processes, measured=arguments.seconds)
    print(result)
    return result.holds


@command(
    "dropping",
    "a full queue drops its oldest events beside publishers: the newest all arrive",
    option("--cycles", type=int, default=2000, help="of one new session each"),
)
def dropping(arguments: argparse.Namespace) -> bool:
    from faults.queue import dropping

    with database(arguments.pg) as (_, dsn):
        result = dropping.run(dsn, cycles=arguments.cycles)
    print(result)
    return result.holds


@command(
    "filters",
    "a filter raises: its queue stops with the error, the others get all",
    option("--queues", type=int, default=1000),
    option("--rounds", type=int, default=20, help="of one failing filter each"),
    option("--events", type=int, default=20, help="a round"),
    option("--consumers", type=int, default=4),
)
def filters(arguments: argparse.Namespace) -> bool:
    from faults.queue import filters

    with database(arguments.pg) as (_, dsn):
        result = filters.run(
            dsn,
            queues=arguments.queues,
            rounds=arguments.rounds,
            events=arguments.events,
            consumers=arguments.consumers,
            seed=arguments.seed,
        )
    print(result)
    return result.holds
