"""Filters on queues and tails: fields, jsonpath predicates, SQL conditions."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

import pgmb
from harness.states import paused_queues, queue_settings, times_bound
from pgmb.errors import InvalidArgument
from tests.contract.client.adapters import AsyncClient, Client, SqlClient

PAYLOADS: list[Any] = [
    {"status": "paid", "total": 50},
    {"status": "open", "total": 500},
    {"status": "paid", "total": 500},
    {"total": "much"},
    {"status": None, "total": [500]},
    [],
    "paid",
    None,
]
DATED = '$.payload.datetime() < "2030-01-01T00:00:00+00".datetime()'
"""Raises at a date without a time zone."""


async def received(client: Client, queue: str = "q") -> list[Any]:
    found: list[Any] = []
    while (lease := await client.receive(queue)).events:
        found += lease.payloads
        await client.ack(lease.id)
    return found


async def publish_all(client: Client) -> None:
    for number, payload in enumerate(PAYLOADS):
        await client.publish("a.b", payload, key=f"k{number % 2}", headers={"tenant": number % 3})


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"equals": {"payload": {"status": "paid"}}}, [0, 2]),
        ({"equals": {"payload": {"status": "paid", "total": 500}}}, [2]),
        ({"equals": {"payload": {"status": None}}}, [4]),
        ({"equals": {"headers": {"tenant": 1}}}, [1, 4, 7]),
        ({"equals": {"key": "k1", "headers": {"tenant": 1}}}, [1, 7]),
        ({"equals": {"topic": "a.c"}}, []),
        ({"filter": "$.payload.total > 100"}, [1, 2, 4]),
        ({"filter": "$.payload.total > $least", "params": {"least": 100}}, [1, 2, 4]),
        ({"filter": '$.payload == "paid" || $.payload.status == "paid"'}, [0, 2, 6]),
        ({"filter": "exists($.payload.status)"}, [0, 1, 2, 4]),
        ({"filter": '$.topic starts with "a." && $.headers.tenant == 0'}, [0, 3, 6]),
        ({"filter": "$.payload.total > 100", "equals": {"payload": {"status": "open"}}}, [1]),
    ],
)
async def test_queues_and_tails_get_what_passes(
    client: Client, asked: dict[str, Any], expected: list[int]
) -> None:
    await client.create_queue("q", ["a.*"], **asked)
    await client.create_queue("ordered", ["a.*"], ordered=True, **asked)
    await publish_all(client)
    wanted = [PAYLOADS[number] for number in expected]
    assert await received(client) == wanted
    in_order = await received(client, "ordered")
    assert sorted(map(str, in_order)) == sorted(map(str, wanted))
    if not isinstance(client, SqlClient):
        assert await tailed(client, **asked) == wanted


async def tailed(client: Any, **asked: Any) -> list[Any]:
    if isinstance(client, AsyncClient):
        after = await client.broker.earliest()
        return [event.payload async for event in client.broker.tail(after=after, follow=False, **asked)]
    broker: pgmb.Broker = client.broker
    after = broker.earliest()
    return [event.payload for event in broker.tail(after=after, follow=False, **asked)]


async def test_a_queue_with_another_filter_is_another_queue(client: Client) -> None:
    asked: dict[str, Any] = {"filter": "$.payload > $n", "params": {"n": 1}}
    assert await client.create_queue("q", ["a"], **asked) is True
    assert await client.create_queue("q", ["a"], **asked) is False
    for other in ({}, {**asked, "params": {"n": 2}}, {"equals": {"key": "x"}}):
        with pytest.raises(pgmb.Conflict):
            await client.create_queue("q", ["a"], **other)


async def test_a_new_filter_holds_from_the_position_on(client: Client) -> None:
    await client.create_queue("q", ["a"], filter="$.payload < 10")
    for number in (1, 20, 2):
        await client.publish("a", number)
    lease = await client.receive("q", 1)
    assert lease.payloads == [1]
    await client.bind("q", ["a"], filter="$.payload > 10")
    await client.retry(lease.id, after=0)
    assert sorted(await received(client)) == [1, 20]
    await client.publish("a", 3)
    await client.bind("q", ["a"], no_filter=True)
    assert await received(client) == [3]


async def test_what_is_no_filter_is_refused(client: Client) -> None:
    refused: list[dict[str, Any]] = [
        {"filter": "$.payload >"},
        {"filter": "$.payload > $n"},
        {"filter": "$" + ".a" * 3000},
        {"equals": {"size": 1}},
        {"equals": {}},
        {"equals": {"payload": {"a": [1]}}},
        {"filter": "$.payload > 1", "params": {"n": "x" * 9000}},
        {"condition": "e.payload >"},
    ]
    for asked in refused:
        with pytest.raises(InvalidArgument):
            await client.create_queue("q", ["a"], **asked)
    with pytest.raises(InvalidArgument):
        await client.bind("missing", ["a"], filter="$$")


async def test_a_filter_that_raises_pauses_its_own_queue(client: Client, db: psycopg.Connection[Any]) -> None:
    await client.create_queue("q", ["a"], filter=DATED)
    await client.create_queue("other", ["a"])
    for at in ("2020-01-01T00:00:00+00:00", "2020-01-02"):
        await client.publish("a", at)
    assert await received(client) == []
    assert await received(client, "other") == ["2020-01-01T00:00:00+00:00", "2020-01-02"]
    assert str(paused_queues(db)["q"]).startswith("filter failed: cannot convert")
    await client.bind("q", ["a"], filter='$.payload starts with "2020"')
    await client.resume("q")
    assert await received(client) == ["2020-01-01T00:00:00+00:00", "2020-01-02"]


def test_a_tail_refuses_what_is_no_filter_at_once(broker: pgmb.Broker) -> None:
    refused: list[dict[str, Any]] = [
        {"filter": "$.payload >"},
        {"equals": {"size": 1}},
        {"filter": "$.a == $b"},
    ]
    for asked in refused:
        with pytest.raises(InvalidArgument), broker.tail(**asked):
            pass


def test_a_role_that_may_read_may_tail_by_a_filter(
    broker: pgmb.Broker, dsn: str, db: psycopg.Connection[Any]
) -> None:
    role = f"reader_{db.info.backend_pid}"
    db.execute(f"create role {role} login")
    try:
        db.execute("select pgmb.grant_read('main', %s)", [role])
        broker.create_stream("other")
        broker.publish_many("a", [1, 2, 3])
        after = broker.earliest()
        with pgmb.connect(f"{dsn} user={role}") as reader:
            asked: dict[str, Any] = {"filter": "$.payload > 1", "follow": False, "after": after}
            assert [event.payload for event in reader.tail(**asked)] == [2, 3]
            with pytest.raises(pgmb.PermissionDenied):
                next(reader.tail(stream="other", **asked))
    finally:
        db.execute(f"drop owned by {role}")
        db.execute(f"drop role {role}")


def test_a_tail_goes_on_past_pages_without_a_match(broker: pgmb.Broker) -> None:
    broker.publish_many("a", range(3500))
    tail = broker.tail("a", after=broker.earliest(), follow=False, equals={"payload": 3333})
    with pytest.raises(InvalidArgument):
        next(tail)
    asked = "$.payload == 3333 || $.payload == 12 || $.payload == 3400"
    tail = broker.tail("a", after=broker.earliest(), follow=False, filter=asked)
    assert [next(tail).payload, next(tail).payload] == [12, 3333]
    assert [one.payload for one in broker.tail(after=tail.position, follow=False)] == list(range(3334, 3500))


def test_what_jsonb_cannot_hold_passes_nothing(broker: pgmb.Broker, db: psycopg.Connection[Any]) -> None:
    broker.create_queue("q", ["a"], filter="exists($.payload)")
    broker.create_queue("all", ["a"])
    for payload in ('{"x": "\\u0000"}', "1e400000", f'"{"x" * 2_000_000}"', '"fine"'):
        db.execute("select pgmb.publish('a', %s::text::json)", [payload])
    assert [event.payload for event in broker.receive("q")] == ["fine"]
    assert len(broker.receive("all")) == 4
    assert len(list(broker.tail(after=broker.earliest(), follow=False, filter="exists($.payload)"))) == 1


# -- conditions


def a_condition(broker: pgmb.Broker, queue: str = "q") -> None:
    broker.create_queue(
        queue,
        ["a"],
        condition="(e.payload ->> 'n')::int > (s.params ->> 'least')::int",
        params={"least": 1},
    )


def test_conditions_run_under_a_timeout_that_the_client_sets(broker: pgmb.Broker, dsn: str) -> None:
    a_condition(broker)
    for number in range(4):
        broker.publish("a", {"n": number})
    lease = broker.receive("q", max=1)
    assert [event.payload for event in lease] == [{"n": 2}]
    with psycopg.connect(dsn) as conn:
        lease = broker.receive("q", ack=lease, conn=conn)
        assert [event.payload for event in lease] == [{"n": 3}]
        assert conn.execute("show statement_timeout").fetchone() == ("0",)
        conn.execute("set local statement_timeout = '7s'")
        assert not broker.receive("q", conn=conn)
        assert conn.execute("show statement_timeout").fetchone() == ("7s",)


def test_the_first_receive_may_be_in_the_callers_transaction(dsn: str, broker: pgmb.Broker) -> None:
    a_condition(broker)
    broker.publish("a", {"n": 5})
    with pgmb.connect(dsn) as other, psycopg.connect(dsn) as conn:
        assert len(other.receive("q", conn=conn)) == 1
    with pgmb.connect(dsn) as other:
        broker.publish("a", {"n": 6})
        assert len(other.receive_any(["q", "q"])) == 1


def test_a_queue_may_get_a_condition_later(dsn: str, broker: pgmb.Broker) -> None:
    broker.create_queue("q", ["a"])
    with psycopg.connect(dsn, autocommit=True) as conn:
        assert not broker.receive("q", conn=conn)
        broker.bind("q", ["a"], condition="e.topic = 'a'")
        broker.publish("a", 1)
        assert len(broker.receive("q", conn=conn)) == 1


async def test_an_app_works_on_queues_with_filters(dsn: str) -> None:
    from harness.waiting import until
    from tests.app.stage import working

    app, seen = pgmb.App(dsn), list[Any]()
    app.queue("large", filter="$.payload.n > $least", params={"least": 1})
    app.queue("even", condition="(e.payload ->> 'n')::int % 2 = 0")
    app.on("a", queue="large")(lambda payload: seen.append(("large", payload["n"])))
    app.on("a", queue="even")(lambda payload: seen.append(("even", payload["n"])))
    async with working(app) as broker:
        for number in range(4):
            await broker.publish("a", {"n": number})
        await until(lambda: len(seen) >= 4)
    assert sorted(seen) == [("even", 0), ("even", 2), ("large", 2), ("large", 3)]


def test_an_app_adds_patterns_changes_a_filter_and_leaves_one_that_it_does_not_name(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    def declared(patterns: list[str], **asked: Any) -> tuple[Any, ...]:
        app = pgmb.App(dsn)
        app.queue("q", **asked)
        app.on(*patterns, queue="q")(lambda payload: None)
        app.handle("q")
        found = queue_settings(db)
        return times_bound(db), *(found[name] for name in ("filter", "equals", "params", "condition"))

    first = declared(["a"], filter="$.payload > $n", params={"n": 1})
    assert first == (1, "$.payload > $n", None, {"n": 1}, None)
    assert declared(["a"], filter="$.payload > $n", params={"n": 1}) == first
    assert declared(["a"]) == first
    assert declared(["a", "b"]) == (2, *first[1:])
    assert declared(["a", "b"], equals={"key": "x"}) == (3, None, {"key": "x"}, None, None)
    version, *_, condition = declared(["a", "b"], condition="e.key = 'x'")
    assert version == 4
    assert condition
    assert declared(["a", "b"], condition="e.key  =  'x'") == (4, None, None, None, condition)
    assert declared(["b"]) == (4, None, None, None, condition)
