"""What type checkers see of `conn=`. mypy and pyright check this file; nothing here runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_type
from uuid import UUID

import psycopg
from django.db import connection as django_connection
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

import pgmb
from pgmb.drivers import AsyncDriver, Driver
from pgmb.outbox import DbapiConnection, DjangoConnection, adriver_connection, driver_connection

if TYPE_CHECKING:

    class DjangoWrapper:
        """As Django's stubs declare BaseDatabaseWrapper."""

        connection: Any
        alias: str

        def ensure_connection(self) -> None: ...
        def commit(self) -> None: ...

    def synchronous(
        broker: pgmb.Broker,
        lease: pgmb.Lease,
        session: Session,
        scoped: scoped_session[Session],
        connection: Connection,
        django: DjangoWrapper,
    ) -> None:
        assert_type(broker.publish("a", 1, conn=session), UUID)
        assert_type(broker.publish_many("a", [1], conn=scoped), int)
        assert_type(lease.ack(conn=connection), int)
        assert_type(lease.ack(conn=django), int)
        assert_type(driver_connection(session), psycopg.Connection[Any])
        named: DjangoConnection = django
        broker.publish("a", 1, conn=named)
        broker.publish("a", 1, conn=django_connection)

    class Psycopg2Connection:
        """As psycopg2's stubs declare it."""

        autocommit: bool

        def cursor(self, name: str | None = None, cursor_factory: object = None) -> Any: ...
        def commit(self) -> None: ...

    class AsyncpgConnection:
        """As asyncpg declares it."""

        def is_in_transaction(self) -> bool: ...
        def get_server_pid(self) -> int: ...

    async def other_drivers(
        broker: pgmb.Broker,
        abroker: pgmb.AsyncBroker,
        psycopg2: Psycopg2Connection,
        asyncpg: AsyncpgConnection,
        own: Driver,
        async_own: AsyncDriver,
    ) -> None:
        named: DbapiConnection = psycopg2
        assert_type(broker.publish("a", 1, conn=named), UUID)
        assert_type(await abroker.publish("a", 1, conn=asyncpg), UUID)
        assert_type(broker.publish("a", 1, conn=own), UUID)
        assert_type(await abroker.publish("a", 1, conn=async_own), UUID)
        broker.publish("a", 1, conn=async_own)  # type: ignore[arg-type]
        broker.publish("a", 1, conn=asyncpg)  # type: ignore[arg-type]
        await abroker.publish("a", 1, conn=psycopg2)  # type: ignore[arg-type]

    async def asynchronous(
        broker: pgmb.AsyncBroker,
        lease: pgmb.AsyncLease,
        session: AsyncSession,
        scoped: async_scoped_session[AsyncSession],
        connection: AsyncConnection,
    ) -> None:
        assert_type(await broker.publish("a", 1, conn=session), UUID)
        assert_type(await broker.publish_many("a", [1], conn=scoped), int)
        assert_type(await lease.ack(conn=connection), int)
        assert_type(await adriver_connection(session), psycopg.AsyncConnection[Any])

    async def refused(
        broker: pgmb.Broker,
        abroker: pgmb.AsyncBroker,
        session: Session,
        connection: Connection,
        async_session: AsyncSession,
        async_connection: AsyncConnection,
    ) -> None:
        broker.publish("a", 1, conn=async_session)  # type: ignore[arg-type]
        broker.publish("a", 1, conn=async_connection)  # type: ignore[arg-type]
        broker.publish("a", 1, conn="postgresql:///app")  # type: ignore[arg-type]
        await abroker.publish("a", 1, conn=session)  # type: ignore[arg-type]
        await abroker.publish("a", 1, conn=connection)  # type: ignore[arg-type]
