"""What the functions of this package take as "the broker", and the database that it stands for."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import psycopg

from pgmb._async.broker import AsyncBroker
from pgmb._core.connecting import connect, with_options
from pgmb._sync.broker import Broker
from pgmb.app import App
from pgmb.errors import InvalidArgument
from pgmb.outbox import ConnectionLike, driver_connection

if TYPE_CHECKING:
    from collections.abc import Generator

Source: TypeAlias = Broker | AsyncBroker | App | str
"""A broker of either kind, an app, or a connection string."""


def dsn_of(source: Source) -> str:
    """A connection string to the database of a broker, or of what else stands for one."""
    return with_options(*_address(source))


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
        with connect(dsn_of(source)) as own:
            yield own
