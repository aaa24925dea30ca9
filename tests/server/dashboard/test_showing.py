"""How things are shown: documents of any size and depth, durations, backoff; no database."""

from __future__ import annotations

import json
import shlex
from datetime import UTC, datetime, timedelta

import pytest

from pgmb.server.dashboard import formats
from pgmb.server.dashboard.formats import Node, curl, iso_seconds, parse_json, retry_schedule

pytestmark = pytest.mark.once()


def count(node: Node) -> int:
    return 1 + sum(count(child) for child in node.children)


def test_a_document_is_a_tree_in_its_own_order() -> None:
    shown = parse_json('{"b": [1, true, null], "a": {"x": "y"}, "e": {}, "f": 1.50}')
    assert shown.tree is not None
    assert [child.name for child in shown.tree.children] == ["b", "a", "e", "f"]
    assert [child.kind for child in shown.tree.children] == ["array", "object", "object", "number"]
    assert [child.text for child in shown.tree.children[0].children] == ["1", "true", "null"]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(list(range(100_000))),
        json.dumps({str(n): {"m": n} for n in range(50_000)}),
        "[" * 900 + "]" * 900,
        json.dumps("x" * 3_000_000),
        json.dumps({"k" * 100_000: 1}),
    ],
    ids=["long", "wide", "deep", "text", "name"],
)
def test_what_is_too_large_to_be_read_is_cut_and_says_so(text: str) -> None:
    shown = parse_json(text)
    assert len(shown.raw) <= 100_000
    assert shown.bytes == len(text)
    if shown.tree is not None:
        assert count(shown.tree) < 3100
        assert len(shown.tree.text) <= 500


def test_what_cannot_be_decoded_is_still_text() -> None:
    for text in ("[" * 100_000 + "]" * 100_000, '"\\ud800"', "{", ""):
        shown = parse_json(text)
        assert shown.tree is None
        assert shown.raw == text[:100_000]


def test_curl_publishes_the_same_to_the_letter() -> None:
    event = {"topic": "it's", "key": '"', "payload": '{"a": 1.10, "q": "\'"}', "headers": '{"h": "$(x)"}'}
    command = curl("http://h/base/", "a b", event)
    assert command is not None
    words = shlex.split(command)
    assert words[3] == "http://h/base/v1/streams/a%20b/events"
    assert json.loads(words[-1]) == {
        "topic": "it's",
        "key": '"',
        "payload": {"a": 1.1, "q": "'"},
        "headers": {"h": "$(x)"},
    }
    assert '{"a": 1.10' in words[-1]
    assert curl("http://h", "s", {**event, "payload": "1" * 200_000}) is None


def test_durations_are_read_and_written() -> None:
    assert [
        iso_seconds(text) for text in ("PT30S", "PT1H", "P1DT2H3M4.5S", "P1Y2M", "PT0S", "nonsense", None)
    ] == [
        30,
        3600,
        93784.5,
        365.25 * 86400 + 60 * 86400,
        0,
        0,
        0,
    ]
    assert [str(formats.age(value)) for value in (0.0123, 4.25, 59, 61, 3600, 90_061, -5)] == [
        "12 ms",
        "4.2 s",
        "59 s",
        "1 min 1 s",
        "1 h",
        "1 d 1 h",
        "-5.0 s",
    ]
    assert "5 h ago" in formats.moment(datetime.now(UTC) - timedelta(hours=5, seconds=1))
    assert "in 5 h" in formats.moment(datetime.now(UTC) + timedelta(hours=5, seconds=59))


def test_backoff_grows_to_its_most() -> None:
    settings = {"backoff_base": "PT1S", "backoff_max": "PT10S", "backoff_factor": 2.0, "max_attempts": 6}
    assert [step.wait for step in retry_schedule(settings)] == [1, 2, 4, 8, 10]
    assert retry_schedule(settings)[-1].total == 25
    assert retry_schedule({**settings, "max_attempts": 1}) == []
    assert len(retry_schedule({**settings, "max_attempts": 2_000_000_000, "backoff_factor": 1e300})) == 12


def test_text_is_cut_and_escaped() -> None:
    shown = str(formats.short("<b>" * 1000, 10))
    assert "<b>" not in shown
    assert len(shown) < 15_000
    assert str(formats.number(None)) == '<span class="none">&ndash;</span>'


def test_a_bound_is_shown_as_one() -> None:
    row = {"waiting": 10_000, "dead": 10_000, "leased": 500, "at_least": ["waiting"], "at_most": ["leased"]}
    assert [formats.figure(row, field) for field in ("waiting", "dead", "leased")] == [
        "10,000+",
        "10,000",
        "≤ 500",
    ]
