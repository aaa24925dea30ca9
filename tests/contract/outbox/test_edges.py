"""The odd cases of `conn=`: no transaction, a dead connection, the wrong kind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Generator
from typing import Any

import psycopg
import pytest
import sqlalchemy
from sqlalchemy.exc import PendingRollbackError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import pgmb
from pgmb.outbox import adriver_connection, driver_connection
from tests.contract.outbox.libraries import atomic, configure_django, url


@pytest.fixture
def engine(dsn: str) -> Generator[sqlalchemy.Engine]:
    engine = sqlalchemy.create_engine(url(dsn))
    yield engine
    engine.dispose()


@pytest.fixture
def django_connection(dsn: str) -> Generator[Any]:
    configure_django(dsn)
    from django.db import connection

    yield connection
    connection.close()


def payloads(broker: pgmb.Broker) -> list[Any]:
    return [event.payload for event in broker.receive("q")]


# -- SQLAlchemy ----------------------------------------------------------------------------------------------


def test_in_autocommit_a_publish_is_delivered_at_once(broker: pgmb.Broker, engine: sqlalchemy.Engine) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        broker.publish("a", 1, conn=conn)
        assert payloads(broker) == [1]
    with Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
        broker.publish("a", 2, conn=session)
        assert payloads(broker) == [2]


def test_leaving_a_session_without_commit_delivers_nothing(
    broker: pgmb.Broker, engine: sqlalchemy.Engine
) -> None:
    with Session(engine) as session:
        broker.publish("a", 1, conn=session)
    assert payloads(broker) == []


def test_a_session_serves_again_after_commit_rollback_and_close(
    broker: pgmb.Broker, engine: sqlalchemy.Engine
) -> None:
    with Session(engine) as session:
        broker.publish("a", 1, conn=session)
        session.commit()
        broker.publish("a", 2, conn=session)
        session.rollback()
        broker.publish("a", 3, conn=session)
        session.close()
        broker.publish("a", 4, conn=session)
        session.commit()
    assert payloads(broker) == [1, 4]


def test_the_transaction_of_begin_is_joined(broker: pgmb.Broker, engine: sqlalchemy.Engine) -> None:
    with Session(engine) as session, session.begin():
        broker.publish("a", 1, conn=session)
    with engine.begin() as conn:
        broker.publish("a", 2, conn=conn)
    assert payloads(broker) == [1, 2]


def test_an_engine_of_settings_far_from_ours(dsn: str, broker: pgmb.Broker) -> None:
    engine = sqlalchemy.create_engine(
        url(dsn),
        isolation_level="SERIALIZABLE",
        poolclass=sqlalchemy.NullPool,
        connect_args={"cursor_factory": psycopg.ClientCursor, "prepare_threshold": None},
    )
    with engine.connect() as conn:
        assert broker.publish("a", 1, conn=conn).version == 7
        conn.commit()
    assert payloads(broker) == [1]


def test_a_session_whose_connection_died_says_so_and_recovers(
    broker: pgmb.Broker, engine: sqlalchemy.Engine, db: psycopg.Connection[Any]
) -> None:
    with Session(engine) as session:
        pid = session.execute(sqlalchemy.text("select pg_backend_pid()")).scalar_one()
        db.execute("select pg_terminate_backend(%s, 10000)", [pid])
        with pytest.raises(psycopg.OperationalError):
            broker.publish("a", 1, conn=session)
        with pytest.raises(PendingRollbackError):
            broker.publish("a", 1, conn=session)
        session.rollback()
        broker.publish("a", 2, conn=session)
        session.commit()
    assert payloads(broker) == [2]


async def test_an_async_session_whose_connection_died_says_so_and_recovers(
    abroker: pgmb.AsyncBroker, dsn: str, db: psycopg.Connection[Any]
) -> None:
    engine = create_async_engine(url(dsn))
    async with AsyncSession(engine) as session:
        pid = (await session.execute(sqlalchemy.text("select pg_backend_pid()"))).scalar_one()
        db.execute("select pg_terminate_backend(%s, 10000)", [pid])
        with pytest.raises(psycopg.OperationalError):
            await abroker.publish("a", 1, conn=session)
        with pytest.raises(PendingRollbackError):
            await abroker.publish("a", 1, conn=session)
        await session.rollback()
        await abroker.publish("a", 2, conn=session)
        await session.commit()
    await engine.dispose()
    assert [event.payload for event in await abroker.receive("q")] == [2]


def test_a_connection_that_was_closed_is_refused(
    broker: pgmb.Broker, engine: sqlalchemy.Engine, dsn: str
) -> None:
    with psycopg.connect(dsn) as plain:
        pass
    with engine.connect() as wrapped:
        pass
    for conn in (plain, wrapped):
        with pytest.raises(pgmb.InvalidArgument, match="closed") as caught:
            broker.publish("a", 1, conn=conn)
        assert caught.value.hint


async def test_an_async_connection_that_was_closed_is_refused(abroker: pgmb.AsyncBroker, dsn: str) -> None:
    engine = create_async_engine(url(dsn))
    async with engine.connect() as wrapped:
        pass
    async with await psycopg.AsyncConnection.connect(dsn) as plain:
        pass
    for conn in (plain, wrapped):
        with pytest.raises(pgmb.InvalidArgument, match="closed"):
            await abroker.publish("a", 1, conn=conn)
    await engine.dispose()


def test_another_driver_is_named_with_the_fix(broker: pgmb.Broker) -> None:
    engine = sqlalchemy.create_engine("sqlite://")
    with Session(engine) as session:
        with pytest.raises(pgmb.InvalidArgument, match="sqlite3") as caught:
            broker.publish("a", 1, conn=session)
        assert "postgresql+psycopg://" in (caught.value.hint or "")
    engine.dispose()


def test_a_session_without_a_database_is_refused(broker: pgmb.Broker) -> None:
    with Session() as session, pytest.raises(pgmb.InvalidArgument) as caught:
        broker.publish("a", 1, conn=session)
    assert "bind_arguments" in (caught.value.hint or "")


async def test_an_async_session_without_a_database_is_refused(abroker: pgmb.AsyncBroker) -> None:
    async with AsyncSession() as session:
        with pytest.raises(pgmb.InvalidArgument):
            await abroker.publish("a", 1, conn=session)


# -- Django --------------------------------------------------------------------------------------------------


def test_outside_atomic_django_publishes_at_once(broker: pgmb.Broker, django_connection: Any) -> None:
    assert django_connection.connection is None, "it opens when first used"
    broker.publish("a", 1, conn=django_connection)
    assert payloads(broker) == [1]


def test_each_of_djangos_connections_serves(broker: pgmb.Broker, django_connection: Any) -> None:
    from django.db import connections

    with atomic():
        broker.publish("a", 1, conn=connections["default"])
        broker.publish_many("a", [2, 3], conn=django_connection)
    assert payloads(broker) == [1, 2, 3]


def test_an_atomic_block_that_must_roll_back_takes_no_event(
    broker: pgmb.Broker, django_connection: Any
) -> None:
    from django.db import transaction
    from django.db.transaction import TransactionManagementError

    with atomic():
        transaction.set_rollback(True)
        with pytest.raises(TransactionManagementError):
            broker.publish("a", 1, conn=django_connection)
    assert payloads(broker) == []


def test_django_replaces_a_connection_that_died(
    broker: pgmb.Broker, django_connection: Any, db: psycopg.Connection[Any]
) -> None:
    broker.publish("a", 1, conn=django_connection)
    db.execute("select pg_terminate_backend(%s, 10000)", [django_connection.connection.info.backend_pid])
    with pytest.raises(psycopg.OperationalError):
        broker.publish("a", 2, conn=django_connection)
    with pytest.raises(pgmb.InvalidArgument, match="closed"):
        broker.publish("a", 2, conn=django_connection)
    # What Django does before and after each request.
    django_connection.close_if_unusable_or_obsolete()
    broker.publish("a", 3, conn=django_connection)
    assert payloads(broker) == [1, 3]


def test_another_database_of_djangos_is_refused(broker: pgmb.Broker) -> None:
    from django.db.backends.sqlite3.base import DatabaseWrapper

    settings: dict[str, Any] = {"NAME": ":memory:", "OPTIONS": {}, "TIME_ZONE": None, "AUTOCOMMIT": True}
    wrapper = DatabaseWrapper({**settings, "CONN_HEALTH_CHECKS": False, "CONN_MAX_AGE": 0})
    with pytest.raises(pgmb.InvalidArgument, match="sqlite3") as caught:
        broker.publish("a", 1, conn=wrapper)
    assert "django.db.backends.postgresql" in (caught.value.hint or "")
    connection: Any = wrapper.connection
    connection.close()


# -- the wrong kind ------------------------------------------------------------------------------------------


async def test_the_other_brokers_kind_is_refused_with_a_hint(
    broker: pgmb.Broker,
    abroker: pgmb.AsyncBroker,
    engine: sqlalchemy.Engine,
    dsn: str,
) -> None:
    async_engine = create_async_engine(url(dsn))
    asynchronous: list[Callable[[], Any]] = [
        lambda: AsyncSession(async_engine),
        async_engine.connect,
    ]
    for make in asynchronous:
        async with make() as conn:
            with pytest.raises(pgmb.InvalidArgument, match="Async") as caught:
                broker.publish("a", 1, conn=conn)
            assert "aconnect" in (caught.value.hint or "")
    synchronous: list[Callable[[], Any]] = [lambda: Session(engine), engine.connect]
    for make in synchronous:
        with make() as conn:
            with pytest.raises(pgmb.InvalidArgument) as caught:
                await abroker.publish("a", 1, conn=conn)
            assert "pgmb.connect" in (caught.value.hint or "")
    # The synchronous session inside an asynchronous one is asynchronous all the same.
    async with AsyncSession(async_engine) as session:
        with pytest.raises(pgmb.InvalidArgument, match="AsyncConnection") as caught:
            await session.run_sync(lambda inner: broker.publish("a", 1, conn=inner))
        assert "aconnect" in (caught.value.hint or "")
    await async_engine.dispose()
    assert payloads(broker) == []


async def test_psycopgs_other_kind_is_refused(
    broker: pgmb.Broker, abroker: pgmb.AsyncBroker, dsn: str
) -> None:
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        with pytest.raises(pgmb.InvalidArgument, match=r"not psycopg\.AsyncConnection"):
            broker.publish("a", 1, conn=conn)  # type: ignore[arg-type]
    with psycopg.connect(dsn) as plain, pytest.raises(pgmb.InvalidArgument, match=r"psycopg\.Connection"):
        await abroker.publish("a", 1, conn=plain)  # type: ignore[arg-type]


@pytest.mark.parametrize("nonsense", ["postgresql:///app", 5, object(), {}, b""])
async def test_nonsense_is_refused(broker: pgmb.Broker, abroker: pgmb.AsyncBroker, nonsense: Any) -> None:
    with pytest.raises(pgmb.InvalidArgument, match="conn= takes a psycopg Connection") as caught:
        broker.publish("a", 1, conn=nonsense)
    assert "SQLAlchemy" in (caught.value.hint or "")
    with pytest.raises(pgmb.InvalidArgument, match="conn= takes a psycopg AsyncConnection"):
        await abroker.publish("a", 1, conn=nonsense)


def test_another_encoding_is_refused(broker: pgmb.Broker, dsn: str) -> None:
    with psycopg.connect(dsn, client_encoding="latin1") as conn, pytest.raises(psycopg.NotSupportedError):
        broker.publish("a", 1, conn=conn)


async def test_the_connection_inside_can_be_had(engine: sqlalchemy.Engine, dsn: str) -> None:
    with Session(engine) as session:
        assert isinstance(driver_connection(session), psycopg.Connection)
    async_engine = create_async_engine(url(dsn))
    async with AsyncSession(async_engine) as async_session:
        assert isinstance(await adriver_connection(async_session), psycopg.AsyncConnection)
    await async_engine.dispose()


def test_importing_the_package_imports_no_other_library() -> None:
    script = "import sys, pgmb, pgmb.outbox; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {name.split(".")[0] for name in done.stdout.split()} & {"sqlalchemy", "django"}
