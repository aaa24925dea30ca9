"""What the HTTP side must show: a crowd of readers that resume anywhere, browsers, and no failures."""

from __future__ import annotations

from dataclasses import replace

from bench.rows import ROWS, sse
from bench.score.core import proved_by_tests
from bench.score.part import Measured, Part, Proved, line_with

SERVER: list[Part] = [
    Measured("sse", sse.CHECKS, ROWS["sse"]),
    Proved(
        "malformed requests",
        "0 5xx, 0 leaks",
        ["-m", "faults", "server-fuzz", "--requests", "5000"],
        line_with(r"requests (\d+), (\d+ server errors), (\d+ leaks)"),
        needs=["faults/__main__.py", "faults/server/fuzz.py"],
        full=["-m", "faults", "server-fuzz", "--requests", "100000"],
    ),
    Proved(
        "readers, kills, stops, late commits",
        "0 missed, 0 twice",
        ["-m", "faults", "sse", "--readers", "200", "--seconds", "12"],
        line_with(r"(\d+ arrived).*?(\d+ missed), (\d+ repeated).*?(\d+ kills)"),
        needs=["faults/__main__.py", "faults/server/sse.py"],
        full=["-m", "faults", "sse"],
    ),
    Proved(
        "filters, bursts, kills, reconnects",
        "0 missed, 0 twice",
        ["-m", "faults", "filters", "--seconds", "9"],
        line_with(r"(\d+ arrived).*?(\d+ missed), (\d+ repeated).*?(\d+ resets).*?(\d+ kills)"),
        needs=["faults/__main__.py", "faults/server/filters.py"],
        full=["-m", "faults", "filters"],
    ),
    # Every operation, which takes minutes beside others.
    replace(
        proved_by_tests("OpenAPI, by schemathesis: no 5xx", "tests/server/rest/test_openapi*.py"), seconds=900
    ),
    proved_by_tests("the dashboard in Chromium, end to end", "tests/server/dashboard/test_*.py"),
    proved_by_tests("EventSource in Chromium, restarts", "tests/server/sse/test_browser*.py"),
    proved_by_tests("resume elsewhere, rotation, reset", "tests/server/sse/test_resume*.py"),
    proved_by_tests(
        "server-sent events, as promised",
        "tests/server/sse/test_events*.py",
        "tests/server/sse/test_staying*.py",
    ),
    proved_by_tests("in FastAPI, Litestar, Starlette", "tests/server/test_mounted*.py"),
    proved_by_tests("health, metrics, logs, deployment", "tests/server/operations/test_*.py"),
]
