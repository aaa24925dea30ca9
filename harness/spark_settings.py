"""What Spark is told: its settings in a file, and the environment that makes it read them."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import pyspark

ROOT = Path(__file__).resolve().parents[1]
HOME = Path(pyspark.__file__).parent
HOST = "127.0.0.1"
PREPARED = ROOT / ".spark"
"""What is made once and used by every JVM (harness.spark_classes)."""
CLASSES = PREPARED / "classes.jsa"

# Where most code runs a few times only, compiling less pays.
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

_LOGGING = Path(__file__).with_name("spark_logging.properties")


def environment(
    directory: Path, master: str, conf: Mapping[str, str] | None = None, *, lasting: bool = False
) -> dict[str, str]:
    """The variables with which a Python program that only says `SparkSession.builder.getOrCreate()` runs on
    `master`; all files of it, also what a killed one leaves, are in `directory`. `conf` overrides ours.

    `lasting`: its JVMs run for minutes, and are to be as fast as Java can make them.
    Our packages (pgmb, harness, bench, faults, tests) can be imported in the driver and in Python workers.
    """
    temporary = directory / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    properties = directory / "spark.properties"
    lines = (_settings(directory, master, lasting) | dict(conf or {})).items()
    properties.write_text("".join(f"{key} {value}\n" for key, value in lines))
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SPARK_", "PYSPARK_"))}
    return kept | {
        "SPARK_HOME": str(_home()),
        # It comes first in the class path, and classes are shared among JVMs of the same class path alone.
        "SPARK_CONF_DIR": str(PREPARED / "conf"),
        "PYSPARK_SUBMIT_ARGS": f"--properties-file {shlex.quote(str(properties))} pyspark-shell",
        "SPARK_LOCAL_IP": HOST,
        "SPARK_LOCAL_DIRS": str(temporary),
        "SPARK_DAEMON_MEMORY": "256m",
        # An application whose executors are killed again and again is not given up.
        "SPARK_DAEMON_JAVA_OPTS": f"{java(temporary)} {SHORT_LIVED} -Dspark.deploy.maxExecutorRetries=-1",
        "SPARK_LAUNCHER_OPTS": f"-XX:-UsePerfData {SHORT_LIVED}",
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "TMPDIR": str(temporary),
    }


def _home() -> Path:
    """PySpark's programs without its Python archive. Workers would import from that first, compiling it each
    time, which is two thirds of their start; without it they import the installed package."""
    home = PREPARED / "home"
    home.mkdir(parents=True, exist_ok=True)
    for name in ("bin", "jars"):
        link = home / name
        if not link.exists():
            with contextlib.suppress(FileExistsError):
                link.symlink_to(HOME / name)
    return home


def _settings(directory: Path, master: str, lasting: bool) -> dict[str, str]:
    options = java(directory / "tmp")
    if not lasting:
        options += f" {SHORT_LIVED}"
    return {
        "spark.master": master,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": HOST,
        "spark.driver.bindAddress": HOST,
        "spark.driver.memory": "1g",
        # A machine with much else to do is slow, not broken.
        "spark.network.timeout": "600s",
        "spark.driver.extraJavaOptions": options,
        "spark.executor.memory": "1g",
        "spark.executor.extraJavaOptions": options,
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    }


def java(temporary: Path) -> str:
    """The options of every JVM."""
    options = [f"-Djava.io.tmpdir={temporary}", f"-Dlog4j2.configurationFile={_LOGGING}", "-XX:-UsePerfData"]
    if CLASSES.exists():
        options += [f"-XX:SharedArchiveFile={CLASSES}", "-Xlog:disable", "-Xlog:all=error:stderr"]
    else:
        # Checking Spark's classes is a quarter of the work of a JVM until it has warmed up.
        options += ["-XX:+UnlockDiagnosticVMOptions", "-XX:-BytecodeVerificationRemote"]
    return " ".join(options)
