"""ADBC connections of a Python worker. Spark keeps its workers, so they keep their connections."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final

import adbc_driver_manager

from pgmb._core.connecting import conninfo
from pgmb.errors import ours_for
from pgmb.spark.options import RECONNECT_SECONDS

_reached: Final[set[str]] = set()

# By process and connection string: a worker may be a fork of one that had connections.
_kept: Final[dict[tuple[int, str], Any]] = {}


@atexit.register
def _close() -> None:
    """Close connections before the interpreter unloads modules, or ADBC warns."""
    for process, url in list(_kept):
        if process == os.getpid():
            _kept.pop((process, url)).close()


@contextmanager
def transaction(url: str, *, reached: bool = False) -> Generator[Any]:
    """A transaction on this process's connection to a database. Errors of pgmb are raised as `pgmb.errors`.

    If the database is away and was `reached` before, by the driver or this process, it is waited for.
    Otherwise the address may be wrong.
    After an error the connection is closed. BEGIN and COMMIT are explicit: ADBC's own transactions would
    leave the connection idle in transaction between tasks.
    """
    connection = _connection(url, reached or url in _reached)
    try:
        with translated(), connection.cursor() as cursor:
            yield cursor
            cursor.execute("commit")
    except BaseException:
        connection.close()
        raise
    # One that was opened meanwhile, for a transaction inside of this one, is not needed any more.
    if (other := _kept.pop((os.getpid(), url), None)) is not None:
        other.close()
    _kept[os.getpid(), url] = connection


@contextmanager
def translated() -> Generator[None]:
    """Raise ADBC errors with SQLSTATEs of pgmb as the exceptions of `pgmb.errors`."""
    try:
        yield
    except adbc_driver_manager.Error as error:
        said = diagnosis(error)
        ours = ours_for(error.sqlstate, said.get("MESSAGE_PRIMARY", str(error)), said.get("MESSAGE_HINT"))
        if ours is None:
            raise
        raise ours from error


def diagnosis(error: adbc_driver_manager.Error) -> dict[str, str]:
    """The fields of the server's error message, by PostgreSQL's names."""
    details: Any = error.details or []
    return {
        (name.decode() if isinstance(name, bytes) else name).removeprefix("PG_DIAG_"): text.decode(
            "utf-8", "replace"
        )
        for name, text in details
    }


def _connection(url: str, wait: bool) -> Any:
    """A connection in a new transaction: the kept one, unless the server closed it."""
    kept = _kept.pop((os.getpid(), url), None)
    if kept is not None:
        try:
            _begin(kept)
        except adbc_driver_manager.Error:
            kept.close()
        else:
            return kept
    # Imported here because it imports pandas, which the driver's planning does not need. It is untyped.
    driver: Any = import_module("adbc_driver_postgresql.dbapi")
    until = time.monotonic() + RECONNECT_SECONDS
    while True:
        try:
            fresh = driver.connect(conninfo(url, "pgmb spark"), autocommit=True)
        except adbc_driver_manager.Error:
            # A task that fails is tried again at once, and after four times ends the query.
            if not wait or time.monotonic() >= until:
                raise
            time.sleep(0.5)
        else:
            _reached.add(url)
            _begin(fresh)
            return fresh


def _begin(connection: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute("begin isolation level read committed")
