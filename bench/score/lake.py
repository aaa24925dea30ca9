"""What the lake must show: archives as fast as Spark's files, once, verified before a drop; replays, once."""

from __future__ import annotations

from bench.rows import ROWS, lake_archive
from bench.score.core import proved_by_tests
from bench.score.part import Measured, Part, Proved, line_with

LAKE: list[Part] = [
    Measured("lake-archive", lake_archive.CHECKS, ROWS["lake-archive"]),
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
    proved_by_tests("replay of both tiers", "tests/lake/test_replay*.py"),
    proved_by_tests("lost and damaged files block the drop", "tests/lake/test_archive*.py"),
    proved_by_tests("several archivers, S3 (moto)", "tests/lake/test_storage*.py"),
    proved_by_tests("digests of Polars, DuckDB, the log", "tests/lake/test_readers*.py"),
    proved_by_tests("pgmb lake, on Spark", "tests/lake/test_cli*.py"),
    proved_by_tests(
        "log and lake as one stream", "tests/lake/test_one_stream*.py", "tests/lake/test_border*.py"
    ),
]
