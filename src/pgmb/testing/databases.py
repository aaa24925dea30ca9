"""Throwaway databases on a server for tests."""

from __future__ import annotations

import os
import secrets

from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgmb import schema
from pgmb._core.connecting import connect


class Databases:
    """Makes databases with pgmb installed: once, and then copies of that one.

    The role needs the right to create databases. What the process does not live to drop stays behind under
    names that begin with pgmb_test.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._run = f"pgmb_test_{os.getpid()}_{secrets.token_hex(3)}"
        self._made = 0
        self._template: str | None = None

    def create(self) -> str:
        """A fresh database; its connection string."""
        if self._template is None:
            # Only when it stands complete is it one to copy.
            name = self._create(None)
            try:
                schema.install(self._dsn_of(name))
            except BaseException:
                self._drop(name)
                raise
            self._template = name
        return self._dsn_of(self._create(self._template))

    def drop(self, dsn: str) -> None:
        """Drop such a database, and end the connections to it."""
        name = conninfo_to_dict(dsn)["dbname"]
        self._drop(str(name))

    def close(self) -> None:
        """Drop the one that the others were copied from."""
        template, self._template = self._template, None
        if template is not None:
            self._drop(template)

    def _create(self, template: str | None) -> str:
        self._made += 1
        name = f"{self._run}_{self._made}"
        statement = sql.SQL("create database {}").format(sql.Identifier(name))
        if template is not None:
            statement += sql.SQL(" template {}").format(sql.Identifier(template))
        self._execute(statement)
        return name

    def _drop(self, name: str) -> None:
        self._execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))

    def _dsn_of(self, name: str) -> str:
        return make_conninfo(self._dsn, dbname=name)

    def _execute(self, statement: sql.Composed) -> None:
        with connect(self._dsn) as connection:
            connection.execute(statement)
