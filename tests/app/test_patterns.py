"""Topics match patterns in Python exactly as they do in SQL."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pgmb import InvalidArgument
from pgmb._core.patterns import matches

WORDS = st.sampled_from(["a", "b", "é", "a b", "a\n", "", "*", "#", "a+", "(", "$", "\\d", "a-b", "_"])
PATTERNS = st.lists(WORDS, min_size=1, max_size=5).map(".".join).filter(bool)
TOPICS = st.lists(WORDS, min_size=1, max_size=5).map(".".join)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(pattern=PATTERNS, topic=TOPICS)
def test_python_matches_what_sql_matches(pattern: str, topic: str, db: psycopg.Connection[Any]) -> None:
    row = db.execute("select pgmb.matches(%s, %s)", [pattern, topic]).fetchone()
    assert row == (matches(pattern, topic),)


@pytest.mark.parametrize(
    ("pattern", "topic", "expected"),
    [
        ("order.#", "order", True),
        ("order.#", "order.paid.late", True),
        ("order.*", "order", False),
        ("#.paid", "paid", True),
        ("#.paid", "order.x.paid", True),
        ("a.#.b", "a.b", True),
        ("a.#.b", "ab", False),
        ("*", "a.b", False),
        ("a", "a\n", False),
    ],
)
def test_words_stars_and_hashes(pattern: str, topic: str, expected: bool) -> None:
    assert matches(pattern, topic) is expected


@pytest.mark.parametrize("pattern", ["a*", "#a", "order.**", "##", ""])
def test_wildcards_stand_for_whole_words(pattern: str) -> None:
    with pytest.raises(InvalidArgument, match="invalid pattern"):
        matches(pattern, "a")
