"""What is done about each status, and what Retry-After may say."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from pgmb.webhooks.outcomes import Verdict, judge, retry_after

pytestmark = pytest.mark.once

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        *[(status, Verdict("delivered")) for status in (200, 201, 202, 204, 226, 299)],
        *[(status, Verdict("failed", "redirect")) for status in (300, 301, 302, 303, 304, 307, 308, 399)],
        *[(status, Verdict("throttled", f"http_{status}")) for status in (429, 502, 503, 504)],
        *[(status, Verdict("failed", f"http_{status}")) for status in (101, 401, 403, 404, 408)],
        *[(status, Verdict("refused", f"http_{status}")) for status in (400, 402, 409, 422, 451, 499)],
        *[(status, Verdict("failed", f"http_{status}")) for status in (500, 501, 505, 599, 999)],
        (410, Verdict("gone", "http_410")),
    ],
)
def test_the_status_decides(status: int, verdict: Verdict) -> None:
    assert judge(status, {}, None, NOW) == verdict
    assert judge(status, {}, ConnectionResetError(), NOW) == verdict


def test_only_those_that_throttle_are_asked_for_how_long() -> None:
    headers = CIMultiDict({"retry-after": "30"})
    assert judge(429, headers, None, NOW) == Verdict("throttled", "http_429", 30)
    assert judge(503, headers, None, NOW) == Verdict("throttled", "http_503", 30)
    assert judge(500, headers, None, NOW) == Verdict("failed", "http_500")
    assert judge(200, headers, None, NOW) == Verdict("delivered")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("120", 120),
        (" 120 ", 120),
        ("1.5", 1.5),
        ("0", 1),
        ("86400", 86400),
        ("86401", 86400),
        ("9" * 20, 86400),
        ("9" * 400, None),
        ("-5", None),
        ("+5", None),
        ("1e3", None),
        ("nan", None),
        ("inf", None),
        ("٣", None),
        ("", None),
        ("soon", None),
        ("120 seconds", None),
        ("Thu, 01 Jan 2026 12:01:00 GMT", 60),
        ("Thursday, 01-Jan-26 12:01:00 GMT", 60),
        ("Thu Jan  1 12:01:00 2026", 60),
        ("Thu, 01 Jan 2026 13:01:00 +0100", 60),
        ("Thu, 01 Jan 2026 11:00:00 GMT", 1),
        ("Mon, 01 Jan 1900 00:00:00 GMT", 1),
        ("Thu, 31 Dec 9999 23:59:59 GMT", 86400),
        ("Thu, 99 Jan 2026 12:01:00 GMT", None),
        ("2026-01-01T12:01:00Z", None),
    ],
)
def test_retry_after(value: str | None, seconds: float | None) -> None:
    assert retry_after(value, NOW) == seconds


@given(value=st.text(st.characters(codec="latin-1")))
def test_no_retry_after_does_harm(value: str) -> None:
    seconds = retry_after(value, NOW)
    assert seconds is None or 1 <= seconds <= 86_400
