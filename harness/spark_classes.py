"""python -m harness.spark_classes: what every JVM of Spark loads, read and checked once for all of them.

A JVM spends most of its first ten seconds on loading thousands of classes from jars. Java shares them from a
file (class data sharing), which is written here, if it is not there yet, by a session that does a little of
everything.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pyspark
from pyspark.sql.functions import count, window

from harness.postgres import Server, create_database
from harness.spark import session
from harness.spark_settings import CLASSES, PREPARED, ROOT, java
from pgmb import schema


def main() -> None:
    stamp = PREPARED / "made-of"
    made_of = f"{_java_version()}\nPySpark {pyspark.__version__}\n{ROOT}\n"
    if CLASSES.exists() and stamp.exists() and stamp.read_text() == made_of:
        return
    PREPARED.mkdir(exist_ok=True)
    CLASSES.unlink(missing_ok=True)
    draft = PREPARED / "draft.jsa"
    draft.unlink(missing_ok=True)
    print("setup: preparing the classes of Spark")
    with tempfile.TemporaryDirectory(prefix="pgmb-classes-") as directory:
        _work(Path(directory), draft)
    draft.rename(CLASSES)
    stamp.write_text(made_of)


def _work(directory: Path, archive: Path) -> None:
    """A job and a streaming query there and back, in a JVM that writes its classes down in the end."""
    with Server.start(18, name="classes") as server:
        dsn = server.dsn(create_database(server))
        schema.install(dsn)
        options = (
            f"{java(directory)} -XX:TieredStopAtLevel=1 -XX:ArchiveClassesAtExit={archive} -Xlog:disable"
        )
        conf = {"spark.driver.extraJavaOptions": options, "spark.log.level": "ERROR"}
        with session(directory, conf=conf) as spark:
            rows = spark.range(100).selectExpr("'t' topic", "to_json(struct(id)) payload")
            rows.write.format("pgmb").mode("append").option("url", dsn).save()
            counts = (
                spark.readStream.format("pgmb")
                .option("url", dsn)
                .option("startingOffsets", "earliest")
                .load()
                .withWatermark("published_at", "1 minute")
                .groupBy(window("published_at", "1 minute"), "topic")
                .agg(count("*").alias("events"))
            )
            writer = counts.select("window.start", "events").writeStream.format("parquet")
            writer = writer.option("path", str(directory / "counts"))
            writer = writer.option("checkpointLocation", str(directory / "checkpoint"))
            writer.trigger(availableNow=True).start().awaitTermination()
            spark.read.parquet(str(directory / "counts")).collect()


def _java_version() -> str:
    return subprocess.run(["java", "-version"], capture_output=True, text=True, check=True).stderr


if __name__ == "__main__":
    main()
