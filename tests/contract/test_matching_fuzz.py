"""Random filters and documents: every way of asking agrees, with each other and with Python."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract.asking import Asked, Given, Raw, matching, passing

pytestmark = pytest.mark.slow
RELAXED = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

NAMES = st.sampled_from(["a", "b", "0", "-1", "", "a b", "$", "x'y", 'x"y', "x\\", "{}", "é", "NULL"])
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0", exclude_categories=["Cs"]), max_size=6)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([0.5, 1.0, -0.0, 1e3, 1e15])
    | TEXTS
    | NAMES
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(NAMES, VALUES, max_size=4)
FIELDS = st.recursive(
    st.dictionaries(NAMES, SCALARS, min_size=1, max_size=2),
    lambda inner: st.dictionaries(NAMES, SCALARS | inner, min_size=1, max_size=2),
    max_leaves=3,
)


def same(one: Any, other: Any) -> bool:
    """As jsonb compares: 1 is 1.0, and is neither true nor "1"."""
    if isinstance(one, bool) or isinstance(other, bool) or one is None or other is None:
        return one is other
    return (type(one) in (int, float) and type(other) in (int, float) and one == other) or (
        isinstance(one, str) and isinstance(other, str) and one == other
    )  # fmt: skip


def has(document: Any, fields: dict[str, Any]) -> bool:
    if not isinstance(document, dict):
        return False
    for name, value in fields.items():
        if name not in document:
            return False
        if not (has if isinstance(value, dict) else same)(document[name], value):
            return False
    return True


@RELAXED
@given(FIELDS, st.lists(OBJECTS | VALUES, min_size=1, max_size=6))
def test_equal_fields(db: psycopg.Connection[Any], fields: dict[str, Any], payloads: list[Any]) -> None:
    events = [Given(payload) for payload in payloads]
    # One that has them for sure, and something else beside.
    events.append(Given({**fields, "more": 1} if "more" not in fields else fields))
    expected = [place for place, event in enumerate(events) if has(event.payload, fields)]
    assert len(events) - 1 in expected
    assert matching(db, Asked(equals={"payload": fields}), events) == expected
    turned = [Given(1, headers=event.payload) for event in events if isinstance(event.payload, dict)]
    found = [place for place, event in enumerate(turned) if has(event.headers, fields)]
    assert matching(db, Asked(equals={"headers": fields}), turned) == found


STEPS = st.sampled_from(["", "[*]", "[0]", ".*", ".size()", ".type()", ".double()", ".abs()"])
PATHS = st.builds(
    lambda root, names, step: root + "".join("." + json.dumps(name) for name in names) + step,
    st.sampled_from(["$.payload", "$.headers", "$.key", "$.topic", "$", "$.payload.**"]),
    st.lists(NAMES, max_size=2),
    STEPS,
)
LITERALS = st.builds(json.dumps, st.none() | st.booleans() | st.integers(-3, 3) | NAMES)
COMPARISONS = st.builds(
    lambda left, sign, right: f"{left} {sign} {right}",
    PATHS,
    st.sampled_from(["==", "!=", "<", ">=", ">"]),
    LITERALS | PATHS | st.just("$v"),
)
PREDICATES = st.recursive(
    COMPARISONS
    | PATHS.map(lambda path: f"exists({path})")
    | PATHS.map(lambda path: f"{path} starts with $v"),
    lambda inner: (
        st.builds(lambda a, sign, b: f"({a}) {sign} ({b})", inner, st.sampled_from(["&&", "||"]), inner)
        | inner.map(lambda one: f"!({one})")
        | inner.map(lambda one: f"({one}) is unknown")
    ),
    max_leaves=3,
)
MODES = st.sampled_from(["", "strict "])


@RELAXED
@given(MODES, PREDICATES, NAMES | st.integers(-3, 3), st.lists(OBJECTS | VALUES, min_size=1, max_size=6))
def test_predicates_mean_what_the_server_says(
    db: psycopg.Connection[Any], mode: str, predicate: str, value: Any, payloads: list[Any]
) -> None:
    """What jsonb_path_match says of the whole document, without any of our short ways."""
    events = [Given(payload, key="a", headers={"a": 1}) for payload in payloads]
    expected = []
    for place, event in enumerate(events):
        document = json.dumps({"topic": "t", "key": "a", "payload": event.payload, "headers": {"a": 1}})
        said = db.execute(
            "select jsonb_path_match(%s::jsonb, %s::jsonpath, %s::jsonb, true)",
            [document, mode + predicate, json.dumps({"v": value})],
        ).fetchone()
        if said == (True,):
            expected.append(place)
    assert matching(db, Asked(filter=mode + predicate, params={"v": value}), events) == expected


ODD = st.sampled_from(
    [r'"\u0000"', r'{"a": "\ud800"}', "1e400000", '{"b": 1e200000}',
     "[" * 3000 + "]" * 3000, r'{"\u0000": 1}']
)  # fmt: skip


@RELAXED
@given(MODES, PREDICATES, st.lists(ODD.map(Raw) | VALUES, min_size=1, max_size=5))
def test_nothing_that_was_published_breaks_a_filter(
    db: psycopg.Connection[Any], mode: str, predicate: str, payloads: list[Any]
) -> None:
    """Also not by pausing it, which `passing` looks for."""
    events = [Given(payload) for payload in payloads]
    found = passing(db, Asked(filter=mode + predicate, params={"v": "a"}), events)
    readable = [place for place, event in enumerate(events) if not isinstance(event.payload, Raw)]
    assert len({tuple(place for place in places if place in readable) for places in found.values()}) == 1, (
        found
    )
