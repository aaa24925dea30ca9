"""python -m faults NAME [options]: one run, one line with its figures, and an exit code."""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from faults.database import database
from harness.postgres import create_database

EFFECTS = (
    *(
        "control",
        "expiry",
        "fair-expiry",
        "supersession",
        "keys",
        "shortened",
        "positions",
        "synchronous-failover",
    ),
    *("asynchronous-failover", "spark-failover", "isolation", "cancels", "fair-cancels", "two-phase", "soak"),
)
"""The programs of `faults.correctness`, which is imported only when it is needed."""


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


def numbers(arguments: argparse.Namespace) -> bool:
    from faults.operations import numbers

    with database(arguments.pg) as (_, dsn):
        tally = numbers.run(dsn, rounds=arguments.rounds, seed=arguments.seed)
    print(tally)
    return tally.holds


def fates(arguments: argparse.Namespace) -> bool:
    from faults.operations import fates

    with database(arguments.pg, fates.SETTINGS) as (_, dsn):
        tally = fates.run(dsn, small=arguments.small, large=arguments.large)
    print(tally)
    return tally.holds


def upkeep(arguments: argparse.Namespace) -> bool:
    from faults.operations import upkeep

    seconds, rotate_every, block = (600.0, 60.0, 25.0) if arguments.full else (8.0, 1.0, 6.0)
    with database(arguments.pg) as (_, dsn), tempfile.TemporaryDirectory() as name:
        result = upkeep.run(dsn, Path(name), seconds=seconds, rotate_every=rotate_every, block=block)
    print(result)
    return result.holds


def recovery(arguments: argparse.Namespace) -> bool:
    from faults.operations import recovery

    with database(arguments.pg) as (server, dsn):
        table = recovery.run(server, dsn, outages=[20.0] if arguments.outages is None else arguments.outages)
    print(table)
    return table.holds


def upgrade(arguments: argparse.Namespace) -> bool:
    from faults.operations import upgrade

    with database(arguments.pg) as (_, dsn):
        result = upgrade.run(dsn, arguments.seconds)
    print(result)
    return result.holds


def deploy(arguments: argparse.Namespace) -> bool:
    from faults.operations import deploy

    with database(arguments.pg) as (server, _):
        result = deploy.run(server, arguments.runs, arguments.seed)
    print(result)
    return result.holds


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


def retention(arguments: argparse.Namespace) -> bool:
    from faults.log import retention

    with database(arguments.pg, retention.SETTINGS) as (_, dsn):
        result = retention.run(dsn, segments=arguments.segments)
    print(result)
    return result.holds


def model(arguments: argparse.Namespace) -> bool:
    from faults.queue import fair_machine, machine, ordered_machine

    kinds = {
        "plain": machine.QueueMachine,
        "ordered": ordered_machine.OrderedMachine,
        "fair": fair_machine.FairMachine,
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
        f"{done['deliveries']} events ({done['claims']} by one statement, {done['recounts']} with gaps, "
        f"{done['claims that open']} opened a batch, {done['claims that open more']} a long one, "
        f"{done['claims of nothing']} of nothing), "
        f"{done['settled']} settled, {done['refused']} refused as lost | "
        f"{time.monotonic() - began:.1f} s"
    )
    return True


def requests(arguments: argparse.Namespace) -> bool:
    from faults.worker import requests

    with database(arguments.pg) as (_, dsn):
        every = None if arguments.spared else arguments.every
        result = requests.run(dsn, requests=arguments.requests, every=every, seed=arguments.seed)
    print(result)
    return result.holds


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


def keyed_retries(arguments: argparse.Namespace) -> bool:
    from faults.queue import keyed

    with database(arguments.pg) as (_, dsn), tempfile.TemporaryDirectory() as name:
        result = keyed.run(dsn, Path(name), kills=arguments.kills, seed=arguments.seed)
    print(result)
    return result.holds


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


def limits(arguments: argparse.Namespace) -> bool:
    from faults.queue import limits

    with database(arguments.pg) as (_, dsn), tempfile.TemporaryDirectory() as name:
        result = limits.run(dsn, Path(name), processes=arguments.processes, measured=arguments.seconds)
    print(result)
    return result.holds


def dropping(arguments: argparse.Namespace) -> bool:
    from faults.queue import dropping

    with database(arguments.pg) as (_, dsn):
        result = dropping.run(dsn, cycles=arguments.cycles)
    print(result)
    return result.holds


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


def due_times(arguments: argparse.Namespace) -> bool:
    from datetime import timedelta

    from faults.log import due_times

    around = timedelta(hours=arguments.hours)
    result = due_times.run(years=arguments.years, around=around, around_seconds=timedelta(minutes=62))
    print(result)
    return result.holds


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


def spark_late_commits(arguments: argparse.Namespace) -> bool:
    from faults.spark import late_commits

    return _killed_queries(arguments, late_commits.run)


def spark_republish(arguments: argparse.Namespace) -> bool:
    from faults.spark import republish

    return _killed_queries(arguments, republish.run)


def _killed_queries(arguments: argparse.Namespace, run: Any) -> bool:
    from harness.spark import Cluster

    with (
        database(arguments.pg) as (_, dsn),
        Cluster.start() as cluster,
        tempfile.TemporaryDirectory(prefix="pgmb-faults-") as name,
    ):
        result = run(
            dsn,
            cluster,
            Path(name),
            writers=arguments.writers,
            delay=arguments.delay,
            size=arguments.size,
            rotate_every=arguments.rotate_every,
            drivers=1 if arguments.brief else arguments.drivers,
            executors=1 if arguments.brief else arguments.executors,
            per_trigger=arguments.per_trigger,
            seed=arguments.seed,
        )
    print(result)
    held: bool = result.holds
    return held


def spark_sink(arguments: argparse.Namespace) -> bool:
    from faults.spark import sink
    from harness.spark import Cluster

    runs = sink.BRIEF if arguments.brief else list(sink.full(arguments.rounds))
    with (
        database(arguments.pg) as (_, dsn),
        Cluster.start() as cluster,
        tempfile.TemporaryDirectory(prefix="pgmb-faults-") as name,
    ):
        result = sink.run(dsn, cluster, Path(name), runs, seed=arguments.seed)
    print(result)
    return result.holds


def lake_kills(arguments: argparse.Namespace) -> bool:
    from faults.lake import kills
    from harness.lake import STEPS

    spark = ("write", "commit") if arguments.brief else STEPS * arguments.times
    with database(arguments.pg) as (_, dsn), tempfile.TemporaryDirectory(prefix="pgmb-lake-") as name:
        result = kills.run(
            dsn,
            f"{name}/main",
            times=1 if arguments.brief else arguments.times,
            spark=spark,
            seed=arguments.seed,
        )
    print(result)
    return result.holds


def lake_border(arguments: argparse.Namespace) -> bool:
    from faults.lake import borders
    from harness.spark import Cluster

    events, moves, kills = (
        (40_000, 8, 2) if arguments.brief else (arguments.events, arguments.moves, arguments.kills)
    )
    with (
        database(arguments.pg) as (_, dsn),
        tempfile.TemporaryDirectory(prefix="pgmb-lake-") as name,
        Cluster.start() as cluster,
    ):
        result = borders.run(
            dsn,
            f"{name}/main",
            cluster,
            Path(name),
            events=events,
            moves=moves,
            kills=kills,
            seed=arguments.seed,
        )
    print(result)
    return result.holds


def lake_replay(arguments: argparse.Namespace) -> bool:
    from faults.lake import replays

    with database(arguments.pg) as (_, dsn), tempfile.TemporaryDirectory(prefix="pgmb-lake-") as name:
        result = replays.run(
            dsn,
            f"{name}/main",
            events=6_000 if arguments.brief else arguments.events,
            kills=arguments.kills,
            rate=500 if arguments.brief else arguments.rate,
            seed=arguments.seed,
        )
    print(result)
    return result.holds


def lake_erase(arguments: argparse.Namespace) -> bool:
    from faults.lake import erasures
    from harness.erase import STEPS

    with database(arguments.pg) as (_, dsn), tempfile.TemporaryDirectory(prefix="pgmb-lake-") as name:
        result = erasures.run(
            dsn,
            Path(name),
            events=60_000 if arguments.brief else arguments.events,
            steps=("first segment", "write", "commit", "first rewrite") if arguments.brief else STEPS,
        )
    print(result)
    return result.holds


def lake_projections(arguments: argparse.Namespace) -> bool:
    from faults.lake import projections
    from harness.lake import PROJECTION_STEPS

    spark = () if arguments.brief else PROJECTION_STEPS
    with database(arguments.pg) as (_, dsn), tempfile.TemporaryDirectory(prefix="pgmb-lake-") as name:
        result = projections.run(
            dsn,
            f"{name}/main",
            events=300 if arguments.brief else arguments.events,
            steps=projections.STEPS * (1 if arguments.brief else arguments.times),
            spark=spark,
            seed=arguments.seed,
        )
    print(result)
    return result.holds


def sse(arguments: argparse.Namespace) -> bool:
    from faults.server import sse

    with database(arguments.pg) as (_, dsn):
        result = sse.run(dsn, readers=arguments.readers, seconds=arguments.seconds, seed=arguments.seed)
    print(result)
    return result.holds


def delivery_limits(arguments: argparse.Namespace) -> bool:
    from faults.webhook import limits

    with database(arguments.pg) as (_, dsn):
        result = limits.run(
            dsn, dispatchers=arguments.dispatchers, many=arguments.endpoints, measured=arguments.seconds
        )
    print(result)
    return result.holds


def delivery_kills(arguments: argparse.Namespace) -> bool:
    from faults.webhook import kills

    with database(arguments.pg) as (_, dsn), tempfile.TemporaryDirectory() as name:
        result = kills.run(dsn, Path(name), times=arguments.times, seed=arguments.seed)
    print(result)
    return result.holds


def delivery_chaos(arguments: argparse.Namespace) -> bool:
    from faults.webhook import chaos

    with database(arguments.pg) as (_, dsn):
        result = chaos.run(dsn, deliveries=arguments.deliveries, dispatchers=arguments.dispatchers)
    print(result)
    return result.holds


def server_fuzz(arguments: argparse.Namespace) -> bool:
    from faults.server import fuzz

    with database(arguments.pg) as (_, dsn):
        result = fuzz.run(dsn, requests=arguments.requests, seed=arguments.seed)
    print(result)
    return result.holds


def effects(arguments: argparse.Namespace) -> bool:
    from faults.correctness import programs

    result = programs.run(arguments.program, major=arguments.pg, seed=arguments.seed, full=arguments.full)
    print(result)
    return result.holds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    kinds = parser.add_subparsers(required=True, metavar="NAME")

    def command(name: str, function: Any, about: str) -> argparse.ArgumentParser:
        made = kinds.add_parser(name, help=about, description=about)
        made.set_defaults(function=function)
        made.add_argument("--pg", type=int, default=18, help="PostgreSQL's major version")
        made.add_argument(
            "--seed", type=int, default=random.randrange(1 << 30), help="of all chance in the run"
        )
        return made

    late = command(
        "late-commits", late_commits, "commits late, early and rolled back: no reader misses a thing"
    )
    late.add_argument("--writers", type=int, default=50)
    late.add_argument("--events", type=int, default=200_000)
    late.add_argument("--delay", type=float, default=2.0, help="the longest wait before a commit, in seconds")
    late.add_argument("--size", type=int, default=60, help="events in one call, at most")
    late.add_argument("--rotate-every", type=float, default=5.0)

    rotating = command(
        "rotation", rotation, "rotation and retention under load, a publisher stopped meanwhile"
    )
    rotating.add_argument("--stopped-for", type=float, default=5.0, help="seconds, each time")
    rotating.add_argument("--rounds", type=int, default=4, help="of three stops each")
    rotating.add_argument("--publishers", type=int, default=4, help="that go on meanwhile")

    retained = command(
        "retention",
        retention,
        "a backlog of segments is dropped beside publishers and consumers: nobody waits",
    )
    retained.add_argument("--segments", type=int, default=1500)

    crowded = command(
        "crowd", crowd, "hundreds of consumers of one queue: none is superseded, and a message costs no more"
    )
    crowded.add_argument("--consumers", type=int, default=300)
    crowded.add_argument("--kinds", nargs="+", default=["plain", "ordered", "limited", "fair"])
    crowded.add_argument("--seconds", type=float, default=10.0, help="how long each stage is measured")

    modelled = command("model", model, "a queue does what a model of it does, whatever is done to it")
    modelled.add_argument("--examples", type=int, default=2000)
    modelled.add_argument("--steps", type=int, default=50)
    modelled.add_argument("--processes", type=int, default=1, help="that share the examples")
    modelled.add_argument("--kind", choices=("plain", "ordered", "fair"), default="plain", help="of queue")
    modelled.add_argument("--shrink", action="store_true", help="a failure to its least steps (minutes)")

    requesting = command("requests", requests, "requests are answered once while workers are killed")
    requesting.add_argument("--requests", type=int, default=10_000)
    requesting.add_argument("--every", type=float, default=0.3, help="seconds between kills")
    requesting.add_argument("--spared", action="store_true", help="kill none, and judge the times")

    serving = command(
        "fair", fair, "tenants of a fair queue beside one with a backlog: their delay, its price"
    )
    serving.add_argument("--backlog", type=int, default=100_000, help="events of the one tenant")
    serving.add_argument("--seconds", type=float, default=20.0, help="of a span with or without the backlog")
    serving.add_argument("--rounds", type=int, default=3, help="of two spans each")

    killing = command("kills", kills, "SIGKILL to consumers, producers, or the server: what was told stands")
    killing.add_argument("whom", choices=("consumers", "producers", "server"))
    killing.add_argument("--kills", type=int, default=200)
    killing.add_argument("--events", type=int, default=20_000, help="published while consumers are killed")

    keyed = command("keyed-retries", keyed_retries, "SIGKILL to producers, who retry under the same key")
    keyed.add_argument("--kills", type=int, default=200)

    stepping = command(
        "clock", clock, "a server's clock that is wrong for a while: everything goes on afterwards"
    )
    stepping.add_argument("--steps", default="a year ahead", help="separated by commas")
    stepping.add_argument("--full", action="store_true", help="every step, in every order of two")
    stepping.add_argument("--wrong-for", type=float, default=4.0, help="seconds")

    falling = command(
        "due-times", due_times, "due times of cron expressions beside a walk over the wall clock"
    )
    falling.add_argument("--years", type=int, default=1, help="of each zone, 10 at most")
    falling.add_argument("--hours", type=float, default=3.0, help="before and after each change of the clock")

    ticking = command("cron", cron, "Schedulers in several processes, killed meanwhile: each due time once")
    ticking.add_argument("--due-times", type=int, default=60, choices=range(2, 61), metavar="2..60")
    ticking.add_argument("--processes", type=int, default=3)
    ticking.add_argument("--kills", type=int, default=3)
    ticking.add_argument("--pace", type=float, default=0.3, help="seconds a due time")

    ordering = command(
        "ordered", ordered, "workers of an ordered queue killed: the order holds, and its price"
    )
    ordering.add_argument("--keys", type=int, default=200)
    ordering.add_argument("--events", type=int, default=500, help="of each key")
    ordering.add_argument("--workers", type=int, default=4, help="processes")
    ordering.add_argument("--bare", action="store_true", help="loops of receive and ack, not `pgmb work`")
    ordering.add_argument("--size", type=int, default=100, help="of a bare loop's leases")
    ordering.add_argument("--kill-every", type=float, default=2.0, help="seconds")
    ordering.add_argument("--rounds", type=int, default=5)
    ordering.add_argument("--shards", type=int, help="of the ordered queue")
    ordering.add_argument("--goal", type=float, default=0.6, help="of the unordered queue's throughput")

    poisoned = command("poison", poison, "payloads and handlers that fail in every way: the rest goes on")
    poisoned.add_argument("--events", type=int, default=2000, help="of which one in a hundred does not fit")
    poisoned.add_argument("--processes", type=int, default=2)

    limiting = command("limits", limits, "limits on rate and events in flight hold across processes")
    limiting.add_argument("--processes", type=int, default=4)
    limiting.add_argument("--seconds", type=float, default=20.0, help="over which the rate is measured")

    shortening = command(
        "dropping", dropping, "a full queue drops its oldest events beside publishers: the newest all arrive"
    )
    shortening.add_argument("--cycles", type=int, default=2000, help="of one new session each")

    sizing = command(
        "sizes", sizes, "a burst of large events beside small ones: all arrive, in bounded batches"
    )
    sizing.add_argument("--endpoints", type=int, default=40, help="that each get events of 4 MB")
    sizing.add_argument("--endpoint-events", type=int, default=12)
    sizing.add_argument("--queue-events", type=int, default=30, help="of 40 MB, in queues")

    filtering = command(
        "filters", filters, "a filter raises: its queue stops with the error, the others get all"
    )
    filtering.add_argument("--queues", type=int, default=1000)
    filtering.add_argument("--rounds", type=int, default=20, help="of one failing filter each")
    filtering.add_argument("--events", type=int, default=20, help="a round")
    filtering.add_argument("--consumers", type=int, default=4)

    def killing_spark(made: argparse.ArgumentParser) -> None:
        made.add_argument("--writers", type=int, default=20)
        made.add_argument(
            "--delay", type=float, default=3.0, help="the longest wait before a commit, in seconds"
        )
        made.add_argument("--size", type=int, default=12, help="events in one call, at most")
        made.add_argument("--rotate-every", type=float, default=3.0)
        made.add_argument("--drivers", type=int, default=10, help="to kill")
        made.add_argument("--executors", type=int, default=20, help="to kill")
        made.add_argument("--per-trigger", type=int, default=300, help="events in a batch, at most")
        made.add_argument("--brief", action="store_true", help="one driver and one executor killed")

    killing_spark(
        command(
            "spark-late-commits",
            spark_late_commits,
            "Spark reads what commits late, its driver and executors killed: each event once",
        )
    )
    killing_spark(
        command(
            "spark-republish",
            spark_republish,
            "log to Spark to log to Spark under kills: each event once, every key in order",
        )
    )
    sinking = command(
        "spark-sink",
        spark_sink,
        "Spark publishes while tasks and drivers fail, repeat and are killed: each event once",
    )
    sinking.add_argument("--rounds", type=int, default=200)
    sinking.add_argument("--brief", action="store_true", help="a few runs, one of each kind")

    archiving = command(
        "lake-kills",
        lake_kills,
        "archivers killed after each step, several at once, under traffic: each event once, all verified",
    )
    archiving.add_argument("--times", type=int, default=5, help="after each step, and as often on Spark")
    archiving.add_argument("--brief", action="store_true", help="each step once, two of them on Spark")

    bordering = command(
        "lake-border",
        lake_border,
        "a query over lake and log, killed while the border between them moves: each event once",
    )
    bordering.add_argument("--events", type=int, default=5_000_000)
    bordering.add_argument("--moves", type=int, default=20)
    bordering.add_argument("--kills", type=int, default=5)
    bordering.add_argument("--brief", action="store_true", help="40,000 events, 8 moves, 2 kills")

    replaying = command(
        "lake-replay",
        lake_replay,
        "a replay of log and lake into one queue, killed again and again: each event once, at its rate",
    )
    replaying.add_argument("--events", type=int, default=500_000)
    replaying.add_argument("--kills", type=int, default=10)
    replaying.add_argument("--rate", type=float, default=2_500.0, help="events per second")
    replaying.add_argument("--brief", action="store_true", help="6,000 events, 500 per second")

    erasing = command(
        "lake-erase",
        lake_erase,
        "keys erased from log and lake, killed after each step: in no file, and readers go on",
    )
    erasing.add_argument("--events", type=int, default=1_000_000)
    erasing.add_argument("--brief", action="store_true", help="60,000 events, killed after four steps")

    projecting = command(
        "lake-projections",
        lake_projections,
        "a projection killed again and again, with late, malformed and erased events: as DuckDB has it",
    )
    projecting.add_argument("--events", type=int, default=20_000, help="before each kill")
    projecting.add_argument("--times", type=int, default=3, help="at each step, and once on Spark")
    projecting.add_argument("--brief", action="store_true", help="each step once, 300 events, without Spark")

    readers = command("sse", sse, "readers of server-sent events come back, and each gets every event once")
    readers.add_argument("--readers", type=int, default=1000)
    readers.add_argument("--seconds", type=float, default=180.0)

    limited = command("delivery-limits", delivery_limits, "limits of endpoints hold across dispatchers")
    limited.add_argument("--dispatchers", type=int, default=3)
    limited.add_argument("--endpoints", type=int, default=200, help="with a low limit each")
    limited.add_argument("--seconds", type=float, default=20.0, help="over which rates are measured")

    dispatching = command(
        "delivery-kills", delivery_kills, "SIGKILL to dispatchers at each step of a delivery: nothing is lost"
    )
    dispatching.add_argument("--times", type=int, default=50, help="at each of the six steps")

    misbehaving = command(
        "delivery-chaos", delivery_chaos, "endpoints that misbehave: the others get all, a canary nothing"
    )
    misbehaving.add_argument("--deliveries", type=int, default=20_000)
    misbehaving.add_argument("--dispatchers", type=int, default=2)

    fuzzing = command(
        "server-fuzz", server_fuzz, "malformed requests of all kinds: no server error, no leak between keys"
    )
    fuzzing.add_argument("--requests", type=int, default=100_000)

    shown = command(
        "numbers", numbers, "every figure of status and /metrics against an exact count, under traffic"
    )
    shown.add_argument("--rounds", type=int, default=5)

    following = command(
        "fates", fates, "an event's six fates in CLI, HTTP and dashboard, at a cost that no log changes"
    )
    following.add_argument("--small", type=int, default=10_000, help="events in the log at first")
    following.add_argument("--large", type=int, default=500_000, help="and in the end")

    returning = command(
        "recovery", recovery, "seconds until each service works again, after every kind of outage"
    )
    returning.add_argument("--outages", type=float, nargs="+", help="seconds that the server is down")

    keeping = command(
        "upkeep",
        upkeep,
        "pgmb work alone, its handlers blocking, its upkeep killed and stopped: all is kept up",
    )
    keeping.add_argument("--full", action="store_true", help="ten minutes, with a rotation each minute")

    upgrading = command(
        "upgrade", upgrade, "a rolling upgrade and its way back under load: no call fails, no event is lost"
    )
    upgrading.add_argument("--seconds", type=float, default=4.0, help="how long each stage lasts")

    deploying = command(
        "deploy", deploy, "rolling deploys of workers under load: no event is lost, dead or stuck"
    )
    deploying.add_argument("--runs", type=int, default=2)

    counting = command(
        "effects",
        effects,
        "effects committed with their ack are counted under one kind of fault: each event once",
    )
    counting.add_argument(
        "program",
        choices=EFFECTS,
    )
    counting.add_argument("--full", action="store_true", help="the complete counts")

    arguments = parser.parse_args()
    held: bool = arguments.function(arguments)
    if not held:
        print(f"seed {arguments.seed}", file=sys.stderr)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
