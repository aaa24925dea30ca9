"""The fault programs about Spark as commands: their options, and one run of each."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from faults.command import command, option
from faults.database import database

_KILLS = (
    option("--writers", type=int, default=20),
    option("--delay", type=float, default=3.0, help="the longest wait before a commit, in seconds"),
    option("--size", type=int, default=12, help="events in one call, at most"),
    option("--rotate-every", type=float, default=3.0),
    option("--drivers", type=int, default=10, help="to kill"),
    option("--executors", type=int, default=20, help="to kill"),
    option("--per-trigger", type=int, default=300, help="events in a batch, at most"),
    option("--brief", action="store_true", help="one driver and one executor killed"),
)


@command(
    "spark-late-commits",
    "Spark reads what commits late, its driver and executors killed: each event once",
    *_KILLS,
)
def spark_late_commits(arguments: argparse.Namespace) -> bool:
    from faults.spark import late_commits

    return _killed_queries(arguments, late_commits.run)


@command(
    "spark-republish",
    "log to Spark to log to Spark under kills: each event once, every key in order",
    *_KILLS,
)
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


@command(
    "spark-sink",
    "Spark publishes while tasks and drivers fail, repeat and are killed: each event once",
    option("--rounds", type=int, default=200),
    option("--brief", action="store_true", help="a few runs, one of each kind"),
)
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
