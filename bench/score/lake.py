"""What the lake must show: archives as fast as Spark's files, once, verified before a drop; replays, once."""

from __future__ import annotations

from bench.rows import ROWS, lake_archive, lake_read
from bench.score.core import proved_by_tests
from bench.score.part import Measured, Part, Proved, line_with

LAKE: list[Part] = [
    Measured("lake-archive", lake_archive.CHECKS, ROWS["lake-archive"]),
    Measured("lake-read", lake_read.CHECKS, ROWS["lake-read"]),
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
    proved_by_tests("digests of Polars, DuckDB, DataFusion, the log", "tests/lake/test_readers.py"),
    proved_by_tests("pgmb lake, on Spark", "tests/lake/test_cli*.py"),
    proved_by_tests(
        "log and lake as one stream", "tests/lake/test_one_stream*.py", "tests/lake/test_border*.py"
    ),
    proved_by_tests("log and lake as one stream, Python", "tests/lake/test_client*.py"),
    proved_by_tests("readers killed while the border moves", "tests/lake/test_readers_killed*.py"),
    proved_by_tests("dead letters in a table, each once", "tests/lake/test_dead*.py"),
]
