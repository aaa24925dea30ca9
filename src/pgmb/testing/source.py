"""What the functions of this package take as "the broker", and the database that it stands for."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import psycopg
from psycopg.conninfo import make_conninfo

from pgmb._async.broker import AsyncBroker
from pgmb._core.connecting import connect
from pgmb._sync.broker import Broker
from pgmb.app import App
from pgmb.errors import InvalidArgument
from pgmb.outbox import ConnectionLike, driver_connection

if TYPE_CHECKING:
    from collections.abc import Generator

Source: TypeAlias = Broker | AsyncBroker | App | str
"""A broker of either kind, an app, or a connection string."""

# What psycopg and the pool take, and a connection string does not.
_NOT_IN_A_DSN = {
    "autocommit",
    "client_encoding",
    "context",
    "cursor_factory",
    "max_size",
    "max_wait",
    "min_size",
    "pooler",
    "prepare_threshold",
    "row_factory",
}


def dsn_of(source: Source) -> str:
    """A connection string to the database of a broker, or of what else stands for one."""
    dsn, options = _address(source)
    return make_conninfo(dsn, **{name: value for name, value in options.items() if name not in _NOT_IN_A_DSN})


def _address(source: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(source, str):
        return source, {}
    if isinstance(source, App):
        return source.dsn, source.connection
    if isinstance(source, Broker | AsyncBroker):
        pool = source._pool  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
        return cast("str", pool.conninfo), cast("dict[str, Any]", pool.kwargs)
    raise InvalidArgument(f"not a broker, an app or a connection string: {source!r}")


@contextmanager
def connection(source: Source, conn: ConnectionLike | None = None) -> Generator[psycopg.Connection[Any]]:
    """The caller's connection, inside its transaction, or one made for the occasion."""
    if conn is not None:
        yield driver_connection(conn)
    else:
        with connect(dsn_of(source), client_encoding="utf8") as own:
            yield own
