"""One door to the harness's servers. `python -m harness.postgres 18` runs one until it is interrupted."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys

from harness.databases import Database, Databases, create_database, drop_database
from harness.installations import available, binaries
from harness.pgbouncer import PgBouncer
from harness.server import Server

__all__ = [
    "Database",
    "Databases",
    "PgBouncer",
    "Server",
    "available",
    "binaries",
    "create_database",
    "drop_database",
]


def main() -> None:
    """Start a throwaway server with pgmb, print the address of its database, and remove it at the end."""
    from pgmb import schema

    parser = argparse.ArgumentParser(prog="python -m harness.postgres", description=main.__doc__)
    parser.add_argument("major", type=int, choices=available(), help="PostgreSQL's major version")
    major: int = parser.parse_args().major
    # An exception, as Ctrl-C is one: the server is removed on its way, even while it starts.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with contextlib.suppress(KeyboardInterrupt), Server.start(major) as server:
        dsn = server.url(create_database(server))
        schema.install(dsn)
        print(dsn, flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
