"""A Spark session for one command: quiet, and gone with it."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from pgmb.cli import output
from pgmb.cli.spark.failures import explained

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Master: TypeAlias = Annotated[str, typer.Option(help="Where Spark runs.")]
Conf: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE", help="A setting of Spark, such as spark.driver.memory=4g.", show_default=False
    ),
]

UNTOLD = "application_name='pgmb spark'"
"""A connection string that leaves to PGHOST and the like where the database is."""


@contextmanager
def session(master: str, conf: Sequence[str] | None) -> Generator[SparkSession]:
    """A session on `master`. What Spark and its workers log goes to a file that is removed with it."""
    settings = _settings(conf)
    try:
        import_module("pgmb.spark.source.readers")
        import_module("pgmb.spark.sink.writers")
        from pyspark.sql import SparkSession
    except ImportError as error:
        output.fail(f"this needs Spark and Arrow: {error}", 'Install them: pip install "pgmb[spark]".')
    # What py4j has to say about a connection that ends is no message of ours.
    logging.getLogger().addHandler(logging.NullHandler())
    with (
        tempfile.TemporaryDirectory(prefix="pgmb-spark-", ignore_cleanup_errors=True) as folder,
        _ended_cleanly(),
    ):
        _prepare(master)
        builder = SparkSession.builder.master(master).appName("pgmb spark")
        for name, value in (_usual(master, folder) | settings).items():
            builder = builder.config(name, value)
        log = Path(folder) / "log"
        with explained(log), _written_to(log):
            started = builder.getOrCreate()
        # The JVM that was started here, which pyspark leaves to live on as long as this process.
        gateway: Any = started.sparkContext._gateway  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
        try:
            # An error of Spark asks the JVM for its text.
            with explained(log):
                yield started
                started.stop()
                gateway.shutdown()
        finally:
            # Whatever ended it. Workers see that it is gone, and go.
            gateway.proc.stdin.close()
            gateway.proc.kill()
            gateway.proc.wait()


def _settings(conf: Sequence[str] | None) -> dict[str, str]:
    settings: dict[str, str] = {}
    for given in conf or ():
        name, equals, value = given.partition("=")
        if not equals or not name.strip():
            raise typer.BadParameter(f"not a setting: {given!r}. Write NAME=VALUE.")
        settings[name.strip()] = value.strip()
    return settings


def _usual(master: str, folder: str) -> dict[str, str]:
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.local.dir": folder,
        "spark.sql.warehouse.dir": f"{folder}/warehouse",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={folder}",
    }
    if master.startswith("local"):
        settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    return settings


def _prepare(master: str) -> None:
    """Workers run the Python that runs this, which has what they need; not the first one in PATH."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")


@contextmanager
def _written_to(log: Path) -> Generator[None]:
    """What a process that is started here prints goes to a file for as long as it lives."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.dup2(opened, 1)
        os.dup2(opened, 2)
        yield
    finally:
        for number, was in zip((1, 2), kept, strict=True):
            os.dup2(was, number)
            os.close(was)
        os.close(opened)


@contextmanager
def _ended_cleanly() -> Generator[None]:
    """SIGTERM ends it as Ctrl-C does: nothing is left behind."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
