"""One face for the libraries whose transactions a publish can join."""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, suppress
from typing import Any

import asyncpg
import django
import pg8000.dbapi
import psycopg
import psycopg2.extras
from django.conf import settings
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import URL, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import pgmb


class RolledBackError(Exception):
    """Raised to leave a block that shall roll back."""


@asynccontextmanager
async def rolled_back(block: AbstractAsyncContextManager[Any]) -> AsyncGenerator[Any]:
    """The transaction or savepoint, left by an exception."""
    with suppress(RolledBackError):
        async with block as conn:
            yield conn
            raise RolledBackError


async def settled(result: Any) -> Any:
    """What a call gave, awaited where it is asynchronous."""
    return await result if inspect.isawaitable(result) else result


def url(dsn: str, driver: str = "postgresql+psycopg") -> URL:
    parts: dict[str, Any] = conninfo_to_dict(dsn)
    query = {"host": parts["host"], "port": str(parts["port"])}
    if driver.endswith("pg8000"):
        query = {"unix_sock": f"{parts['host']}/.s.PGSQL.{parts['port']}"}
    return URL.create(driver, username=parts["user"], database=parts["dbname"], query=query)


def configure_django(dsn: str) -> None:
    """Point `django.db.connection` at this database. Settings can be made once a process only."""
    if not settings.configured:
        settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.postgresql"}})
        django.setup()
    from django.db import connections

    parts: dict[str, Any] = conninfo_to_dict(dsn)
    databases: Any = connections.settings
    databases["default"].update(
        NAME=parts["dbname"], USER=parts["user"], HOST=parts["host"], PORT=str(parts["port"])
    )
    if hasattr(connections._connections, "default"):
        del connections["default"]


def atomic() -> AbstractContextManager[None]:
    from django.db import transaction

    # Its overloads are not declared: it is a context manager too.
    block: Any = transaction.atomic()
    return block


class Library:
    """A broker, and transactions of one kind. Blocks roll back when `RolledBackError` leaves them."""

    asynchronous = False

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.broker: Any = None

    async def open(self) -> None:
        self.broker = pgmb.connect(self.dsn)

    async def close(self) -> None:
        await settled(self.broker.close())

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """What `conn=` takes, inside a transaction that has not run a statement."""
        raise NotImplementedError

    def savepoint(self, conn: Any) -> AbstractAsyncContextManager[None]:
        raise NotImplementedError

    async def execute(self, conn: Any, statement: str) -> None:
        await settled(conn.execute(text(statement)))


class Psycopg(Library):
    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Any]:
        with psycopg.connect(self.dsn) as conn:
            yield conn

    @asynccontextmanager
    async def savepoint(self, conn: Any) -> AsyncGenerator[None]:
        with conn.transaction():
            yield

    async def execute(self, conn: Any, statement: str) -> None:
        conn.execute(statement)


class PsycopgAsync(Psycopg):
    asynchronous = True

    async def open(self) -> None:
        self.broker = await pgmb.aconnect(self.dsn)

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Any]:
        async with await psycopg.AsyncConnection.connect(self.dsn) as conn:
            yield conn

    @asynccontextmanager
    async def savepoint(self, conn: Any) -> AsyncGenerator[None]:
        async with conn.transaction():
            yield

    async def execute(self, conn: Any, statement: str) -> None:
        await conn.execute(statement)


class SqlalchemyConnection(Library):
    driver = "postgresql+psycopg"

    async def open(self) -> None:
        await super().open()
        self.engine = create_engine(url(self.dsn, self.driver))

    async def close(self) -> None:
        await super().close()
        self.engine.dispose()

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Any]:
        # Begun by its first use, committed by hand: "commit as you go".
        with self.engine.connect() as conn:
            yield conn
            conn.commit()

    @asynccontextmanager
    async def savepoint(self, conn: Any) -> AsyncGenerator[None]:
        with conn.begin_nested():
            yield


class SqlalchemySession(SqlalchemyConnection):
    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Any]:
        with Session(self.engine) as session:
            yield session
            session.commit()


class SqlalchemyScopedSession(SqlalchemyConnection):
    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Any]:
        session = scoped_session(sessionmaker(self.engine))
        try:
            yield session
            session.commit()
        finally:
            session.remove()


class SqlalchemyAsyncConnection(Library):
    asynchronous = True
    driver = "postgresql+psycopg"

    async def open(self) -> None:
        self.broker = await pgmb.aconnect(self.dsn)
        self.engine = create_async_engine(url(self.dsn, self.driver))

    async def close(self) -> None:
        await super().close()
        await self.engine.dispose()

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Any]:
        async with self.engine.connect() as conn:
            yield conn
            await conn.commit()

    @asynccontextmanager
    async def savepoint(self, conn: Any) -> AsyncGenerator[None]:
        async with conn.begin_nested():
            yield


class SqlalchemyAsyncSession(SqlalchemyAsyncConnection):
    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Any]:
        async with AsyncSession(self.engine) as session:
            yield session
            await session.commit()


class SqlalchemyAsyncScopedSession(SqlalchemyAsyncConnection):
    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Any]:
        session = async_scoped_session(async_sessionmaker(self.engine), scopefunc=lambda: 1)
        try:
            yield session
            await session.commit()
        finally:
            await session.remove()


class SqlalchemyOverPsycopg2(SqlalchemyConnection):
    driver = "postgresql+psycopg2"


class SqlalchemySessionOverPg8000(SqlalchemySession):
    driver = "postgresql+pg8000"


class SqlalchemySessionOverAsyncpg(SqlalchemyAsyncSession):
    driver = "postgresql+asyncpg"


class Asyncpg(Library):
    """With a codec that an application may have set."""

    asynchronous = True

    async def open(self) -> None:
        self.broker = await pgmb.aconnect(self.dsn)
        parts: dict[str, Any] = conninfo_to_dict(self.dsn)
        self.options: dict[str, Any] = {key: parts[key] for key in ("host", "port", "user")}
        self.options["database"] = parts["dbname"]

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Any]:
        conn = await asyncpg.connect(**self.options)
        try:
            await conn.set_type_codec("json", encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
            async with conn.transaction():
                yield conn
        finally:
            await conn.close()

    @asynccontextmanager
    async def savepoint(self, conn: Any) -> AsyncGenerator[None]:
        async with conn.transaction():
            yield

    async def execute(self, conn: Any, statement: str) -> None:
        await conn.execute(statement)


class Dbapi(Library):
    """Savepoints by hand, as the DB-API has none."""

    @asynccontextmanager
    async def savepoint(self, conn: Any) -> AsyncGenerator[None]:
        await self.execute(conn, "savepoint inner_one")
        try:
            yield
        except BaseException:
            await self.execute(conn, "rollback to savepoint inner_one")
            raise
        await self.execute(conn, "release savepoint inner_one")

    async def execute(self, conn: Any, statement: str) -> None:
        cursor = conn.cursor()
        cursor.execute(statement)
        cursor.close()


class Psycopg2(Dbapi):
    """With cursors that return dictionaries."""

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Any]:
        conn = psycopg2.connect(self.dsn, cursor_factory=psycopg2.extras.RealDictCursor)
        try:
            with conn:
                yield conn
        finally:
            conn.close()


class Pg8000(Dbapi):
    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Any]:
        parts: dict[str, Any] = conninfo_to_dict(self.dsn)
        place = {"unix_sock": f"{parts['host']}/.s.PGSQL.{parts['port']}"}
        conn = pg8000.dbapi.connect(parts["user"], database=parts["dbname"], **place)
        try:
            yield conn
            conn.commit()
        finally:
            conn.close()


class Django(Library):
    async def open(self) -> None:
        await super().open()
        configure_django(self.dsn)

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[Any]:
        from django.db import connection

        try:
            with atomic():
                yield connection
        finally:
            # Here, because the connection belongs to the context that opened it.
            connection.close()

    @asynccontextmanager
    async def savepoint(self, conn: Any) -> AsyncGenerator[None]:
        with atomic():
            yield

    async def execute(self, conn: Any, statement: str) -> None:
        with conn.cursor() as cursor:
            cursor.execute(statement)


LIBRARIES: dict[str, type[Library]] = {
    "psycopg": Psycopg,
    "psycopg async": PsycopgAsync,
    "sqlalchemy connection": SqlalchemyConnection,
    "sqlalchemy session": SqlalchemySession,
    "sqlalchemy scoped_session": SqlalchemyScopedSession,
    "sqlalchemy async connection": SqlalchemyAsyncConnection,
    "sqlalchemy async session": SqlalchemyAsyncSession,
    "sqlalchemy async_scoped_session": SqlalchemyAsyncScopedSession,
    "django": Django,
    "asyncpg": Asyncpg,
    "psycopg2": Psycopg2,
    "pg8000": Pg8000,
    "sqlalchemy connection over psycopg2": SqlalchemyOverPsycopg2,
    "sqlalchemy session over pg8000": SqlalchemySessionOverPg8000,
    "sqlalchemy session over asyncpg": SqlalchemySessionOverAsyncpg,
}
