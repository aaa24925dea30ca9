"""The fault programs about the lake as commands: their options, and one run of each."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from faults.command import command, option
from faults.database import database


@command(
    "lake-kills",
    "archivers killed after each step, several at once, under traffic: each event once, all verified",
    option("--times", type=int, default=5, help="after each step, and as often on Spark"),
    option("--brief", action="store_true", help="each step once, two of them on Spark"),
)
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


@command(
    "lake-border",
    "a query over lake and log, killed while the border between them moves: each event once",
    option("--events", type=int, default=5_000_000),
    option("--moves", type=int, default=20),
    option("--kills", type=int, default=5),
    option("--brief", action="store_true", help="40,000 events, 8 moves, 2 kills"),
)
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


@command(
    "lake-replay",
    "a replay of log and lake into one queue, killed again and again: each event once, at its rate",
    option("--events", type=int, default=500_000),
    option("--kills", type=int, default=10),
    option("--rate", type=float, default=2_500.0, help="events per second"),
    option("--brief", action="store_true", help="6,000 events, 500 per second"),
)
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


@command(
    "lake-erase",
    "keys erased from log and lake, killed after each step: in no file, and readers go on",
    option("--events", type=int, default=1_000_000),
    option("--brief", action="store_true", help="60,000 events, killed after four steps"),
)
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


@command(
    "lake-projections",
    "a projection killed again and again, with late, malformed and erased events: as DuckDB has it",
    option("--events", type=int, default=20_000, help="before each kill"),
    option("--times", type=int, default=3, help="at each step, and once on Spark"),
    option("--brief", action="store_true", help="each step once, 300 events, without Spark"),
)
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
