"""pgmb behind PGMQ's functions: the client of the contender `pgmq`, to the letter, on our log."""

from __future__ import annotations

from typing import Any

import psycopg

from bench.contenders.pgmq import Pgmq, PgmqArchive
from pgmb import schema


class Compat(Pgmq):
    name = "compat"

    def install(self, connection: psycopg.Connection[Any]) -> None:
        schema.install(connection, compat=["pgmq"])
        connection.execute("select pgmq.create('bench')")


class CompatArchive(PgmqArchive, Compat):
    name = "compat, archive"
