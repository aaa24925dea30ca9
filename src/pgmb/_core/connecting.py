"""How pgmb connects: every connection of every part is opened with the parameters of this module.

Without them libpq waits for hours on a connection whose peer is gone.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from psycopg import AsyncConnection
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import Conninfo
from psycopg.rows import tuple_row

from pgmb.errors import WrongServer, translated

DEFAULTS: Final = {
    "connect_timeout": 5,
    "keepalives": 1,
    "keepalives_idle": 2,
    "keepalives_interval": 1,
    "keepalives_count": 3,
    "tcp_user_timeout": 4000,
}
"""A connection whose packets are lost is closed after 4 seconds, whether a statement is under way or not.

tcp_user_timeout is in milliseconds and applies to unacknowledged data and to keepalives alike.
"""


REQUIRED: Final[dict[str, Any]] = {"autocommit": True, "client_encoding": "utf8", "row_factory": tuple_row}
"""What pgmb's own statements rely on, whatever a caller's options or connection string say.

Without autocommit a statement succeeds and is rolled back when its connection is returned.
"""

CHOSEN: Final = ("autocommit", "context", "cursor_factory", "row_factory")
"""Options of psycopg's that only change the connections which a user borrows from the broker."""

_DRIVER: Final = re.compile(r"^(postgres(?:ql)?)\+\w+://")
"""A driver's name in the scheme of a URL, as SQLAlchemy writes it: postgresql+psycopg://."""


def conninfo(dsn: str, application: str = "pgmb") -> str:
    """The connection string, or URL, with the defaults that it, and the environment, leave open.

    application: application_name, unless the string or PGAPPNAME names another.
    """
    dsn = _DRIVER.sub(r"\1://", dsn)
    given = conninfo_to_dict(dsn)
    environment = {option.keyword.decode() for option in Conninfo.get_defaults() if option.val is not None}
    missing: dict[str, Any] = {
        name: value for name, value in DEFAULTS.items() if name not in given and name not in environment
    }
    return make_conninfo(dsn, **{"fallback_application_name": application, **given, **missing})


def with_options(dsn: str, options: Mapping[str, Any]) -> str:
    """The connection string with those of a connection's options that a string can have."""
    known = {option.keyword.decode() for option in Conninfo.get_defaults()}
    given = {name: value for name, value in options.items() if name in known}
    return make_conninfo(_DRIVER.sub(r"\1://", dsn), **given)


def required(options: Mapping[str, Any]) -> dict[str, Any]:
    """psycopg's options, with those that pgmb's statements rely on in place of the caller's."""
    return {**{name: value for name, value in options.items() if name not in CHOSEN}, **REQUIRED}


def formats(connection: psycopg.Connection[Any] | AsyncConnection[Any], *, pooled: bool = False) -> str:
    """Statements that give a new session the formats which psycopg reads; empty if it has them.

    Set after connecting, because PgBouncer refuses startup options. It carries DateStyle over between
    sessions, but older versions leave IntervalStyle to the next client.
    """
    wrong: list[str] = []
    if not _reported(connection, b"DateStyle").startswith(b"ISO"):
        wrong.append("set datestyle = 'ISO'")
    if not pooled and _reported(connection, b"IntervalStyle") != b"postgres":
        wrong.append("set intervalstyle = 'postgres'")
    return "; ".join(wrong)


def _reported(connection: psycopg.Connection[Any] | AsyncConnection[Any], name: bytes) -> bytes:
    return connection.pgconn.parameter_status(name) or b""


def connect(dsn: str, application: str = "pgmb", **options: Any) -> psycopg.Connection[Any]:
    """A connection in autocommit mode, with rows as tuples. psycopg's `options` override the string."""
    made = psycopg.connect(conninfo(dsn, application), **required(options))
    if wrong := formats(made):
        made.execute(wrong)
    return made


async def aconnect(dsn: str, application: str = "pgmb", **options: Any) -> AsyncConnection[Any]:
    """The same, asynchronous."""
    made = await AsyncConnection.connect(conninfo(dsn, application), **required(options))
    if wrong := formats(made):
        await made.execute(wrong)
    return made


@contextmanager
def session(dsn: str, application: str) -> Generator[psycopg.Connection[Any]]:
    """A connection for work that keeps locks or settings in its session. Errors are those of `pgmb.errors`.

    Raises WrongServer behind a pooler, which would leave the locks and settings to others.
    """
    with connect(dsn, application) as connection, translated():
        # A pooler answers with a process id of its own making.
        row = connection.execute("select pg_backend_pid()").fetchone()
        if row != (connection.info.backend_pid,):
            pooled = WrongServer(f"{application} cannot work through a connection pooler")
            pooled.advise("It keeps locks in its session. Connect to the database server itself.")
            raise pooled
        yield connection
