"""Other drivers than psycopg 3: what their statements carry, their odd cases, and a driver of one's own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pg8000.dbapi
import psycopg
import psycopg2
import pytest
import sqlalchemy
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

import pgmb
from pgmb import NewEvent
from pgmb.drivers import AsyncDriver, Driver
from pgmb.errors import StreamNotFound
from tests.contract.outbox.libraries import settled, url

pytestmark = pytest.mark.once(15)

ODD = 'a"b\\c,{d}\n\té%s%%$1:x?😀null'


class Own(Driver):
    """As a user may write it."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection

    def execute(self, statement: str, parameters: Sequence[str | None]) -> Sequence[Sequence[Any]]:
        cursor = self.connection.execute(statement.encode(), parameters)
        return cursor.fetchall() if cursor.description else []


class AsyncOwn(AsyncDriver):
    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self.connection = connection

    async def execute(self, statement: str, parameters: Sequence[str | None]) -> Sequence[Sequence[Any]]:
        cursor = await self.connection.execute(statement.encode(), parameters)
        return await cursor.fetchall() if cursor.description else []


def place(dsn: str) -> dict[str, Any]:
    parts: dict[str, Any] = conninfo_to_dict(dsn)
    return {"host": parts["host"], "port": parts["port"], "user": parts["user"], "database": parts["dbname"]}


@pytest.fixture(params=["own", "own, async", "asyncpg", "psycopg2", "pg8000"])
async def driven(request: pytest.FixtureRequest, dsn: str) -> AsyncGenerator[tuple[Any, Any]]:
    """A broker and what it takes as conn=, in autocommit mode."""
    where = place(dsn)
    conn: Any
    if request.param in ("own, async", "asyncpg"):
        broker: Any = await pgmb.aconnect(dsn)
    else:
        broker = pgmb.connect(dsn)
    match request.param:
        case "own":
            conn = psycopg.connect(dsn, autocommit=True)
            given: Any = Own(conn)
        case "own, async":
            conn = await psycopg.AsyncConnection.connect(dsn, autocommit=True)
            given = AsyncOwn(conn)
        case "asyncpg":
            given = conn = await asyncpg.connect(**where)
        case "psycopg2":
            given = conn = psycopg2.connect(dsn)
            conn.autocommit = True
        case _:
            socket = f"{where['host']}/.s.PGSQL.{where['port']}"
            given = conn = pg8000.dbapi.connect(where["user"], database=where["database"], unix_sock=socket)
            conn.autocommit = True
    await settled(broker.create_queue("q"))
    yield broker, given
    await settled(conn.close())
    await settled(broker.close())


async def test_statements_carry_every_kind_of_value(
    driven: tuple[Any, Any], db: psycopg.Connection[Any]
) -> None:
    broker, conn = driven
    payload, headers = {ODD: [ODD, None, 1.5, True, 2**60]}, {"h": ODD}
    one = await settled(broker.publish("a", payload, key=ODD, headers=headers, conn=conn))
    given, at = UUID(int=7), datetime(2100, 1, 1, 12, 30, 0, 123456, UTC)
    assert await settled(broker.publish("b", None, id=given, at=at, conn=conn)) == given
    assert db.execute("select due_at from pgmb.delayed").fetchall() == [(at,)]
    assert await settled(broker.cancel(given, conn=conn)) is True
    delay = timedelta(days=2, seconds=3, microseconds=4)
    await settled(broker.cancel(await settled(broker.publish("b", 1, delay=delay, conn=conn)), conn=conn))
    first = await settled(broker.publish("c", 1, dedup_key="k", conn=conn))
    assert await settled(broker.publish("c", 2, dedup_key="k", conn=conn)) == first
    several = [
        NewEvent("d", payload, key=ODD, headers=headers, id=UUID(int=8)),
        NewEvent("d", None, dedup_key="k"),
        NewEvent("e", [], dedup_key=ODD),
    ]
    assert await settled(broker.publish_many(several, conn=conn)) == 2
    lease = await settled(broker.receive("q", lease_for=timedelta(minutes=1), conn=conn))
    assert [(event.id, event.topic, event.key, event.payload, event.headers) for event in lease] == [
        (one, "a", ODD, payload, headers),
        (first, "c", None, 1, {}),
        (UUID(int=8), "d", ODD, payload, headers),
        (lease.events[3].id, "e", None, [], {}),
    ]
    expires = await settled(lease.extend("5 minutes", conn=conn))
    assert timedelta(minutes=4) < expires - datetime.now(UTC) < timedelta(minutes=6)
    assert await settled(lease.retry(lease.events[0], 0, ODD, conn=conn)) == 1
    assert await settled(lease.bury(lease.events[1], ODD, conn=conn)) == 1
    assert await settled(lease.release([lease.events[2]], conn=conn)) == 1
    assert await settled(lease.ack(conn=conn)) == 1
    (dead,) = await settled(broker.dead_letters("q", conn=conn))
    assert (dead.event.id, dead.error, dead.event.payload) == (first, ODD, 1)
    again = await settled(broker.receive_any(["q"], conn=conn))
    assert sorted((event.id, event.attempt) for event in again) == sorted([(one, 2), (UUID(int=8), 1)])


async def test_errors_of_the_server_are_ours(driven: tuple[Any, Any]) -> None:
    broker, conn = driven
    with pytest.raises(StreamNotFound):
        await settled(broker.publish("a", 1, stream="nowhere", conn=conn))
    with pytest.raises(pgmb.InvalidArgument, match="topic"):
        await settled(broker.publish("", 1, conn=conn))
    with pytest.raises(pgmb.LeaseLost) as lost:
        await settled(broker.ack(UUID(int=1 << 100), conn=conn))
    assert lost.value.__cause__ is not None
    with pytest.raises(pgmb.InvalidArgument, match="must be a psycopg connection") as refused:
        await settled(broker.stream_status(conn=conn))
    assert "publish_many" in (refused.value.hint or "")


async def test_many_events_are_one_transaction_in_autocommit_mode(driven: tuple[Any, Any]) -> None:
    broker, conn = driven
    events = [NewEvent("a", n, dedup_key=str(n)) for n in range(2500)]
    with pytest.raises(pgmb.InvalidArgument):
        await settled(broker.publish_many([*events, NewEvent("", 1, key="k")], conn=conn))
    assert not await settled(broker.receive("q"))
    assert await settled(broker.publish_many(events, conn=conn)) == 2500
    assert len(await settled(broker.receive("q", 5000))) == 2500


@pytest.mark.parametrize("style", ["qmark", "numeric", "format"])
def test_pg8000_may_write_parameters_otherwise(
    broker: pgmb.Broker, dsn: str, style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pg8000.dbapi, "paramstyle", style)
    where = place(dsn)
    socket = f"{where['host']}/.s.PGSQL.{where['port']}"
    conn = pg8000.dbapi.connect(where["user"], database=where["database"], unix_sock=socket)
    broker.publish("a", ODD, key=ODD, conn=conn)
    conn.commit()
    conn.close()
    assert [event.payload for event in broker.receive("q")] == [ODD]


async def test_a_connection_of_asyncpgs_pool_serves(abroker: pgmb.AsyncBroker, dsn: str) -> None:
    async with asyncpg.create_pool(min_size=1, max_size=1, **place(dsn)) as pool:
        async with pool.acquire() as conn, conn.transaction():
            await abroker.publish("a", 1, conn=conn)
            assert not await abroker.receive("q")
        nowhere: Any = pool
        with pytest.raises(pgmb.InvalidArgument, match=r"not asyncpg\.pool\.Pool"):
            await abroker.publish("a", 2, conn=nowhere)
    assert [event.payload for event in await abroker.receive("q")] == [1]


async def test_sqlalchemy_in_autocommit_mode_over_asyncpg(abroker: pgmb.AsyncBroker, dsn: str) -> None:
    engine = create_async_engine(url(dsn, "postgresql+asyncpg"), isolation_level="AUTOCOMMIT")
    async with engine.connect() as conn:
        assert await abroker.publish_many("a", range(2500), conn=conn) == 2500
        assert len(await abroker.receive("q", 5000)) == 2500
    await engine.dispose()


async def test_sqlalchemy_over_asyncpg_recovers_when_its_connection_died(
    abroker: pgmb.AsyncBroker, dsn: str, db: psycopg.Connection[Any]
) -> None:
    engine = create_async_engine(url(dsn, "postgresql+asyncpg"))
    async with AsyncSession(engine) as session:
        process = (await session.execute(sqlalchemy.text("select pg_backend_pid()"))).scalar_one()
        db.execute("select pg_terminate_backend(%s, 10000)", [process])
        with pytest.raises(sqlalchemy.exc.DBAPIError):
            await abroker.publish("a", 1, conn=session)
        await session.rollback()
        await abroker.publish("a", 2, conn=session)
        await session.commit()
    await engine.dispose()
    assert [event.payload for event in await abroker.receive("q")] == [2]


DJANGO = """
import sys
# As where psycopg 3 is not installed: Django takes psycopg2.
sys.modules["psycopg"] = None
import django.db.backends.postgresql.base
from django.db.backends.postgresql import psycopg_any as used
del sys.modules["psycopg"]
assert not used.is_psycopg3
import django
from django.conf import settings
from psycopg.conninfo import conninfo_to_dict
parts = conninfo_to_dict(sys.argv[1])
settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.postgresql",
    "NAME": parts["dbname"], "USER": parts["user"], "HOST": parts["host"], "PORT": parts["port"]}})
django.setup()
from django.db import connection, transaction
import pgmb
from pgmb.errors import StreamNotFound
with pgmb.connect(sys.argv[1]) as broker:
    broker.create_queue("q")
    with transaction.atomic():
        broker.publish("a", 1, conn=connection)
        try:
            with transaction.atomic():
                broker.publish("a", "inner", conn=connection)
                raise KeyError
        except KeyError:
            pass
        broker.publish_many("a", range(2, 2503), conn=connection)
    try:
        with transaction.atomic():
            broker.publish("a", "rolled back", conn=connection)
            broker.publish("a", 1, stream="nowhere", conn=connection)
    except StreamNotFound as error:
        print(type(error.__cause__).__module__)
    lease = broker.receive("q", 5000)
    with transaction.atomic():
        print(lease.ack(conn=connection), sum(event.payload for event in lease))
"""


def test_django_over_psycopg2(dsn: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DJANGO, dsn], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == (f"django.db.utils\n2502 {sum(range(2503))}\n", "")
