"""What matching and change events must show: filters, groups, table events, peers' calls."""

from __future__ import annotations

from bench.rows import ROWS
from bench.rows.matching import CHECKS
from bench.score.core import proved_by_tests
from bench.score.part import Measured, Part, Proved, line_with

MATCHING: list[Part] = [
    Measured("matching", CHECKS, ROWS["matching"]),
    Measured("compat", ["compat consume vs PGMQ", "compat archive vs PGMQ"], ROWS["compat"]),
    Measured(
        "compat-one",
        ["compat read(1) + delete(1) vs PGMQ", "compat read(1) + archive(1) vs PGMQ"],
        ROWS["compat-one"],
    ),
    Measured("table-events", ["table events, INSERT cost vs without"], ROWS["table-events"]),
    Proved(
        "one raising filter of 1,000",
        "0 wrong",
        ["-m", "faults", "filters", "--rounds", "2"],
        line_with(r"(\d+ queues).*?(\d+ events to the others).*?(\d+ wrong)"),
        needs=["faults/__main__.py", "faults/queue/filters.py"],
        full=["-m", "faults", "filters"],
    ),
    proved_by_tests(
        "rights: an attempt a test",
        "tests/contract/test_definers*.py",
        "tests/contract/test_matching_privileges*.py",
    ),
    proved_by_tests(
        "filters and conditions",
        "tests/contract/test_filters*.py",
        "tests/contract/test_conditions*.py",
        "tests/contract/test_filter_isolation*.py",
        "tests/contract/test_filtered_queues*.py",
        "tests/contract/test_matching_fuzz*.py",
    ),
    proved_by_tests(
        "subscriptions of groups",
        "tests/contract/test_subscriptions*.py",
        "tests/contract/client/test_retry_together*.py",
        "tests/contract/client/test_groups*.py",
    ),
    proved_by_tests("table events", "tests/contract/test_table_events*.py"),
    proved_by_tests(
        "the calls of fraruiz/pgmb", "tests/contract/test_workers.py", full="tests/contract/test_workers*.py"
    ),
    proved_by_tests("examples of the peers' READMEs", "tests/readmes/test_*.py"),
    proved_by_tests(
        "PyPI's pgmq, ours and real PGMQ",
        "tests/compat/test_conformance*.py",
        "tests/compat/test_signatures*.py",
        full="tests/compat/test_*.py",
    ),
]
