"""Filters without SQL: what passes, and that a queue, a group and a tail agree about it."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from harness.states import queue_names
from tests.contract.asking import Asked, Given, Raw, matching, passing

NULL = Raw("null")

EQUALITY: list[tuple[Any, Given, bool]] = [
    ({"payload": {"a": 1}}, Given({"a": 1}), True),
    ({"payload": {"a": 1}}, Given({"a": 1, "b": 2}), True),
    ({"payload": {"a": 1}}, Given({"a": 1.0}), True),
    ({"payload": {"a": 1.0}}, Given(Raw('{"a": 1e0}')), True),
    ({"payload": {"a": 1}}, Given({"a": "1"}), False),
    ({"payload": {"a": 1}}, Given({"a": 2}), False),
    ({"payload": {"a": 1}}, Given({"b": 1}), False),
    ({"payload": {"a": 1}}, Given({"a": [1]}), False),
    ({"payload": {"a": 1}}, Given({"a": {"b": 1}}), False),
    ({"payload": {"a": 1}}, Given([{"a": 1}]), False),
    ({"payload": {"a": 1}}, Given([1]), False),
    ({"payload": {"a": 1}}, Given(1), False),
    ({"payload": {"a": 1}}, Given(None), False),
    ({"payload": {"a": 1}}, Given(Raw('{"a": 2, "a": 1}')), True),
    ({"payload": {"a": 1}}, Given(Raw('{"a": 1, "a": 2}')), False),
    ({"payload": {"a": None}}, Given({"a": None}), True),
    ({"payload": {"a": None}}, Given({}), False),
    ({"payload": {"a": None}}, Given({"a": 0}), False),
    ({"payload": {"a": True}}, Given({"a": True}), True),
    ({"payload": {"a": True}}, Given({"a": "true"}), False),
    ({"payload": {"a": ""}}, Given({"a": ""}), True),
    ({"payload": {"a": {"b": {"c": "x"}}}}, Given({"a": {"b": {"c": "x", "d": 1}, "e": 1}}), True),
    ({"payload": {"a": {"b": {"c": "x"}}}}, Given({"a": {"b": "x"}}), False),
    ({"payload": {"a": {"b": 1}}}, Given({"a": [{"b": 1}]}), False),
    ({"payload": {"0": "x"}}, Given(["x"]), False),
    ({"payload": {"0": "x"}}, Given({"0": "x"}), True),
    ({"payload": {"a": {"-1": "x"}}}, Given({"a": ["x"]}), False),
    ({"payload": {"a": {"-1": "x"}}}, Given({"a": {"-1": "x"}}), True),
    ({"payload": {'"{x},': "\\'"}}, Given({'"{x},': "\\'"}), True),
    ({"payload": {"": 1}}, Given({"": 1}), True),
    ({"payload": {"a": 12345678901234567890123}}, Given(Raw('{"a": 12345678901234567890123}')), True),
    ({"payload": {"a": 12345678901234567890123}}, Given(Raw('{"a": 12345678901234567890124}')), False),
    ({"payload": {"a": 1, "b": 2}}, Given({"a": 1, "b": 2}), True),
    ({"payload": {"a": 1, "b": 2}}, Given({"a": 1, "b": 3}), False),
    ({"headers": {"x": "y"}}, Given(1, headers={"x": "y"}), True),
    ({"headers": {"x": "y"}}, Given(1, headers={"x": "z"}), False),
    ({"headers": {"x": "y"}}, Given(1), False),
    ({"headers": {"x": None}}, Given(1), False),
    ({"headers": {"x": "y"}}, Given(Raw(r'"\u0000"'), headers={"x": "y"}), True),
    ({"headers": {"x": "y"}}, Given(1, headers=Raw(r'{"x": "y", "z": "\u0000"}')), False),
    ({"topic": "t"}, Given(1), True),
    ({"topic": "t"}, Given(Raw(r'"\u0000"')), True),
    ({"topic": "u"}, Given(1), False),
    ({"key": "k"}, Given(1, key="k"), True),
    ({"key": "k"}, Given(1, key="l"), False),
    ({"key": "k"}, Given(1), False),
    ({"key": None}, Given(1), True),
    ({"key": None}, Given(1, key="k"), False),
    ({"key": None, "payload": {"a": 1}}, Given({"a": 1}), True),
    ({"key": "k", "topic": "t", "headers": {"h": 1}, "payload": {"a": 1}},
     Given({"a": 1}, key="k", headers={"h": 1}), True),
]  # fmt: skip


def test_fields_are_equal_or_not(db: psycopg.Connection[Any]) -> None:
    for equals, event, expected in EQUALITY:
        found = passing(db, Asked(equals=equals), [event])
        assert set(map(tuple, found.values())) == {(0,) if expected else ()}, (equals, event, found)


NUMBERS = [Given({"n": n}) for n in (1, 2, "2", None, [2], [1, 3], {"m": 2})] + [
    Given({}),
    Given(2),
    Given(None),
]

PATHS: list[tuple[str, Any, list[int]]] = [
    ("$.payload.n > 1", {}, [1, 4, 5]),
    ("strict $.payload.n > 1", {}, [1]),
    ("$.payload.n > $least", {"least": 1}, [1, 4, 5]),
    ("$.payload.n == $n", {"n": "2"}, [2]),
    ("$.payload.n == null", {}, [3]),
    ("$.payload.n[*] > 2", {}, [5]),
    ("$.payload.n", {}, [0, 1, 2, 3, 4, 5, 6]),
    ("$.payload ? (@.n == 1 || @.n.m == 2)", {}, [0, 5, 6]),
    ("strict $.payload ? (@.n == 1)", {}, [0]),
    ("exists($.payload.n.m)", {}, [6]),
    ("!exists($.payload.n)", {}, [7, 8, 9]),
    ("$ ? (!exists(@.payload.n))", {}, [7, 8, 9]),
    ("$ ? (@.payload.n == 1)", {}, [0, 5]),
    ("$", {}, list(range(10))),
    ("$.payload", {}, list(range(10))),
    ("$.payload.type() == \"number\"", {}, [8]),
    ("$.payload.n.type() == \"array\"", {}, [4, 5]),
    ("strict $.payload.n.type() == \"array\"", {}, [4, 5]),
    ("$.payload.** == 3", {}, [5]),
    ("$.payload.n.double() == 2", {}, [1, 2, 4]),
    ("$.payload.n + 1 == 2", {}, [0]),
    ("$.payload.n / 0 == 1", {}, []),
    ("$.payload.n like_regex \"^2\"", {}, [2]),
    ("$.payload.n starts with $start", {"start": "2"}, [2]),
    ("$.topic == \"t\" && $.payload.n == 1", {}, [0, 5]),
    ("$.key == null", {}, list(range(10))),
    ("$.headers.x == 1", {}, []),
    ("$.\"payload\".\"n\" == 1", {}, [0, 5]),
    ("$.payload.n == \"$.\\\"payload\\\"\"", {}, []),
    ("true", {}, list(range(10))),
    ("false", {}, []),
    ("$yes", {"yes": True}, list(range(10))),
    ("1 == 1", {}, list(range(10))),
    ("$.payload.n ? (@ > $least) > $least", {"least": 1, "unused": None}, [1, 4, 5]),
    ("($.payload.n == 1) is unknown", {}, [2, 6]),
]  # fmt: skip


@pytest.mark.parametrize(("path", "params", "expected"), PATHS, ids=[one[0] for one in PATHS])
def test_paths_and_predicates(
    module_db: psycopg.Connection[Any], path: str, params: Any, expected: list[int]
) -> None:
    assert matching(module_db, Asked(filter=path, params=params), NUMBERS) == expected


def test_fields_and_a_filter_are_asked_together(db: psycopg.Connection[Any]) -> None:
    asked = Asked({"payload": {"a": 1}, "headers": {"h": "x"}}, "$.payload.n > $least", params={"least": 2})
    events = [
        Given({"a": 1, "n": 3}, headers={"h": "x"}),
        Given({"a": 1, "n": 2}, headers={"h": "x"}),
        Given({"a": 2, "n": 3}, headers={"h": "x"}),
        Given({"a": 1, "n": 3}, headers={"h": "y"}),
        Given({"a": 1, "n": 3}),
    ]
    assert matching(db, asked, events) == [0]


REFUSED: list[Asked] = [
    Asked(equals=[]),
    Asked(equals={}),
    Asked(equals="a"),
    Asked(equals={"id": "x"}),
    Asked(equals={"payload": 1}),
    Asked(equals={"payload": {}}),
    Asked(equals={"payload": {"a": [1]}}),
    Asked(equals={"payload": {"a": {}}}),
    Asked(equals={"topic": {"a": "b"}}),
    Asked(equals={"topic": None}),
    Asked(equals={"topic": 1}),
    Asked(equals={"key": 1}),
    Asked(equals={"key": True}),
    Asked(equals={"payload": {"a": "x" * 8000}}),
    Asked(filter=""),
    Asked(filter="$.a ="),
    Asked(filter="select 1"),
    Asked(filter="$.a == 1; drop table pgmb.queue"),
    Asked(filter="$.payload.n > $least"),
    Asked(filter="$.payload.n > $least", params={"most": 1}),
    Asked(filter='$.payload.n > $"a b"', params={"ab": 1}),
    Asked(filter='$.payload.n like_regex "("'),
    Asked(filter="$.payload.n == 1 && " * 300 + "true"),
    Asked(filter="$.a == 1", params=[1]),
    Asked(filter="$.a == 1", params={"x": "y" * 8000}),
    Asked(filter="(" * 3000 + "$.a == 1" + ")" * 3000),
]


@pytest.mark.parametrize("asked", REFUSED, ids=lambda asked: repr(asked)[:60])
def test_what_is_no_filter_is_refused_when_it_is_written(db: psycopg.Connection[Any], asked: Asked) -> None:
    db.execute("select pgmb.create_queue('q')")
    given = {
        "equals": None if asked.equals is None else Jsonb(asked.equals),
        "filter": asked.filter,
        "params": None if asked.params is None else Jsonb(asked.params),
    }
    what = "equals => %(equals)s::jsonb, filter => %(filter)s::text, params => %(params)s::jsonb"
    for call in (
        f"pgmb.create_queue('r', {what})",
        f"pgmb.bind('q', '{{#}}', {what})",
        f"pgmb.subscribe('g', {what})",
        f"pgmb.between_filtered('main', pgmb.earliest(), pgmb.position(), {what})",
    ):
        with pytest.raises(psycopg.Error) as refusal:
            db.execute(f"select {call}", given)
        assert refusal.value.sqlstate == "MB009", (call, str(refusal.value))
    assert queue_names(db) == ["q"]
    assert db.execute("select count(*) from pgmb.subscription").fetchall() == [(0,)]


DEEP = 12_000
ODD = [
    Raw(r'{"n": 1, "x": "\u0000"}'),
    Raw(r'{"n": 1, "x": "\ud800"}'),
    Raw('{"n": 1, "x": 1e400000}'),
    Raw('{"n": 1, "x": ' + "[" * DEEP + "]" * DEEP + "}"),
    Raw('{"n": 1, "x": ' + '{"n":' * 2000 + "1" + "}" * 2000 + "}"),
    Raw('{"n": 1, "x": "' + "y" * 2**20 + '"}'),
    Raw('{"n": 1, "\\u0000": 1}'),
]


@pytest.mark.parametrize(
    "asked",
    [
        Asked(equals={"payload": {"n": 1}}),
        Asked(filter="$.payload.n == 1"),
        Asked(filter='$.topic == "t" && $.payload.n == 1'),
        Asked(filter="exists($.payload.** ? (@.n == 1))"),
        Asked(filter="strict exists($.** ? (@ == 1))"),
        Asked(condition="e.payload->>'n' = '1'"),
        Asked(condition='e.event @> \'{"payload": {"n": 1}}\''),
        Asked(equals={"payload": {"n": 1}}, filter="$.payload.n == 1", condition="e.payload->>'n' = '1'"),
    ],
    ids=repr,
)
def test_what_jsonb_cannot_hold_matches_none_and_its_neighbours_are_delivered(
    db: psycopg.Connection[Any], asked: Asked
) -> None:
    events: list[Given] = []
    for odd in ODD:
        events += [Given({"n": 1}), Given(odd)]
    events += [Given({"n": 1}), Given({"n": 1}, headers=Raw(r'{"h": "\u0000"}'))]
    found = passing(db, asked, events)
    plain = list(range(0, len(events) - 1, 2))
    # Headers that cannot be held hide no payload from those who ask about that alone.
    assert all(places in (plain, [*plain, len(events) - 1]) for places in found.values()), found


def test_nesting_is_looked_into_a_thousand_deep(db: psycopg.Connection[Any]) -> None:
    def nested(depth: int) -> Given:
        return Given(Raw("[" * depth + "1" + "]" * depth))

    events = [nested(depth) for depth in (1, 100, 998, 1001, 5000)]
    events.append(Given([[n] for n in range(3000)]))
    assert matching(db, Asked(filter="$.payload.** == 1"), events) == [0, 1, 2, 5]


def test_patterns_decide_before_filters(db: psycopg.Connection[Any]) -> None:
    """A filter that would raise is not asked about other topics."""
    raising = '$.payload.at.datetime() < "2020-01-01T00:00:00+00:00".datetime()'
    db.execute("select pgmb.create_queue('q', '{wanted.*}', filter => %s)", [raising])
    for topic in ("other", "wanted.one", "other"):
        at = "2019-01-01T00:00:00+00:00" if topic == "wanted.one" else "2019-01-01"
        db.execute("select pgmb.publish(%s, json_build_object('at', %s::text))", [topic, at])
    assert db.execute("select topic from pgmb.receive('q')").fetchall() == [("wanted.one",)]


def test_what_comes_first_guards_what_comes_after(db: psycopg.Connection[Any]) -> None:
    """Patterns before fields, fields before the filter, that before the condition: none of these raises."""
    number = "(e.payload->>'n')::int > 0"
    events = [
        Given({"kind": "number", "n": 1}),
        Given({"kind": "text", "n": "x"}),
        Given({"n": "x"}, topic="u"),
    ]
    for asked in (
        Asked(equals={"payload": {"kind": "number"}}, condition=number),
        Asked(filter='$.payload.kind == "number"', condition=number),
        Asked(equals={"topic": "t"}, filter='$.payload.kind == "number"', condition=number),
        Asked(equals={"payload": {"kind": "number"}}, condition=f"s.params @> '{{}}' and {number}"),
    ):
        assert matching(db, asked, events) == [0], asked


def test_backslashes_in_filters_mean_the_same_to_every_reader(db: psycopg.Connection[Any]) -> None:
    asked = Asked(
        {"payload": {"a": "\\d"}},
        filter=r'$.payload.n like_regex "^\\d$" && $.payload.m == $"v"',
        params={"v": "\\"},
    )
    events = [Given({"a": "\\d", "n": "1", "m": "\\"}), Given({"a": "d", "n": "1", "m": "\\"})]
    assert matching(db, asked, events) == [0]
    db.execute("set standard_conforming_strings = off")
    assert matching(db, asked, events) == [0]
