"""sse: thousands of readers of server-sent events on one process, each of whom asks for one event in ten.

Events are published at an even pace. A tenth of the readers leave and come back with their last id. Every
reader checks that it gets each of its events once and in order. Compared are the database's transactions with
one reader and with all of them, at the same pace.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from statistics import median, quantiles
from typing import Any

import psutil
import psycopg

import pgmb
from bench import cpu
from bench.forms import Form
from bench.ground import Ground, transactions
from bench.outcome import Check, Outcome, Reading
from harness.serving import serving
from harness.sse_readers import GROUPS, SseReaders, payload

CHECKS = [
    "sse, missed, repeated or out of order",
    "sse, p99 from publish to reader",
    "sse, queries with all vs one reader",
]
_RATE = 200
_COUNTED = ("events", "missing", "repeated", "out_of_order", "came_back", "lost")


def run(ground: Ground, form: Form) -> Outcome:
    readers = {"tiny": 50}.get(form.name, 5_000)
    seconds = {"tiny": 1.0, "brief": 8.0}.get(form.name, 20.0)
    rounds = {"tiny": 1, "brief": 3}.get(form.name, 5)
    outcome = Outcome(
        "sse", f"{readers:,} readers on one process, {_RATE} events a second, each for 1 reader in {GROUPS}"
    )
    with contextlib.ExitStack() as stack:
        site = ground.site("pgmb")
        stack.callback(site.close)
        with pgmb.connect(site.dsn, max_size=1) as broker:
            key = broker.create_api_key("readers", ["read:main"]).key
        served = stack.enter_context(serving(site.dsn, "http"))
        stack.enter_context(_ticker(site.dsn))
        server = psutil.Process(served.process.pid)
        sse = SseReaders([served.port], key)
        stack.callback(sse.close)
        sse.tell("connect", 1, 0)
        _publish(site.dsn, 0, GROUPS * 20)  # it warms up
        sse.tell("finish", GROUPS * 20)

        def measure(name: str, number: int, churn: int) -> tuple[Reading, int, dict[str, Any]]:
            if churn:
                sse.tell("churn", churn, seconds)
            before = cpu.of_process(server.pid), transactions(site.connection), time.monotonic()
            upto = _publish(site.dsn, number, int(_RATE * seconds))
            wall = time.monotonic() - before[2]
            queries = (transactions(site.connection) - before[1]) / wall - _RATE
            report = sse.tell("finish", upto)
            used = cpu.of_process(server.pid) - before[0]
            extra = {
                "queries": queries,
                "cores": used / wall,
                **{n: report[n] * 1000 for n in ("p50", "p99", "most")},
            }
            return Reading(name, report["events"], wall, used, 0.0, extra), upto, report

        one, number, _ = measure("one reader", GROUPS * 20, 0)
        empty = server.memory_info().rss
        sse.tell("connect", readers - 1, number)
        each = (server.memory_info().rss - empty) / max(1, readers - 1)
        outcome.readings = [one]
        reports: list[dict[str, Any]] = []
        for _ in range(rounds):
            reading, number, report = measure("all readers", number, readers // 10 // rounds)
            outcome.readings.append(reading)
            reports.append(report)
    late = outcome.figures("all readers", "p99")
    low, _, high = quantiles(late, n=4, method="inclusive") if len(late) > 1 else late * 3
    queries = outcome.middle("all readers", "queries")
    told = {name: sum(report[name] for report in reports) for name in reports[0] if name in _COUNTED}
    outcome.checks = [
        Check(CHECKS[0], told["missing"] + told["repeated"] + told["out_of_order"], 0, False, unit=""),
        Check(CHECKS[1], median(late), 250, False, unit=" ms", rounds=(low, high)),
        Check(CHECKS[2], queries / max(1.0, one.extra["queries"]), 1.1, at_least=False),
    ]
    middle, most = outcome.middle("all readers", "p50"), max(outcome.figures("all readers", "most"))
    outcome.notes = [
        f"{told['events']:,} events to readers; {told['came_back']} came back, {told['lost']} dropped",
        f"p50 {middle:.0f} ms, most {most:.0f} ms; alone p50 {one.extra['p50']:.0f} ms",
        f"memory of the process: {each / 1024:.1f} KB a reader",
        f"queries a second: {one.extra['queries']:.0f} for one, {queries:.0f} for all",
        f"CPU of the process: {outcome.middle('all readers', 'cores'):.2f} of a core",
        *(complaint for report in reports for complaint in report["complaints"]),
    ]
    return outcome


def _publish(dsn: str, first: int, count: int) -> int:
    """One event a transaction, at an even pace. Returns the number after the last."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        start = time.monotonic()
        for place in range(count):
            ahead = start + place / _RATE - time.monotonic()
            if ahead > 0:
                time.sleep(ahead)
            connection.execute("select pgmb.publish('readers', %s)", [payload(first + place)], prepare=True)
    return first + count


@contextlib.contextmanager
def _ticker(dsn: str) -> Iterator[None]:
    """Roles apart, as where many readers are served: one process has one core."""
    with subprocess.Popen(
        [sys.executable, "-m", "pgmb", "ticker", "--dsn", dsn], stdout=subprocess.DEVNULL
    ) as process:
        try:
            yield
        finally:
            process.terminate()
