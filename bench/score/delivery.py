"""What delivery over HTTP must show: throughput, isolation, limits, and that kills lose nothing."""

from __future__ import annotations

from bench.rows import ROWS, delivery, delivery_isolation, delivery_matching
from bench.score.core import proved_by_tests
from bench.score.part import Measured, Part, Proved, line_with

_FAULTS = ["faults/__main__.py"]

DELIVERY: list[Part] = [
    Measured("delivery", delivery.CHECKS, ROWS["delivery"]),
    Measured("delivery-isolation", delivery_isolation.CHECKS, ROWS["delivery-isolation"]),
    Measured("delivery-matching", delivery_matching.CHECKS, ROWS["delivery-matching"]),
    Proved(
        "limits, 3 dispatchers",
        "within 6 %, <= 7",
        # 6 % of the 70 requests of an endpoint are 4: a lease that was posted late does not decide.
        ["-m", "faults", "delivery-limits", "--seconds", "14"],
        line_with(r"([\d.]+ a second).*?(200 at [\d.-]+).*?(at most \d+ in flight)"),
        needs=[*_FAULTS, "faults/webhook/limits.py"],
        full=["-m", "faults", "delivery-limits"],
        alone=True,
    ),
    Proved(
        "dispatchers killed at 6 steps",
        "0 lost, same id",
        ["-m", "faults", "delivery-kills", "--times", "3"],
        line_with(r"(\d+ kills).*?(\d+ lost).*?(\d+ unexplained)"),
        needs=[*_FAULTS, "faults/webhook/kills.py"],
        full=["-m", "faults", "delivery-kills"],
    ),
    Proved(
        "endpoints that misbehave",
        "others get all",
        ["-m", "faults", "delivery-chaos", "--deliveries", "1000"],
        line_with(r"(\d+ deliveries).*?(\d+ missed).*?(\d+ hits on the canary)"),
        needs=[*_FAULTS, "faults/webhook/chaos.py"],
        full=["-m", "faults", "delivery-chaos"],
    ),
    Proved(
        "kills, stops, restarts, 20 endpoints",
        "0 lost, limits hold",
        ["-m", "faults", "delivery-storm", "--seconds", "25"],
        line_with(r"(\d+ lost).*?(\d+ out of order).*?(at most \d+ in flight).*?([\d.]+ a second)"),
        needs=[*_FAULTS, "faults/webhook/storm.py"],
        full=["-m", "faults", "delivery-storm"],
    ),
    proved_by_tests(
        "breaker, 410, Retry-After, schedule",
        "tests/webhooks/test_script*.py",
        "tests/webhooks/test_breaker*.py",
        "tests/webhooks/test_schedule*.py",
        "tests/webhooks/test_outcomes*.py",
    ),
    proved_by_tests(
        "hostile URLs, rebinding, redirects",
        "tests/webhooks/test_addresses*.py",
        "tests/adversary/test_webhook_receiver.py",
        "tests/webhooks/test_client*.py",
    ),
    proved_by_tests(
        "signatures beside standardwebhooks",
        "tests/webhooks/test_signature*.py",
        "tests/webhooks/test_request*.py",
        "tests/webhooks/test_sealing*.py",
    ),
    proved_by_tests("the Dispatcher's promises", "tests/webhooks/test_dispatch*.py"),
    proved_by_tests("the quick start of fraruiz/pgmb", "tests/webhooks/test_quick_start*.py"),
]
