"""What `conn=` takes: a psycopg connection, or what another library wraps around one.

SQLAlchemy and Django are recognised by the classes they have loaded already, never imported from here.
"""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from typing import Any, Protocol, TypeAlias, TypeGuard

import psycopg
from psycopg import AsyncConnection, Connection

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


ConnectionLike: TypeAlias = (
    Connection[Any] | SqlalchemyConnection | SqlalchemySession | DjangoConnection | DjangoProxy
)
"""What the synchronous broker takes as `conn=`."""

AsyncConnectionLike: TypeAlias = AsyncConnection[Any] | SqlalchemyAsyncConnection | SqlalchemyAsyncSession
"""What the asynchronous broker takes as `conn=`."""


def driver_connection(conn: ConnectionLike) -> Connection[Any]:
    """The psycopg connection behind `conn`, inside the transaction that `conn` stands for.

    One that has not begun its transaction begins it, so that its commit commits what is done here.
    """
    if isinstance(conn, Connection):
        return _checked(conn, conn)
    held: Any = conn
    if _is_session(held):
        held = _of_session(held)
    if _is(held, "sqlalchemy.engine", "Connection"):
        _refuse_closed(held)
        if not held.in_transaction():
            held.begin()
        return _checked(held.connection.driver_connection, conn)
    if _is_django(held):
        return _of_django(held)
    raise _refused(held, "Connection")


async def adriver_connection(conn: AsyncConnectionLike) -> AsyncConnection[Any]:
    """The same for asyncio."""
    if isinstance(conn, AsyncConnection):
        return _checked_async(conn, conn)
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
        return _checked_async((await held.get_raw_connection()).driver_connection, conn)
    raise _refused(held, "AsyncConnection")


def is_asynchronous(conn: object) -> bool:
    """Whether it is one of those that `adriver_connection` takes, or derived from one."""
    return (
        isinstance(conn, AsyncConnection)
        or _is_async_session(conn)
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


def _of_django(wrapper: Any) -> Connection[Any]:
    # An atomic block that is bound to roll back would roll back the event too, silently.
    wrapper.validate_no_broken_transaction()
    wrapper.ensure_connection()
    return _checked(wrapper.connection, wrapper)


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


def _is_django(value: Any) -> bool:
    return _is(value, "django.db.backends.base.base", "BaseDatabaseWrapper") or _is(
        value, "django.utils.connection", "ConnectionProxy"
    )


def _checked(raw: Any, given: Any) -> Connection[Any]:
    if not _is_psycopg(raw):
        raise _other_driver(raw, given)
    _check_state(raw)
    return raw


def _checked_async(raw: Any, given: Any) -> AsyncConnection[Any]:
    if not _is_psycopg_async(raw):
        raise _other_driver(raw, given)
    _check_state(raw)
    return raw


def _check_state(raw: Connection[Any] | AsyncConnection[Any]) -> None:
    _refuse_closed(raw)
    # JSON travels as it is encoded here.
    if raw.info.encoding != "utf-8":
        raise psycopg.NotSupportedError(f"conn= has client_encoding {raw.info.encoding}; pgmb writes UTF-8")


def _refuse_closed(held: Any) -> None:
    if held.closed:
        raise _error(
            f"conn= is closed: {_name(held)}",
            "The server ended it, or somebody closed it. Roll back (in Django, connection.close()) and try"
            " the whole transaction again.",
        )


def _refused(held: Any, wanted: str) -> InvalidArgument:
    said = f"conn= takes a psycopg {wanted}, not {_name(held)}"
    if _is_async_session(held) or _is(held, "sqlalchemy.ext.asyncio", "AsyncConnection"):
        return _error(said, "It is asynchronous: use the broker of pgmb.aconnect.")
    if _is_session(held) or _is_django(held) or _is(held, "sqlalchemy.engine", "Connection"):
        return _error(said, "It is synchronous: use the broker of pgmb.connect.")
    if isinstance(held, AsyncConnection | Connection):
        return _error(said, "pgmb.connect goes with Connection, pgmb.aconnect with AsyncConnection.")
    if wanted == "Connection":
        also = "a Connection, Session or scoped_session of SQLAlchemy's, or Django's connection"
    else:
        also = "an AsyncConnection, AsyncSession or async_scoped_session of SQLAlchemy's"
    return _error(said, f"It also takes {also}, over psycopg 3.")


def _other_driver(raw: Any, given: Any) -> InvalidArgument:
    said = f"conn= is a {_name(given)} over {_name(raw)}; pgmb works over psycopg 3"
    if isinstance(raw, AsyncConnection):
        return _error(said, "It is asynchronous inside: use the broker of pgmb.aconnect.")
    if _is_django(given):
        return _error(said, "Use the engine django.db.backends.postgresql with psycopg 3 installed.")
    return _error(said, "Make the engine with a URL that begins with postgresql+psycopg://.")


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
