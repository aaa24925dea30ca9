"""pgmb spark: read, publish, lag. PySpark is loaded only where a command runs it."""

from __future__ import annotations

import typer

from pgmb.cli.spark import lag, publish, read

spark = typer.Typer(help="Move events to and from files with Spark; see its readers.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    for command in (read.read, publish.publish, lag.lag):
        spark.command()(command)
    app.add_typer(spark, name="spark")
