"""A throwaway server with pgmb in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness.databases import install
from harness.postgres import Server, create_database


@contextmanager
def database(major: int, settings: dict[str, Any] | None = None) -> Iterator[tuple[Server, str]]:
    """A throwaway server and the address of a database with pgmb in it."""
    with Server.start(major, name="faults", settings={"max_wal_size": "1GB", **(settings or {})}) as server:
        dsn = server.dsn(create_database(server))
        install(dsn)
        yield server, dsn
