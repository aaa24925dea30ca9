"""Roles for tests of rights."""

from __future__ import annotations

import itertools
import os
from typing import Any

import psycopg
from psycopg import sql

from harness.server import Server
from tests.conftest import Connect

_numbers = itertools.count(1)


class Cast:
    """Roles of this test's own, and connections as them: roles belong to the server, which tests share."""

    def __init__(self, server: Server, database: str, connect: Connect) -> None:
        self._server, self._database, self._connect = server, database, connect
        self._suffix = f"cast_{os.getpid()}_{next(_numbers)}"
        self._made: list[str] = []

    def role(self, name: str, *member_of: str) -> str:
        full = f"{name}_{self._suffix}"
        self._server.admin().execute(sql.SQL("create role {} login").format(sql.Identifier(full)))
        self._made.append(full)
        for group in member_of:
            self._server.admin().execute(
                sql.SQL("grant {} to {}").format(sql.Identifier(group), sql.Identifier(full))
            )
        return full

    def acting(self, role: str) -> psycopg.Connection[Any]:
        return self._connect(self._server.dsn(self._database, role))

    def leave(self, db: psycopg.Connection[Any]) -> None:
        for role in self._made:
            db.execute(sql.SQL("drop owned by {} cascade").format(sql.Identifier(role)))
            self._server.admin().execute(sql.SQL("drop role {}").format(sql.Identifier(role)))
