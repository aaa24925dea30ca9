"""What Spark is told: its settings in a file, and the environment that makes it read them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pyspark

ROOT = Path(__file__).resolve().parents[1]
HOME = Path(pyspark.__file__).parent
HOST = "127.0.0.1"

# Where most code runs a few times only, compiling less pays.
_SHORT_LIVED = "-XX:TieredStopAtLevel=1"

_LOGGING = """\
rootLogger.level = warn
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss.SSS} %p %c{1}: %m%n%ex
"""


def environment(directory: Path, master: str, conf: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables with which a Python program that only says `SparkSession.builder.getOrCreate()` runs on
    `master`; all files of it, also what a killed one leaves, are in `directory`. `conf` overrides ours.

    Our packages (pgmb, harness, bench, faults, tests) can be imported in the driver and in Python workers.
    """
    settings, temporary = directory / "conf", directory / "tmp"
    settings.mkdir(parents=True, exist_ok=True)
    temporary.mkdir(exist_ok=True)
    lines = (_settings(directory, master) | dict(conf or {})).items()
    (settings / "spark-defaults.conf").write_text("".join(f"{key} {value}\n" for key, value in lines))
    (settings / "log4j2.properties").write_text(_LOGGING)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SPARK_", "PYSPARK_"))}
    return kept | {
        "SPARK_HOME": str(_home(directory)),
        "SPARK_CONF_DIR": str(settings),
        "SPARK_LOCAL_IP": HOST,
        "SPARK_LOCAL_DIRS": str(temporary),
        "SPARK_DAEMON_MEMORY": "256m",
        # An application whose executors are killed again and again is not given up.
        "SPARK_DAEMON_JAVA_OPTS": f"{_java(temporary)} {_SHORT_LIVED} -Dspark.deploy.maxExecutorRetries=-1",
        "SPARK_LAUNCHER_OPTS": f"-XX:-UsePerfData {_SHORT_LIVED}",
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "TMPDIR": str(temporary),
    }


def _home(directory: Path) -> Path:
    """PySpark's programs without its Python archive. Workers would import from that first, compiling it each
    time, which is two thirds of their start; without it they import the installed package."""
    home = directory / "home"
    if not home.exists():
        home.mkdir()
        for name in ("bin", "jars"):
            (home / name).symlink_to(HOME / name)
    return home


def _settings(directory: Path, master: str) -> dict[str, str]:
    java = _java(directory / "tmp")
    driver = f"{java} {_SHORT_LIVED}" if master.startswith("local") else java
    return {
        "spark.master": master,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": HOST,
        "spark.driver.bindAddress": HOST,
        "spark.driver.memory": "1g",
        # A machine with much else to do is slow, not broken.
        "spark.network.timeout": "600s",
        "spark.driver.extraJavaOptions": driver,
        "spark.executor.memory": "1g",
        "spark.executor.extraJavaOptions": java,
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    }


def _java(temporary: Path) -> str:
    return f"-Djava.io.tmpdir={temporary} -XX:-UsePerfData"
