"""ADBC connections of a Python worker. Spark keeps its workers, so they keep their connections."""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final

import adbc_driver_manager

from pgmb.errors import BY_SQLSTATE

# By process and connection string: a worker may be a fork of one that had connections.
_kept: Final[dict[tuple[int, str], Any]] = {}
_SAID: Final = re.compile(
    r"ERROR:  (?P<message>.*?)(?:\nHINT:  (?P<hint>.*?))?(?:\n[A-Z ]+:  |\n?\. SQLSTATE|$)", re.DOTALL
)


@contextmanager
def transaction(url: str) -> Generator[Any]:
    """A transaction on the connection that this process keeps for a database. Our errors are raised as ours.

    The connection is not used again after an error. BEGIN and COMMIT are said here: ADBC's own would leave it
    idle in a transaction between tasks.
    """
    connection = _begun(url)
    try:
        with translated(), connection.cursor() as cursor:
            yield cursor
            cursor.execute("commit")
    except BaseException:
        connection.close()
        raise
    _kept[os.getpid(), url] = connection


@contextmanager
def translated() -> Generator[None]:
    """Raise ADBC's errors that are ours as the exceptions of `pgmb.errors`."""
    try:
        yield
    except adbc_driver_manager.Error as error:
        kind = BY_SQLSTATE.get(error.sqlstate or "")
        if kind is None:
            raise
        said = _SAID.search(str(error))
        ours = kind(said["message"] if said else str(error))
        if said and said["hint"]:
            ours.advise(said["hint"])
        raise ours from error


def _begun(url: str) -> Any:
    """A connection in a new transaction: the one kept, unless the server has closed it."""
    kept = _kept.pop((os.getpid(), url), None)
    if kept is not None:
        try:
            _begin(kept)
        except adbc_driver_manager.Error:
            kept.close()
        else:
            return kept
    # Not sooner: it imports pandas, and the processes in which Spark plans need neither. It has no types.
    driver: Any = import_module("adbc_driver_postgresql.dbapi")
    fresh = driver.connect(url, autocommit=True)
    _begin(fresh)
    return fresh


def _begin(connection: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute("begin isolation level read committed")
