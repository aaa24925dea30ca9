"""What Spark must show: throughput beside psql and ADBC, batches that do not grow, and each event once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.rows import ROWS, spark_growth, spark_read, spark_write
from bench.score.core import proved_by_tests
from bench.score.part import Measured, Part, Proved, line_with


def _killed(
    name: str,
    goal: str,
    command: str,
    figure: Callable[[str], str | None],
    shows: Sequence[Proved] = (),
) -> Proved:
    """A fault run: `--brief` for the card, whole for the complete one."""
    return Proved(
        name,
        goal,
        ["-m", "faults", command, "--brief"],
        figure,
        needs=["faults/__main__.py", f"faults/spark/{command.removeprefix('spark-').replace('-', '_')}.py"],
        full=["-m", "faults", command],
        heavy=True,
        shows=shows,
    )


_LATE_COMMITS = _killed(
    "late commits, queries killed",
    "each once",
    "spark-late-commits",
    # Of the run that republishes, in whose first query the same happens, or of its own.
    line_with(r"([\d,]+ committed).*? kills: (?:second stream )?([^|;]*[^|; ])"),
)

SPARK: list[Part] = [
    Measured("spark-read", spark_read.CHECKS, ROWS["spark-read"]),
    Measured("spark-write", spark_write.CHECKS, ROWS["spark-write"]),
    Measured("spark-growth", spark_growth.CHECKS, ROWS["spark-growth"]),
    _killed(
        "log to Spark to log to Spark, killed",
        "once, in order",
        "spark-republish",
        line_with(r"([\d,]+ committed).*?last sink ([^|]*[^| ])"),
        shows=[_LATE_COMMITS],
    ),
    proved_by_tests("the five examples", "tests/spark/test_examples*.py"),
    _killed(
        "sink: retries, speculation, kills",
        "each once",
        "spark-sink",
        line_with(r"(\d+ runs).*?([\d,]+ lost, [\d,]+ repeated, \d+ stages left)"),
    ),
    proved_by_tests("retention and a query that lags", "tests/spark/test_retention*.py"),
    proved_by_tests("restored database is refused", "tests/spark/test_restored*.py", pg=15),
    proved_by_tests("replica, PostgreSQL 15", "tests/spark/test_replica*.py", pg=15),
    proved_by_tests("pgmb spark, as programs", "tests/spark/test_cli*.py"),
    proved_by_tests("a cluster's processes, killed", "tests/spark/test_cluster*.py"),
]
