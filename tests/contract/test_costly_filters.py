"""A filter that could run for minutes runs under a time limit, and stops its own author alone."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from psycopg import errors

import pgmb
from tests.contract.cast import Cast

LIST = json.dumps({"p": list(range(100))})
NESTED = "$.payload.a == 1 || exists($p[*] ? (exists($p[*] ? (exists($p[*] ? (exists($p[*] ? (@ < 0))))))))"
"""100 million steps for each event with `LIST`, and none of them finds anything."""

COSTLY = [
    ("$.** == 1", {}),
    ("exists($.payload[*] ? (exists($.payload[*] ? (@ == 1))))", {}),
    ("$.payload.a[*] == $.payload.b[*]", {}),
    ("$.payload.a[*] ? (@.x[*] == @.y[*]) == 1", {}),
    ("$.payload == $p[*]", {"p": list(range(100))}),
    ("$.payload == $p[*] || $.key == $p[*]", {"p": list(range(9))}),
    (" || ".join(f"$.payload[*] == {number}" for number in range(100)), {}),
    ('$.payload like_regex "^(a*)*\\\\1$"', {}),
    ('$.payload like_regex "a{1,20}"', {}),
    ('$.payload like_regex "(?=a)b"', {}),
    (NESTED, {"p": [1]}),
]
CHEAP = [
    ("$.payload.room == $room", {"room": 1}),
    ("$.payload.amount > $least && $.payload.status == $status", {"least": 1, "status": "paid"}),
    ('$.payload.items[*] ? (@.price > 10 && @.name like_regex "^a.*b$") . n == 1', {}),
    ('$.topic == "a" || $.key == "$" || $.headers."a?b" == "**"', {}),
    ("exists($.payload.tags[*] ? (@ == $wanted[*]))", {"wanted": ["a", "b", "c"]}),
]


@pytest.mark.parametrize(("filter", "params"), COSTLY, ids=range(len(COSTLY)))
def test_what_may_take_long_needs_a_time_limit(
    db: psycopg.Connection[Any], filter: str, params: dict[str, Any]
) -> None:
    db.execute("set statement_timeout = 0")
    asked = {"filter": filter, "params": json.dumps(params)}
    with pytest.raises(psycopg.Error, match="needs a statement_timeout"):
        db.execute(
            "select pgmb.between_filtered('main', null, null, filter => %(filter)s, params => %(params)s)",
            asked,
        )
    db.execute("select pgmb.create_queue('q', filter => %(filter)s, params => %(params)s)", asked)
    with pytest.raises(psycopg.Error, match="needs a statement_timeout"):
        db.execute("select * from pgmb.receive('q')")
    db.execute("set statement_timeout = '5s'")
    db.execute("select * from pgmb.receive('q')")


@pytest.mark.parametrize(("filter", "params"), CHEAP, ids=range(len(CHEAP)))
def test_what_cannot_take_long_needs_none(
    db: psycopg.Connection[Any], filter: str, params: dict[str, Any]
) -> None:
    db.execute("set statement_timeout = 0")
    db.execute("select pgmb.create_queue('q', filter => %s, params => %s)", [filter, json.dumps(params)])
    db.execute("select * from pgmb.receive('q')")


def test_it_is_not_run_to_be_checked(db: psycopg.Connection[Any]) -> None:
    db.execute("set statement_timeout = '2s'")
    db.execute("select pgmb.subscribe('g', filter => %s, params => %s)", [NESTED, LIST])


def test_one_that_takes_too_long_is_paused_and_the_others_of_its_group_are_matched(
    db: psycopg.Connection[Any],
) -> None:
    db.execute("select pgmb.create_queue('g')")
    same = _value(db, "select pgmb.subscribe('g', filter => %s, params => %s)", NESTED, '{"p": [1]}')
    bomb = _value(db, "select pgmb.subscribe('g', filter => %s, params => %s)", NESTED, LIST)
    fine = _value(db, "select pgmb.subscribe('g', filter => '$.payload.a == $p', params => '{\"p\": 1}')")
    fields = _value(
        db,
        "select pgmb.subscribe('g', equals => '{\"payload\": {\"b\": 2}}', filter => %s, params => %s)",
        NESTED,
        LIST,
    )
    db.execute("select pgmb.publish('t', '{\"a\": 1, \"b\": 2}'), pgmb.publish('t', '{\"a\": 2, \"b\": 2}')")
    db.execute("set statement_timeout = '2s'")
    got = db.execute(
        "select payload ->> 'a', subscriptions from pgmb.receive_group('g') order by seq"
    ).fetchall()
    # What was cut off in the middle has matched nothing.
    assert [(a, set(ids) - {bomb, fields}) for a, ids in got] == [("1", {fine, same})]
    paused = dict(
        db.execute("select id, paused_reason from pgmb.subscription where paused_at is not null").fetchall()
    )
    assert bomb in paused
    assert set(paused) <= {bomb, fields}
    assert all("took" in reason for reason in paused.values())
    db.execute("select pgmb.publish('t', '{\"a\": 1}')")
    got = db.execute("select payload ->> 'a', subscriptions from pgmb.receive_group('g')").fetchall()
    assert [(a, set(ids) - {fields}) for a, ids in got] == [("1", {fine, same})]


def test_readers_do_not_subscribe_to_what_feeds_endpoints(db: psycopg.Connection[Any], cast: Cast) -> None:
    early = "select pgmb.subscribe('hooks')"
    name = cast.role("reader", "pgmb_consumer")
    db.execute("select pgmb.grant_read('main', %s)", [name])
    reader = cast.acting(name)
    reader.execute(early)
    db.execute("select pgmb.create_endpoint('e', 'https://e.org/')")
    db.execute("select pgmb.create_endpoint('f', 'https://e.org/', queue => 'hooks')")
    for group in ("webhooks/main", "webhooks/later", "hooks"):
        with pytest.raises(errors.InsufficientPrivilege, match="feeds endpoints"):
            reader.execute("select pgmb.subscribe(%s, filter => %s, params => %s)", [group, NESTED, LIST])
        with pytest.raises(errors.InsufficientPrivilege, match="feeds endpoints"):
            reader.execute("select pgmb.resume_subscriptions(%s)", [group])
    # What was subscribed before there was an endpoint is gone.
    assert db.execute("select count(*) from pgmb.subscription").fetchone() == (2,)


@pytest.mark.slow
def test_a_tail_with_a_filter_that_takes_too_long_ends(dsn: str) -> None:
    with pgmb.connect(dsn) as broker:
        broker.publish("t", {"a": 2})
        params = {"p": list(range(300))}
        with pytest.raises(errors.QueryCanceled):
            for _ in broker.tail(after=broker.earliest(), filter=NESTED, params=params, follow=False):
                pass


def _value(db: psycopg.Connection[Any], statement: str, *given: Any) -> Any:
    row = db.execute(statement, given).fetchone()
    assert row is not None
    return row[0]
