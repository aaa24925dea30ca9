"""What `conn=` takes: connections of psycopg, of other drivers, and what libraries wrap around them.

Libraries are recognised by the classes they have loaded already, never imported from here.
"""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from typing import Any, Protocol, TypeAlias, TypeGuard, TypeVar

import psycopg
from psycopg import AsyncConnection, Connection

from pgmb.drivers import AsyncDriver, Driver
from pgmb.errors import InvalidArgument


class SqlalchemyConnection(Protocol):
    """SQLAlchemy's Connection."""

    @property
    def connection(self) -> Any: ...
    def exec_driver_sql(self, statement: str) -> Any: ...
    def commit(self) -> None: ...


class SqlalchemySession(Protocol):
    """SQLAlchemy's Session and scoped_session."""

    def connection(self) -> Any: ...
    def flush(self) -> None: ...
    def commit(self) -> None: ...


class SqlalchemyAsyncConnection(Protocol):
    """SQLAlchemy's AsyncConnection."""

    def get_raw_connection(self) -> Coroutine[Any, Any, Any]: ...
    def commit(self) -> Coroutine[Any, Any, None]: ...


class SqlalchemyAsyncSession(Protocol):
    """SQLAlchemy's AsyncSession and async_scoped_session."""

    def connection(self) -> Coroutine[Any, Any, Any]: ...
    def commit(self) -> Coroutine[Any, Any, None]: ...


class DjangoConnection(Protocol):
    """Each of Django's `connections`."""

    connection: Any

    def ensure_connection(self) -> None: ...


class DjangoProxy(Protocol):
    """Django's `connection`, which stands for one of them."""

    def __getattr__(self, item: str, /) -> Any: ...
    def __contains__(self, key: Any, /) -> bool: ...


class DbapiConnection(Protocol):
    """A connection of psycopg2 or pg8000."""

    def cursor(self) -> Any: ...
    def commit(self) -> None: ...


class AsyncpgConnection(Protocol):
    """A connection of asyncpg, or one that its pool lends."""

    def is_in_transaction(self) -> bool: ...
    def get_server_pid(self) -> int: ...


ConnectionLike: TypeAlias = (
    Connection[Any]
    | SqlalchemyConnection
    | SqlalchemySession
    | DjangoConnection
    | DjangoProxy
    | DbapiConnection
    | Driver
)
"""What the synchronous broker takes as `conn=`."""

AsyncConnectionLike: TypeAlias = (
    AsyncConnection[Any]
    | SqlalchemyAsyncConnection
    | SqlalchemyAsyncSession
    | AsyncpgConnection
    | AsyncDriver
)
"""What the asynchronous broker takes as `conn=`."""


def joined(conn: ConnectionLike) -> Connection[Any] | Driver:
    """The psycopg connection behind `conn`, or what runs statements on it, inside its transaction.

    One that has not begun its transaction begins it, so that its commit commits what is done here.
    """
    if isinstance(conn, Connection):
        return _checked(conn)
    if isinstance(conn, Driver):
        return conn
    held: Any = conn
    if _is_session(held):
        held = _of_session(held)
    if _is(held, "sqlalchemy.engine", "Connection"):
        _refuse_closed(held)
        if not held.in_transaction():
            held.begin()
        raw = held.connection.driver_connection
        if _is_psycopg(raw):
            return _checked(raw)
        if held.dialect.is_async or held.dialect.name != "postgresql":
            raise _over(raw, conn)
        from pgmb.drivers.sqlalchemy import Sqlalchemy

        return Sqlalchemy(held)
    if _is_django(held):
        return _of_django(held)
    if _is(held, "psycopg2.extensions", "connection"):
        _refuse_closed(held)
        from pgmb.drivers.psycopg2 import Psycopg2

        return Psycopg2(held)
    if _is(held, "pg8000.dbapi", "Connection"):
        from pgmb.drivers.pg8000 import Pg8000

        return Pg8000(held)
    raise _refused(held, "Connection")


async def ajoined(conn: AsyncConnectionLike) -> AsyncConnection[Any] | AsyncDriver:
    """The same for asyncio."""
    if isinstance(conn, AsyncConnection):
        return _checked(conn)
    if isinstance(conn, AsyncDriver):
        return conn
    held: Any = conn
    if _is_async_session(held):
        try:
            held = await held.connection()
        except _unbound() as error:
            raise _without_bind() from error
    if _is(held, "sqlalchemy.ext.asyncio", "AsyncConnection"):
        _refuse_closed(held)
        if not held.in_transaction():
            await held.begin()
        raw = (await held.get_raw_connection()).driver_connection
        if _is_psycopg_async(raw):
            return _checked(raw)
        if held.dialect.name != "postgresql":
            raise _over(raw, conn)
        from pgmb.drivers.sqlalchemy import AsyncSqlalchemy

        return AsyncSqlalchemy(held)
    if _is_asyncpg(held):
        from pgmb.drivers.asyncpg import Asyncpg

        return Asyncpg(held)
    raise _refused(held, "AsyncConnection")


def driver_connection(conn: ConnectionLike) -> Connection[Any]:
    """The psycopg connection behind `conn`, inside the transaction that `conn` stands for."""
    found = joined(conn)
    if isinstance(found, Driver):
        raise _other_driver(conn)
    return found


async def adriver_connection(conn: AsyncConnectionLike) -> AsyncConnection[Any]:
    """The same for asyncio."""
    found = await ajoined(conn)
    if isinstance(found, AsyncDriver):
        raise _other_driver(conn)
    return found


def is_asynchronous(conn: object) -> bool:
    """Whether it is one of those that `ajoined` takes, or derived from one."""
    return (
        isinstance(conn, (AsyncConnection, AsyncDriver))
        or _is_async_session(conn)
        or _is_asyncpg(conn)
        or _is(conn, "sqlalchemy.ext.asyncio", "AsyncConnection")
    )


def connection_lost(conn: ConnectionLike) -> None:
    """Tell the library that its connection is dead, as it would have noticed by a statement of its own.

    SQLAlchemy then rolls back in peace and takes another; Django looks at it before the next request.
    """
    held: Any = conn
    if _is_session(held):
        held = held.connection()
    if _is_django(held):
        held.errors_occurred = True
    elif not _is_psycopg(held):
        held.invalidate()


async def aconnection_lost(conn: AsyncConnectionLike) -> None:
    """The same for asyncio."""
    held: Any = conn
    if _is_async_session(held):
        held = await held.connection()
    if not _is_psycopg_async(held):
        await held.invalidate()


def _of_session(session: Any) -> Any:
    try:
        return session.connection()
    except _unbound() as error:
        raise _without_bind() from error


def _of_django(wrapper: Any) -> Connection[Any] | Driver:
    # An atomic block that is bound to roll back would roll back the event too, silently.
    wrapper.validate_no_broken_transaction()
    wrapper.ensure_connection()
    if _is_psycopg(wrapper.connection):
        return _checked(wrapper.connection)
    if wrapper.vendor != "postgresql":
        raise _over(wrapper.connection, wrapper)
    from pgmb.drivers.django import Django

    return Django(wrapper)


def _is(value: Any, module: str, *names: str) -> bool:
    """Whether it is of one of these classes. Without the module loaded, nothing can be."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, tuple(getattr(loaded, name) for name in names))


def _is_psycopg(value: Any) -> TypeGuard[Connection[Any]]:
    return isinstance(value, Connection)


def _is_psycopg_async(value: Any) -> TypeGuard[AsyncConnection[Any]]:
    return isinstance(value, AsyncConnection)


def _is_session(value: Any) -> bool:
    return _is(value, "sqlalchemy.orm", "Session", "scoped_session")


def _is_async_session(value: Any) -> bool:
    return _is(value, "sqlalchemy.ext.asyncio", "AsyncSession", "async_scoped_session")


def _is_asyncpg(value: Any) -> bool:
    return _is(value, "asyncpg", "Connection")


def _is_django(value: Any) -> bool:
    return _is(value, "django.db.backends.base.base", "BaseDatabaseWrapper") or _is(
        value, "django.utils.connection", "ConnectionProxy"
    )


_Raw = TypeVar("_Raw", Connection[Any], AsyncConnection[Any])


def _checked(raw: _Raw) -> _Raw:
    _refuse_closed(raw)
    # JSON travels as it is encoded here.
    if raw.info.encoding != "utf-8":
        raise psycopg.NotSupportedError(f"conn= has client_encoding {raw.info.encoding}; pgmb writes UTF-8")
    return raw


def _refuse_closed(held: Any) -> None:
    if held.closed:
        raise _error(
            f"conn= is closed: {_name(held)}",
            "The server ended it, or somebody closed it. Roll back (in Django, connection.close()) and try"
            " the whole transaction again.",
        )


def _refused(held: Any, wanted: str) -> InvalidArgument:
    said = f"conn= takes a psycopg {wanted}, not {_name(held)}"
    if is_asynchronous(held):
        return _error(said, "It is asynchronous: use the broker of pgmb.aconnect.")
    if _is_synchronous(held):
        return _error(said, "It is synchronous: use the broker of pgmb.connect.")
    if wanted == "Connection":
        also = (
            "a Connection, Session or scoped_session of SQLAlchemy's, Django's connection, and connections of"
            " psycopg2 and pg8000"
        )
    else:
        also = "an AsyncConnection, AsyncSession or async_scoped_session of SQLAlchemy's, and asyncpg's"
    return _error(said, f"It also takes {also}, and what is derived from pgmb.drivers.")


def _is_synchronous(held: Any) -> bool:
    return (
        isinstance(held, (Connection, Driver))
        or _is_session(held)
        or _is_django(held)
        or _is(held, "sqlalchemy.engine", "Connection")
        or _is(held, "psycopg2.extensions", "connection")
        or _is(held, "pg8000.dbapi", "Connection")
    )


def _over(raw: Any, given: Any) -> InvalidArgument:
    said = f"conn= is a {_name(given)} over {_name(raw)}; events are in PostgreSQL"
    if is_asynchronous(raw):
        return _error(said, "It is asynchronous inside: use the broker of pgmb.aconnect.")
    if _is_django(given):
        return _error(said, "Use the engine django.db.backends.postgresql.")
    return _error(said, "Make the engine with a URL such as postgresql+psycopg:// or postgresql+asyncpg://.")


def _other_driver(given: Any) -> InvalidArgument:
    return _error(
        f"conn= is a {_name(given)} over another driver than psycopg 3",
        "Here it must be psycopg 3: with SQLAlchemy, an engine of postgresql+psycopg://.",
    )


def _unbound() -> tuple[type[Exception], ...]:
    loaded: Any = sys.modules.get("sqlalchemy.exc")
    return () if loaded is None else (loaded.UnboundExecutionError,)


def _without_bind() -> InvalidArgument:
    return _error(
        "conn= is a session that does not say which database it means",
        "Pass session.connection(bind_arguments={'mapper': …}) of the database that has pgmb.",
    )


def _error(said: str, hint: str) -> InvalidArgument:
    error = InvalidArgument(said)
    error.advise(hint)
    return error


def _name(value: Any) -> str:
    return f"{value.__class__.__module__}.{value.__class__.__qualname__}"
