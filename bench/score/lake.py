"""What the lake must show: archives as fast as Spark's files, once, verified; replays, erasures, reports."""

from __future__ import annotations

from bench.rows import ROWS, lake_archive, lake_growth, lake_read, lake_report
from bench.score.core import proved_by_tests
from bench.score.part import Measured, Part, Proved, line_with

LAKE: list[Part] = [
    Measured("lake-archive", lake_archive.CHECKS, ROWS["lake-archive"]),
    Measured("lake-growth", lake_growth.CHECKS, ROWS["lake-growth"]),
    Measured("lake-read", lake_read.CHECKS, ROWS["lake-read"]),
    Measured("lake-report", lake_report.CHECKS, ROWS["lake-report"]),
    Proved(
        "archivers killed after each step",
        "each once",
        ["-m", "faults", "lake-kills", "--brief"],
        line_with(r"(\d+ kills).*?([\d,]+ events).*?(\d+ lost, \d+ repeated, \d+ digests differ)"),
        needs=["faults/__main__.py", "faults/lake/kills.py"],
        full=["-m", "faults", "lake-kills"],
        heavy=True,
    ),
    Proved(
        "a query over both tiers, killed while the border moves",
        "each once",
        ["-m", "faults", "lake-border", "--brief"],
        line_with(
            r"(\d+ moves, \d+ kills).*?([\d,]+ events: \d+ lost, \d+ phantom, \d+ repeated)"
            r".*?both tiers.*?(\d+ lost, \d+ phantom, \d+ repeated)"
        ),
        needs=["faults/__main__.py", "faults/lake/borders.py"],
        full=["-m", "faults", "lake-border"],
        heavy=True,
    ),
    Proved(
        "replay into one queue, killed 10 times",
        "each once, rate kept",
        ["-m", "faults", "lake-replay", "--brief"],
        line_with(
            r"([\d,]+ events), (\d+ kills).*?(\d+ lost, \d+ repeated).*?([\d,]+ of [\d,]+ events per second)"
        ),
        needs=["faults/__main__.py", "faults/lake/replays.py"],
        full=["-m", "faults", "lake-replay"],
        heavy=True,
    ),
    Proved(
        "50 keys erased from log and lake, killed after each step",
        "in no file, readers go on",
        ["-m", "faults", "lake-erase", "--brief"],
        line_with(
            r"(\d+ keys) .*? among ([\d,]+ events), (\d+ kills): (found in \d+ files), (\d+ other events"
            r" changed, \d+ segments damaged); the tail missed or repeated (\d+), the streaming query (\d+)"
        ),
        needs=["faults/__main__.py", "faults/lake/erasures.py"],
        full=["-m", "faults", "lake-erase"],
        heavy=True,
    ),
    proved_by_tests("erasure", "tests/contract/test_erase*.py", "tests/lake/test_erase*.py"),
    Proved(
        "projection killed 10 times, recomputed by DuckDB",
        "equal",
        ["-m", "faults", "lake-projections", "--brief"],
        line_with(
            r"(\d+ kills).*?([\d,]+ erased); ([\d,]+ rows), ([\d,]+ rescued)"
            r".*?(\d+ lost, \d+ repeated, \d+ differ)"
        ),
        needs=["faults/__main__.py", "faults/lake/projections.py"],
        full=["-m", "faults", "lake-projections"],
        heavy=True,
    ),
    proved_by_tests(
        "projections, readers, drift", "tests/lake/test_project*.py", "tests/lake/test_columns.py"
    ),
    proved_by_tests("replay of both tiers", "tests/lake/test_replay*.py"),
    proved_by_tests("lost and damaged files block the drop", "tests/lake/test_archive*.py"),
    proved_by_tests("several archivers, S3 (moto)", "tests/lake/test_storage*.py"),
    proved_by_tests("digests of Polars, DuckDB, DataFusion, the log", "tests/lake/test_readers.py"),
    proved_by_tests("pgmb lake, on Spark", "tests/lake/test_cli*.py"),
    proved_by_tests(
        "log and lake as one stream", "tests/lake/test_one_stream*.py", "tests/lake/test_border*.py"
    ),
    proved_by_tests("log and lake as one stream, Python", "tests/lake/test_client*.py"),
    proved_by_tests("readers killed while the border moves", "tests/lake/test_readers_killed*.py"),
    proved_by_tests("pipeline: late orders, alerts, once", "tests/lake/test_example*.py"),
    proved_by_tests("report, on log and lake", "tests/lake/test_report*.py"),
    proved_by_tests("dead letters in a table, each once", "tests/lake/test_dead*.py"),
]
