"""Subscriptions of a group: equal ones are one, an event comes once with all that it matches, they expire."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

import pgmb
from harness.pgbouncer import PgBouncer
from harness.server import Server
from harness.waiting import until, until_true
from pgmb.errors import InvalidArgument, NotFound

TOPICS = "s.params @> jsonb_build_object('topics', ARRAY[e.topic])"


class Both:
    """The synchronous and the asynchronous broker by one face."""

    def __init__(self, broker: Any) -> None:
        self.broker = broker

    def __getattr__(self, name: str) -> Any:
        async def method(*args: Any, **kwargs: Any) -> Any:
            found = getattr(self.broker, name)(*args, **kwargs)
            return await found if asyncio.iscoroutine(found) else found

        return method


@pytest.fixture(params=["sync", "async"])
async def client(request: pytest.FixtureRequest, dsn: str) -> AsyncGenerator[Both]:
    if request.param == "sync":
        with pgmb.connect(dsn) as broker:
            yield Both(broker)
    else:
        async with await pgmb.aconnect(dsn) as abroker:
            yield Both(abroker)


async def a_group(client: Both, name: str = "node", **options: Any) -> Both:
    return Both(await client.group(name, **options))


def alive(db: psycopg.Connection[Any]) -> set[UUID]:
    return {id for (id,) in db.execute("select id from pgmb.subscriptions").fetchall()}


async def test_an_event_comes_once_with_every_subscription_it_matches(client: Both) -> None:
    group = await a_group(client)
    by_pattern = await group.subscribe(["order.*"])
    by_field = await group.subscribe(equals={"payload": {"room": 7}})
    by_filter = await group.subscribe(["#"], filter="$.payload.total > $least", params={"least": 10})
    by_condition = await group.subscribe(condition=TOPICS, params={"topics": ["order.paid", "order.lost"]})
    await client.publish("order.paid", {"total": 50})
    await client.publish("other", {"room": 8})
    await client.publish("talk", {"room": 7})
    await client.publish("order.sent", {"room": 7, "total": 5})
    lease = await group.receive()
    assert [event.topic for event in lease] == ["order.paid", "talk", "order.sent"]
    assert [set(event.subscriptions) for event in lease] == [
        {by_pattern, by_filter, by_condition},
        {by_field},
        {by_pattern, by_field},
    ]
    assert lease.queue == "node"
    settled = Both(lease)
    assert await settled.retry([lease.events[1]], after=0) == 1
    await settled.ack()
    again = await group.receive()
    assert [(event.topic, event.attempt) for event in again] == [("talk", 2)]
    assert again.events[0].subscriptions == (by_field,)
    assert not await group.receive(ack=again)
    assert not (await group.receive()).events


async def test_equal_subscriptions_are_one_in_every_client(client: Both, dsn: str) -> None:
    group = await a_group(client)
    asked: dict[str, Any] = {"condition": TOPICS, "params": {"topics": ["a", "b"]}}
    first = await group.subscribe(["a", "b"], **asked)
    assert await group.subscribe(["a", "b"], **asked) == first
    with pgmb.connect(dsn) as other:
        assert other.group("node").subscribe(["a", "b"], **asked) == first
        others = {
            other.group("node").subscribe(["a", "b"], condition=TOPICS, params={"topics": ["b", "a"]}),
            other.group("node").subscribe(["a"], **asked),
            other.group("other").subscribe(["a", "b"], **asked),
        }
    assert len(others | {first}) == 4


@pytest.mark.slow
def test_identity_is_the_full_value(dsn: str) -> None:
    """Defect 8 of a peer: a 32-bit hash gave one tenant another's subscription."""
    with pgmb.connect(dsn) as broker, broker.connection() as conn, conn.transaction():
        group = broker.group("node")
        group.subscribe()
        (made,) = conn.execute(
            "select count(distinct pgmb.subscribe('node', equals => jsonb_build_object('payload',"
            " jsonb_build_object('tenant', n)))) from generate_series(1, 500) n"
        ).fetchone() or (0,)
        assert made == 500
        # As far as 32 bits go, these two are the same.
        twins = conn.execute(
            "select array_agg(n) from generate_series(1, 300000) n group by hashtext(n::text)"
            " having count(*) > 1 limit 1"
        ).fetchone()
        assert twins is not None
        ids = {group.subscribe(equals={"key": str(number)}, conn=conn) for number in twins[0]}
        assert len(ids) == len(twins[0])


async def test_a_subscription_joins_the_callers_transaction(client: Both, dsn: str) -> None:
    group = await a_group(client)
    kept, rolled_back = await in_transaction(group, dsn, False), await in_transaction(group, dsn, True)
    assert [one.id for one in await group.subscriptions()] == [kept]
    assert await group.unsubscribe(rolled_back) is False
    assert await group.unsubscribe(kept) is True
    assert await group.subscriptions() == []


async def in_transaction(group: Both, dsn: str, roll_back: bool) -> UUID:
    """What @haathie/pgmb shows for webhooks: a subscription, and a row of one's own that names it."""
    asked: dict[str, Any] = {"equals": {"key": str(roll_back)}, "expires_after": 60}
    if isinstance(group.broker, pgmb.Group):
        with psycopg.connect(dsn) as conn, conn.transaction(force_rollback=roll_back):
            conn.execute("create table if not exists webhook (subscription uuid)")
            id: UUID = await group.subscribe(**asked, conn=conn)
            conn.execute("insert into webhook values (%s)", [id])
    else:
        async with (
            await psycopg.AsyncConnection.connect(dsn) as aconn,
            aconn.transaction(force_rollback=roll_back),
        ):
            id = await group.subscribe(**asked, conn=aconn)
    return id


async def test_what_a_subscription_says_of_itself(client: Both) -> None:
    group = await a_group(client)
    id = await group.subscribe(
        ["a.*"],
        equals={"payload": {"room": 7}},
        filter="$.payload.n > $n",
        condition="e.key = 'x'",
        params={"n": 1},
        expires_after=90,
    )
    (one,) = await group.subscriptions()
    assert (one.id, one.group, one.stream, one.patterns) == (id, "node", "main", ["a.*"])
    assert (one.equals, one.params) == ({"payload.room": 7}, {"n": 1})
    assert one.filter == '($."payload"."n" > $"n")'
    assert one.condition == "((e).key = 'x'::text)"
    assert one.expires_after is not None
    assert one.expires_after.total_seconds() == 90
    assert one.paused_at is None


async def test_subscriptions_expire_when_nobody_is_there(client: Both, db: psycopg.Connection[Any]) -> None:
    with pgmb.connect(f"{db.info.dsn}") as broker:
        left = broker.group("left").subscribe(expires_after=0.3)
        stays = broker.group("left").subscribe(["a"])
    # The janitor calls it now and then; this client's own is kept meanwhile.
    group = await a_group(client, "kept")
    kept = await group.subscribe(expires_after=6)

    async def gone() -> bool:
        db.execute("select pgmb.maintain()")
        return left not in alive(db)

    await until(gone)
    noted = db.execute("select active_at from pgmb.subscription where id = %s", [kept]).fetchone()

    async def renewed() -> bool:
        db.execute("select pgmb.maintain()")
        return db.execute("select active_at from pgmb.subscription where id = %s", [kept]).fetchone() != noted

    await until(renewed)
    assert {kept, stays} <= alive(db)


async def test_a_raising_condition_pauses_its_own_subscription(client: Both) -> None:
    group = await a_group(client)
    cast = "(e.payload ->> 'n')::int > (s.params ->> 'least')::int"
    raising = await group.subscribe(["a"], condition=cast, params={"least": 0})
    other = await group.subscribe(["a"], condition="e.payload ->> 'n' = 'abc'")
    plain = await group.subscribe(["a"])
    await client.publish("a", {"n": "abc"})
    (event,) = await group.receive()
    assert set(event.subscriptions) == {other, plain}
    paused = {one.id: one.paused_reason for one in await group.subscriptions()}
    assert "invalid input syntax" in paused[raising]
    assert paused[other] is paused[plain] is None
    assert await group.resume(raising) == 1
    await client.publish("a", {"n": 5})
    events = list(await group.receive())
    assert set(events[-1].subscriptions) == {raising, plain}


async def test_the_queue_behind_a_group_is_made_on_first_use(client: Both) -> None:
    group = await a_group(client, "new")
    await client.publish("a", 0)
    await group.subscribe(["a"])
    await client.publish("a", 1)
    assert [event.payload for event in await group.receive()] == [1]
    await client.create_stream("s")
    other = await a_group(client, "new", stream="s")
    with pytest.raises(pgmb.Conflict, match="reads stream"):
        await other.receive()
    elsewhere = await a_group(client, "elsewhere", stream="s")
    await elsewhere.subscribe(["#"])
    await client.publish("a", 2, stream="s")
    (event,) = await elsewhere.receive()
    assert (event.payload, event.stream) == (2, "s")


def test_a_role_that_may_not_create_it_is_told_what_to_run(
    dsn: str, db: psycopg.Connection[Any], server: Server
) -> None:
    role = f"reader_{uuid4().hex[:8]}"
    db.execute(f"create role {role} login")
    try:
        db.execute(f"select pgmb.grant_read('main', '{role}')")
        with pgmb.connect(dsn, user=role) as broker:
            group = broker.group("node")
            id = group.subscribe(["a"])
            with pytest.raises(pgmb.PermissionDenied) as denied:
                group.receive()
            assert "select pgmb.grant_consume('node'" in (denied.value.hint or "")
            db.execute(f"grant pgmb_consumer to {role}")
            with pytest.raises(NotFound, match="may not create") as caught:
                group.receive()
            assert "select pgmb.create_queue('node'" in (caught.value.hint or "")
            with pytest.raises(pgmb.PermissionDenied):
                group.subscribe(condition="true")
            feed = group.listen(["a"], max_wait=30)
            with feed:
                db.execute("select pgmb.publish('a', '1')")
                assert [event.payload for event in next(iter(feed))] == [1]
            assert group.unsubscribe(id)
    finally:
        db.execute(f"drop owned by {role}")
        db.execute(f"drop role {role}")


def test_a_caller_may_receive_in_a_transaction_of_his(dsn: str) -> None:
    with pgmb.connect(dsn) as broker:
        group = broker.group("node")
        group.subscribe(condition="e.topic = 'a'")
        broker.publish("a", 1)
        with psycopg.connect(dsn) as conn:
            with conn.transaction():
                lease = group.receive(conn=conn)
                assert [event.payload for event in lease] == [1]
                lease.ack(conn=conn)
            with conn.transaction():
                assert conn.execute("show statement_timeout").fetchone() == ("0",)
        assert not group.receive()


def test_nonsense_is_refused(dsn: str) -> None:
    with pgmb.connect(dsn) as broker:
        group = broker.group("node")
        refused: list[dict[str, Any]] = [
            {"patterns": "a.*"},
            {"patterns": []},
            {"filter": "$.payload >"},
            {"condition": "e.payload >"},
            {"equals": {"size": 1}},
            {"expires_after": 0},
            {"expires_after": -1},
            {"filter": "$.payload == $x", "params": {"x": "y" * 9000}},
        ]
        for asked in refused:
            with pytest.raises(InvalidArgument):
                group.subscribe(**asked)
            with pytest.raises(InvalidArgument):
                group.listen(**asked).start()
        with pytest.raises(InvalidArgument):
            group.listen(max=0)
        with pytest.raises(InvalidArgument):
            group.listen(max_pending=0)
        with pytest.raises(InvalidArgument):
            broker.group(" x ").subscribe()
        assert group.subscriptions() == []
        assert not group.unsubscribe(uuid4())


@pytest.fixture
def pooled(server: Server, db: psycopg.Connection[Any]) -> Iterator[str]:
    with PgBouncer.start(server, settings={"default_pool_size": 2}) as bouncer:
        yield bouncer.dsn(db.info.dbname)


def test_groups_work_behind_a_transaction_pooler(pooled: str, db: psycopg.Connection[Any]) -> None:
    """Defect 15 of a peer: it holds session locks, which a pooler gives to others."""
    with pgmb.connect(pooled) as broker, pgmb.connect(pooled) as other:
        group = broker.group("node")
        id = group.subscribe(condition=TOPICS, params={"topics": ["a"]}, expires_after=5)
        heard: list[Any] = []
        asked: dict[str, Any] = {"condition": "e.topic = 'a'", "expires_after": 5}
        feeds = [one.group("node").listen(**asked) for one in (broker, other)]

        def listen(feed: Any) -> None:
            for batch in feed:
                heard.extend(event.payload for event in batch)

        threads = [threading.Thread(target=listen, args=[feed]) for feed in feeds]
        for feed in feeds:
            feed.start()
        for thread in threads:
            thread.start()
        for number in range(50):
            other.publish("a", number)
        found: list[Any] = []
        while lease := group.receive(7):
            assert {event.subscriptions for event in lease} == {(id,)}
            found += [event.payload for event in lease]
            lease.ack()
        assert found == list(range(50))
        until_true(lambda: len(heard) == 100)
        for feed in feeds:
            feed.close()
        for thread in threads:
            thread.join(30)
    assert sorted(heard) == sorted([*range(50), *range(50)])
    assert alive(db) == {id}
    leaked = db.execute(
        "select locktype from pg_locks where locktype = 'advisory' and database ="
        " (select oid from pg_database where datname = current_database())"
    ).fetchall()
    assert leaked == []
