"""One door to the harness's servers."""

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
