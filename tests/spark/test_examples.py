"""The programs of examples/spark, and the one that docs/howto/spark.md makes, do what they say.

They run in the session that tests share, but for what Spark's own commands start; with FULL=1 each is a
process of its own.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from unittest import mock

import psycopg
import pyarrow.parquet
import pytest

from faults.spark.files import rows
from harness import spark_settings
from harness.processes import kill_group
from harness.spark import LOCAL, TOO_SLOW, Driver
from tests.docs.test_snippets import ROOT, SPARK, snippets

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FULL = bool(os.environ.get("FULL"))
pytestmark = [pytest.mark.slow, pytest.mark.once(18), pytest.mark.timeout(12000 if FULL else 3600)]

EXAMPLES = ROOT / "examples" / "spark"
PATIENCE = 3000.0 if FULL else 800.0
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


class Run(Protocol):
    def __call__(self, program: str, *arguments: object) -> None: ...


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a program to its end."""
    start = _as_process if FULL else partial(_in_session, request.getfixturevalue("spark"))

    def run(program: str, *arguments: object) -> None:
        for _ in range(5):
            try:
                start(EXAMPLES / program, *map(str, arguments))
            except Exception as failed:
                if TOO_SLOW not in str(failed):
                    raise
            else:
                return
        pytest.fail(TOO_SLOW)

    return run


def _as_process(program: Path, *arguments: str) -> None:
    Driver.start(program, *arguments).finish(PATIENCE)


def _in_session(spark: SparkSession, program: Path, *arguments: str) -> None:
    before = spark.conf.getAll
    try:
        with (
            mock.patch.object(sys, "argv", [str(program), *arguments]),
            mock.patch.object(type(spark), "stop"),
        ):
            runpy.run_path(str(program), run_name="__main__")
    finally:
        for name, value in spark.conf.getAll.items():
            if name not in before:
                spark.conf.unset(name)
            elif before[name] != value and spark.conf.isModifiable(name):
                spark.conf.set(name, before[name])


def submit(directory: Path, command: str, *arguments: object, **variables: str) -> None:
    """One of Spark's own commands."""
    environment = spark_settings.environment(directory, LOCAL) | variables
    properties = directory / "spark.properties"
    if command == "spark-pipelines":
        # It starts a server of its own, and takes neither a master nor a file of settings.
        lines = [line for line in properties.read_text().splitlines() if not line.startswith("spark.master ")]
        arguments = (
            *chain.from_iterable(("--conf", line.replace(" ", "=", 1)) for line in lines),
            *arguments,
        )
        environment["JDK_JAVA_OPTIONS"] = f"{spark_settings.java(directory)} {spark_settings.SHORT_LIVED}"
    else:
        arguments = ("--properties-file", properties, *arguments)
    code, output = 1, TOO_SLOW
    while code != 0 and TOO_SLOW in output:
        code, output = shell([spark_settings.HOME / "bin" / command, *arguments], environment, directory)
    assert code == 0, output[-4000:]


def shell(command: list[object], environment: dict[str, str], directory: Path) -> tuple[int, str]:
    """The exit code of a command and what it said. All of its processes are gone then."""
    with subprocess.Popen(
        [*map(str, command)],
        env=environment,
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    ) as process:
        try:
            output, _ = process.communicate(timeout=PATIENCE)
        finally:
            kill_group(process.pid)
    return process.returncode, output


def publish(db: psycopg.Connection[Any], topic: str, key: str | None, payload: dict[str, Any]) -> None:
    db.execute("select pgmb.publish(%s, %s::json, key => %s)", [topic, json.dumps(payload), key])


def test_the_page_on_spark_runs(run: Run, dsn: str, tmp_path: Path) -> None:
    """All its snippets, as one program. A JVM does not follow a process to another directory."""
    program = tmp_path / "program.py"
    text = "\n".join(snippets(ROOT / SPARK, "python")).replace("postgresql:///app", dsn)
    text, directories = re.subn(r'"(?=[\w-]+/(data|checkpoint)")', f'"{tmp_path}/', text)
    assert directories == 4
    program.write_text(text)
    run(str(program))


@pytest.mark.minutes
def test_counts_in_windows(run: Run, db: psycopg.Connection[Any], dsn: str, tmp_path: Path) -> None:
    def order(topic: str, minute: int) -> None:
        at = NOON + timedelta(minutes=minute)
        publish(db, topic, None, {"placed_at": at.isoformat()})

    def counted() -> dict[tuple[int, str], int]:
        return {
            (round((start - NOON).total_seconds() / 60), topic): orders
            for _, (start, topic, orders) in rows(tmp_path / "data", "start", "topic", "orders")
        }

    for minute in (0, 1, 4, 6):
        order("order.paid", minute)
    order("order.cancelled", 2)
    publish(db, "user.registered", None, {"placed_at": NOON.isoformat()})
    order("order.paid", 16)  # nothing before minute 6 is waited for any more
    run("windowed_counts.py", "--url", dsn, "--to", tmp_path)
    assert counted() == {(0, "order.paid"): 3, (0, "order.cancelled"): 1}

    order("order.paid", 7)  # late, but not too late
    order("order.paid", 3)  # too late
    order("order.paid", 40)
    run("windowed_counts.py", "--url", dsn, "--to", tmp_path)
    assert counted() == {
        (0, "order.paid"): 3,
        (0, "order.cancelled"): 1,
        (5, "order.paid"): 2,
        (15, "order.paid"): 1,
    }
    reader = db.execute("select name from pgmb.reader").fetchall()
    assert reader == [("windowed-counts",)]


@pytest.mark.minutes
def test_sessions_end_with_silence(run: Run, db: psycopg.Connection[Any], dsn: str, tmp_path: Path) -> None:
    def view(visitor: str, minute: int) -> None:
        publish(db, "page.viewed", visitor, {"at": (NOON + timedelta(minutes=minute)).isoformat()})

    def sessions() -> list[tuple[str, int, int, int]]:
        return sorted(
            (
                visitor,
                round((first - NOON).total_seconds() / 60),
                round((last - NOON).total_seconds() / 60),
                clicks,
            )
            for _, (visitor, first, last, clicks) in rows(
                tmp_path / "data", "visitor", "first", "last", "clicks"
            )
        )

    for visitor, minute in [("ann", 0), ("bob", 5), ("ann", 40), ("ann", 20), ("ann", 80), ("bob", 100)]:
        view(visitor, minute)
    run("sessions.py", "--url", dsn, "--to", tmp_path)
    # The watermark stands at minute 90: ann's second session may still grow.
    assert sessions() == [("ann", 0, 40, 3), ("bob", 5, 5, 1)]

    view("ann", 105)
    view("cleo", 300)
    run("sessions.py", "--url", dsn, "--to", tmp_path)
    assert sessions() == [("ann", 0, 40, 3), ("ann", 80, 105, 2), ("bob", 5, 5, 1), ("bob", 100, 100, 1)]


@pytest.mark.minutes
def test_orders_are_enriched_and_republished_once(
    run: Run, db: psycopg.Connection[Any], dsn: str, tmp_path: Path
) -> None:
    customers = tmp_path / "customers.csv"
    customers.write_text('customer,name,country\n1,Ann,FR\n2,"Bob ""B"" Ltd",DE\n')
    db.execute("select pgmb.create_stream('enriched')")

    def order(number: int) -> None:
        paid = {"order": number, "customer": number % 3 + 1, "total": number / 100}
        publish(db, "order.paid", f"customer-{number % 3 + 1}", paid)

    def enriched() -> list[tuple[Any, ...]]:
        return db.execute(
            "select (payload->>'order')::int, topic, key, payload from pgmb.log_enriched order by 1"
        ).fetchall()

    arguments = ("--url", dsn, "--customers", customers, "--checkpoint", tmp_path / "checkpoint")
    for number in range(500):
        order(number)
    publish(db, "order.cancelled", None, {"order": 3})
    submit(tmp_path, "spark-submit", EXAMPLES / "enrich.py", *arguments, "--batch", 130)
    assert [row[0] for row in enriched()] == [*range(500)]

    for number in range(500, 600):
        order(number)
    run("enrich.py", *arguments)
    found = enriched()
    assert [row[0] for row in found] == [*range(600)]
    assert found[0] == (
        0,
        "order.enriched",
        "customer-1",
        {"order": 0, "total": 0, "customer": {"customer": 1, "name": "Ann", "country": "FR"}},
    )
    assert found[598][3] == {
        "order": 598,
        "total": 5.98,
        "customer": {"customer": 2, "name": 'Bob "B" Ltd', "country": "DE"},
    }
    assert found[599][3] == {"order": 599, "total": 5.99, "customer": {"customer": 3}}


@pytest.mark.minutes
def test_a_pipeline_runs(db: psycopg.Connection[Any], dsn: str, tmp_path: Path) -> None:
    spec = tmp_path / "spark-pipeline.yml"
    given = (EXAMPLES / "pipeline" / "spark-pipeline.yml").read_text()
    spec.write_text(given.replace("file:///tmp/pgmb-orders-pipeline", f"file://{tmp_path}/storage"))
    (tmp_path / "transformations").symlink_to(EXAMPLES / "pipeline" / "transformations")
    catalog = ("--conf", "spark.sql.catalogImplementation=hive")

    def totals() -> dict[str, float]:
        table = pyarrow.parquet.read_table(tmp_path / "warehouse" / "by_country")
        return {row["country"]: float(row["total"]) for row in table.to_pylist()}

    def order(number: int, country: str) -> None:
        publish(db, "order.paid", None, {"order": number, "country": country, "total": 10.25})

    for number in range(6):
        order(number, "FR" if number % 3 else "DE")
    submit(tmp_path, "spark-pipelines", *catalog, "run", "--spec", spec, PGMB_DSN=dsn)
    assert totals() == {"FR": 41.0, "DE": 20.5}
    if not FULL:
        return

    order(6, "IT")
    submit(tmp_path, "spark-pipelines", *catalog, "run", "--spec", spec, PGMB_DSN=dsn)
    assert totals() == {"FR": 41.0, "DE": 20.5, "IT": 10.25}


def test_a_backfill_takes_place_once(run: Run, db: psycopg.Connection[Any], dsn: str, tmp_path: Path) -> None:
    events = 5_000_000 if FULL else 500
    db.execute("select pgmb.create_stream('orders')")
    arguments = ("--url", dsn, "--parquet", tmp_path / "orders")

    def found() -> tuple[Any, ...] | None:
        return db.execute(
            "select count(*), count(distinct (payload->>'order')::int),"
            " count(*) filter (where topic = 'order.paid'), count(distinct key),"
            " max((payload->>'placed_at')::timestamptz) from pgmb.log_orders"
        ).fetchone()

    last = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=events - 1)
    once = (events, events, events * 9 // 10, min(events, 10_000), last)
    run("backfill.py", *arguments, "--generate", "--events", events)
    assert found() == once
    run("backfill.py", *arguments)
    assert found() == once
    run("backfill.py", *arguments, "--version", 2, "--commit-mode", "direct")
    assert found() == (2 * events, events, 2 * once[2], once[3], last)
