"""Wake-ups: one connection a process hears of every stream, gets over what servers do, and is optional."""

from __future__ import annotations

import asyncio
import hashlib
import random
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

import pgmb
from harness.pgbouncer import PgBouncer
from harness.postgres import Server
from harness.waiting import until
from pgmb._async.listener import AsyncListener
from pgmb._core.patterns import TopicHints
from pgmb._sync.listener import Listener
from tests.conftest import FreshServer

LONG = 60.0
"""How long a test waits for what must happen."""


def listening(db: psycopg.Connection[Any]) -> list[int]:
    """The server processes that serve a listener in the test's database."""
    rows = db.execute(
        "select pid from pg_stat_activity where datname = current_database()"
        " and application_name = 'pgmb listener'"
    ).fetchall()
    return [pid for (pid,) in rows]


async def test_many_subscriptions_share_one_connection(dsn: str, db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.create_stream('other')")
    async with await pgmb.aconnect(dsn) as broker:
        listener = broker.listener()
        assert broker.listener() is listener
        assert await listener.start()
        subscriptions = [listener.subscribe() for _ in range(50)] + [listener.subscribe("other")]
        for subscription in subscriptions:
            while await subscription.wait(0):
                pass
        db.execute("select pgmb.publish('a', '1')")
        db.execute("select pgmb.tick()")
        async with asyncio.timeout(LONG):
            heard = await asyncio.gather(*(one.wait() for one in subscriptions[:50]))
        assert all(heard)
        assert len(listening(db)) == 1
        for subscription in subscriptions:
            subscription.close()
        assert listener._waited_for() == []
    await until(lambda: not listening(db))


async def test_news_from_before_the_wait_is_not_missed(dsn: str, db: psycopg.Connection[Any]) -> None:
    async with AsyncListener(dsn, tick_every=None) as listener:
        assert await listener.start()
        subscription = listener.subscribe()
        db.execute("select pgmb.publish('a', '1')")
        db.execute("select pgmb.tick()")
        await until(subscription._flag.is_set)
        assert await subscription.wait(0)
        assert not await subscription.wait(0)


async def test_only_the_stream_that_moved_wakes(dsn: str, db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.create_stream('quiet')")
    async with AsyncListener(dsn, tick_every=None) as listener:
        assert await listener.start()
        moved, quiet = listener.subscribe("main"), listener.subscribe("quiet")
        db.execute("select pgmb.publish('a', '1')")
        db.execute("select pgmb.tick()")
        assert await moved.wait(LONG)
        assert not await quiet.wait(0)


PATTERNS = {
    ("order.paid",): {"order.paid"},
    ("order.*",): {"order.paid", "order", "order.paid.late"},
    ("order.#", "x"): {"order.paid", "order", "order.paid.late"},
    ("*.paid",): {"order.paid", "order", "order.paid.late", "ordér.paid", "user"},
    ("#",): {"order.paid", "order", "order.paid.late", "ordér.paid", "user"},
    ("ordér.paid",): {"ordér.paid"},
    ("user", "never"): {"user"},
    ("paid",): set(),
}
"""Patterns, and the topics whose hints may match: all that do, and those that share their first word."""


async def test_a_tick_wakes_those_whose_topics_may_match(dsn: str, db: psycopg.Connection[Any]) -> None:
    salt = db.execute("select salt from pgmb.stream where name = 'main'").fetchone()
    assert salt is not None
    db.execute("select pgmb.tick()")
    async with AsyncListener(dsn, tick_every=None) as listener:
        assert await listener.start()
        everything = listener.subscribe()
        waiting = {one: listener.subscribe("main", TopicHints(one, *salt)) for one in PATTERNS}
        for topic in sorted(set().union(*PATTERNS.values())):
            db.execute("select pgmb.publish(%s, '1')", [topic])
            db.execute("select pgmb.tick()")
            assert await everything.wait(LONG)
            woken = {patterns for patterns, one in waiting.items() if await one.wait(0)}
            assert woken == {patterns for patterns, wakes in PATTERNS.items() if topic in wakes}, topic


async def test_a_tick_of_many_events_wakes_everybody(dsn: str, db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.tick()")
    async with AsyncListener(dsn, tick_every=None) as listener:
        assert await listener.start()
        one = listener.subscribe("main", TopicHints(["never"], 0))
        db.execute("select pgmb.publish_many('a', array_fill('1'::json, array[33]))")
        db.execute("select pgmb.tick()")
        assert await one.wait(LONG)


async def test_a_late_commit_wakes_everybody(
    dsn: str, db: psycopg.Connection[Any], connect: Callable[..., psycopg.Connection[Any]]
) -> None:
    salt = db.execute("select salt from pgmb.stream where name = 'main'").fetchone()
    assert salt is not None
    slow = connect(autocommit=False)
    slow.execute("select pgmb.publish('slow', '1')")
    db.execute("select pgmb.tick()")
    async with AsyncListener(dsn, tick_every=None) as listener:
        assert await listener.start()
        everything = listener.subscribe()
        quick, late = (listener.subscribe("main", TopicHints([one], *salt)) for one in ("quick", "slow"))
        db.execute("select pgmb.publish('quick', '1')")
        db.execute("select pgmb.tick()")
        assert await everything.wait(LONG)
        assert await quick.wait(0)
        assert not await late.wait(0)
        slow.commit()
        db.execute("select pgmb.tick()")
        assert await everything.wait(LONG)
        assert await late.wait(0)


@pytest.mark.parametrize("open_ones", [0, 3, 1200], ids=lambda count: f"{count} open")
def test_a_position_holds_what_ended_since_the_newest_tick(
    open_ones: int, db: psycopg.Connection[Any], connect: Callable[..., psycopg.Connection[Any]]
) -> None:
    """Also where many transactions are open: each subtransaction has an id of its own."""
    late, many = connect(autocommit=False), connect(autocommit=False)
    many.execute("select pg_current_xact_id()")
    for _ in range(open_ones):
        many.execute("savepoint one")
        many.execute("create temp table if not exists t (x int); insert into t values (1)")
    late.execute("select pgmb.publish('late', '1')")
    before = db.execute("select pgmb.position()").fetchone()
    assert db.execute("select pgmb.position()").fetchone() == before
    late.commit()
    assert db.execute("select pgmb.position()").fetchone() != before
    many.rollback()


async def test_a_tick_tells_no_topic_to_those_who_may_only_connect(
    dsn: str, db: psycopg.Connection[Any], connect: Callable[..., psycopg.Connection[Any]]
) -> None:
    """Every role of the database may listen: without the stream's salt the hints are noise.

    A transaction that publishes nothing, as those of other databases, does not turn hints into "wake up all".
    """
    silent = connect(autocommit=False)
    silent.execute("select pg_current_xact_id()")
    db.execute("select pgmb.publish('first', '1')")
    db.execute("select pgmb.tick()")
    silent.commit()
    with psycopg.connect(dsn, autocommit=True) as other:
        other.execute("listen pgmb")
        db.execute("select pgmb.publish('order.paid', '1')")
        db.execute("select pgmb.tick()")
        (heard,) = other.notifies(timeout=LONG, stop_after=1)
    stream, hint = heard.payload.split(" ")
    assert stream == "main"
    assert len(hint) == 8
    unsalted = [hashlib.sha256(text.encode()).hexdigest()[:4] for text in ("order", "order.paid")]
    assert hint != "".join(unsalted)


async def test_with_nobody_ticking_the_listener_does(dsn: str, db: psycopg.Connection[Any]) -> None:
    async with AsyncListener(dsn, tick_every=0.05) as listener:
        subscription = listener.subscribe()
        await until(lambda: subscription.healthy)
        assert await subscription.wait(LONG), "woken when the connection stood"
        while await subscription.wait(0.2):
            pass
        db.execute("select pgmb.publish('a', '1')")
        assert await subscription.wait(LONG)


async def test_a_late_commit_is_announced(
    dsn: str, db: psycopg.Connection[Any], connect: Callable[..., psycopg.Connection[Any]]
) -> None:
    """The sequence moved long before: only its commit is news."""
    slow = connect(autocommit=False)
    slow.execute("select pgmb.publish('slow', '1')")
    async with AsyncListener(dsn, tick_every=0.05) as listener:
        subscription = listener.subscribe()
        await until(lambda: subscription.healthy)
        db.execute("select pgmb.publish('quick', '1')")
        while await subscription.wait(0.5):
            pass
        slow.commit()
        assert await subscription.wait(LONG)


async def test_at_rest_it_burns_no_transaction_ids(dsn: str, db: psycopg.Connection[Any]) -> None:
    async with AsyncListener(dsn, tick_every=0.02) as listener:
        subscription = listener.subscribe()
        await until(lambda: subscription.healthy)
        snapshot = "select pg_current_xact_id()::text::bigint"
        (before,) = db.execute(snapshot).fetchone() or (0,)
        seen = listening_statements(db)
        await until(lambda: listening_statements(db) > seen)
        (after,) = db.execute(snapshot).fetchone() or (0,)
        assert after == before + 1


def listening_statements(db: psycopg.Connection[Any]) -> Any:
    return db.execute(
        "select max(query_start) from pg_stat_activity where datname = current_database()"
        " and application_name = 'pgmb listener'"
    ).fetchone()


@pytest.mark.slow
async def test_a_wake_up_comes_long_before_a_poll_does(dsn: str, db: psycopg.Connection[Any]) -> None:
    """Two tails at rest in one process see the same events: one is woken by ticks, the other looks."""
    async with (
        await pgmb.aconnect(dsn) as broker,
        broker.tail() as woken,
        broker.tail(listen=False) as looking,
    ):
        await until(lambda: broker.listener().healthy)
        took: dict[str, list[float]] = {"woken": [], "looking": []}

        async def read(tail: Any, name: str) -> None:
            async for event in tail:
                took[name].append(time.time() - event.payload)

        readers = [
            asyncio.create_task(read(woken, "woken")),
            asyncio.create_task(read(looking, "looking")),
        ]
        chance = random.Random(1)
        for n in range(1, 9):
            # Until both pause for their longest, and at no particular moment of that.
            await asyncio.sleep(1.2 + chance.random() / 2)
            await asyncio.to_thread(
                db.execute, "select pgmb.publish('a', to_json(%s::float8))", [time.time()]
            )
            await asyncio.to_thread(db.execute, "select pgmb.tick()")
            await until(lambda n=n: min(map(len, took.values())) == n)  # type: ignore[misc]
        woken.close()
        looking.close()
        await asyncio.gather(*readers)
    assert statistics.median(took["woken"]) < statistics.median(took["looking"]) / 2, took


@pytest.mark.crash
async def test_a_restart_of_the_server_is_got_over(
    fresh_server: FreshServer, install: Callable[[str], None]
) -> None:
    server = fresh_server()
    dsn = server.dsn()
    install(dsn)
    async with AsyncListener(dsn) as listener:
        subscription = listener.subscribe()
        assert await listener.start()
        while await subscription.wait(0):
            pass
        await asyncio.to_thread(server.stop)
        assert await subscription.wait(LONG), "woken by the loss"
        await until(lambda: not listener.healthy)
        assert not subscription.healthy
        await asyncio.to_thread(server.start_again)
        await until(lambda: subscription.healthy)
        assert await subscription.wait(LONG), "woken since something may have been missed"
        with psycopg.connect(dsn, autocommit=True) as other:
            other.execute("select pgmb.publish('a', '1')")
            other.execute("select pgmb.tick()")
        assert await subscription.wait(LONG)


async def test_a_terminated_connection_is_made_anew(dsn: str, db: psycopg.Connection[Any]) -> None:
    async with AsyncListener(dsn) as listener:
        subscription = listener.subscribe()
        await until(lambda: subscription.healthy)
        (old,) = listening(db)
        db.execute("select pg_terminate_backend(%s)", [old])
        await until(lambda: listening(db) not in ([], [old]) and subscription.healthy)
        while await subscription.wait(0):
            pass
        db.execute("select pgmb.publish('a', '1')")
        assert await subscription.wait(LONG)


@pytest.mark.once(15)
async def test_behind_a_pooler_it_says_so_and_leaves_it(
    server: Server, dsn: str, db: psycopg.Connection[Any]
) -> None:
    with PgBouncer.start(server) as bouncer:
        pooled = bouncer.dsn(str(conninfo_to_dict(dsn)["dbname"]))
        async with AsyncListener(pooled) as listener:
            subscription = listener.subscribe()
            await until(lambda: listener.pooled)
            assert not await listener.start()
            assert not subscription.healthy
            while await subscription.wait(0):
                pass
            assert not await subscription.wait(0.05), "a plain pause"
        async with await pgmb.aconnect(pooled) as broker:
            assert broker.listener().pooled
            assert not await broker.listener().start()
        async with await pgmb.aconnect(pooled) as broker:
            assert await broker.listener(dsn).start(), "past the pooler, where an address is given"


async def test_a_role_that_may_not_tick_hears_those_who_may(
    server: Server, dsn: str, db: psycopg.Connection[Any]
) -> None:
    db.execute("create role listener_only login")
    try:
        async with AsyncListener(dsn, user="listener_only", tick_every=0.05) as listener:
            assert await listener.start()
            subscription = listener.subscribe()
            await until(lambda: listener._tick_again_at > 0)
            assert not subscription.healthy
            while await subscription.wait(0):
                pass
            db.execute("select pgmb.publish('a', '1')")
            db.execute("select pgmb.tick()")
            assert await subscription.wait(LONG)
    finally:
        db.execute("drop role listener_only")


async def test_an_address_that_never_answers_does_not_block_anybody() -> None:
    async with AsyncListener("host=/nonexistent dbname=x") as listener:
        subscription = listener.subscribe()
        assert not await listener.start()
        while await subscription.wait(0):
            pass
        assert not listener.healthy


async def test_closing_wakes_whoever_waits(dsn: str) -> None:
    listener = AsyncListener(dsn)
    assert await listener.start()
    subscription = listener.subscribe()
    while await subscription.wait(0):
        pass
    waiting = asyncio.create_task(subscription.wait(LONG))
    await asyncio.sleep(0)
    await listener.close()
    assert await waiting
    await listener.close()
    assert not await listener.start(0), "closed for good"


def test_threads_have_the_same_listener(dsn: str, db: psycopg.Connection[Any]) -> None:
    with Listener(dsn, tick_every=0.05) as listener:
        assert listener.start()
        subscriptions = [listener.subscribe() for _ in range(3)]
        heard: list[bool] = []
        threads = [
            threading.Thread(target=lambda one=one: heard.append(one.wait(LONG))) for one in subscriptions
        ]
        for thread in threads:
            thread.start()
        db.execute("select pgmb.publish('a', '1')")
        for thread in threads:
            thread.join(LONG)
        assert heard == [True] * 3
        (old,) = listening(db)
        db.execute("select pg_terminate_backend(%s)", [old])
        deadline = time.monotonic() + LONG
        while listening(db) in ([], [old]) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert subscriptions[0].wait(LONG)
    assert not any(thread.name == "pgmb listener" for thread in threading.enumerate())
