"""The database that attackers meet, and how their attempts are judged."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg import sql

from harness.databases import create_database, drop_database
from harness.server import Server
from harness.states import queue_names
from pgmb import schema

SUPERUSER, PLAIN_OWNER, WITHOUT_CONDITIONS = "superuser", "plain owner", "plain owner without conditions"
INSTALLATIONS = (SUPERUSER, PLAIN_OWNER)
"""Who installed pgmb. The last of the three was not granted the roles that SQL conditions run as."""

REFUSED = ("42501", "23514", "0A000", "22023", "42602")
"""Not allowed, out of bounds, or not a name. "Does not exist" is no refusal: the attempt may be misspelt."""

PREPARED = (
    "select pgmb.create_stream('other')",
    "select pgmb.create_queue('mine'), pgmb.create_queue('yours')",
    "select pgmb.publish('t', '{\"secret\": 1}')",
    "select pgmb.publish('t', '{\"secret\": 2}', stream => 'other')",
    "select pgmb.publish('later', '3', delay => '1 hour')",
    "create table held as select lease from pgmb.receive('yours', lease_for => '1 hour')",
    "select pgmb.create_endpoint('hook', 'https://example.org/x?token=secret', '{nothing}')",
    "select pgmb.create_api_key('k', sha256('x'), '{operate}')",
)

_numbers = itertools.count(1)


def shortened(attempt: object) -> str:
    """The id of an attempt's test."""
    return " ".join(str(attempt).split())[:80]


class Target:
    """An installation with streams main and other, queues mine and yours, a leased and a delayed event."""

    def __init__(self, server: Server, database: str, db: psycopg.Connection[Any]) -> None:
        self.db = db
        self.roles: list[str] = []
        self.database = database
        self._server = server
        self._open: list[psycopg.Connection[Any]] = []
        ((self.lease,),) = db.execute("select lease::text from held limit 1").fetchall()

    def role(self, name: str, *grants: str) -> psycopg.Connection[Any]:
        """A connection as a role of its own with these grants; {} stands for its name."""
        full = f"{name}_{os.getpid()}_{next(_numbers)}"
        self._server.admin().execute(sql.SQL("create role {} login").format(sql.Identifier(full)))
        self.roles.append(full)
        with self.superuser() as superuser:
            for grant in grants:
                superuser.execute(grant.replace("{}", full).encode())
        found = psycopg.connect(self._server.dsn(self.database, full), autocommit=True)
        found.execute("set statement_timeout = '20s'")
        self._open.append(found)
        return found

    def superuser(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self._server.dsn(self.database), autocommit=True)

    def leave(self) -> None:
        for one in self._open:
            one.close()

    def refuses(self, attacker: psycopg.Connection[Any], attempt: str) -> None:
        """Fails unless the attempt raises a refusal, or returns nothing; <lease> is another consumer's."""
        try:
            with attacker.transaction():
                found = attacker.execute(attempt.replace("<lease>", self.lease).encode())
                rows = found.fetchall() if found.description else []
        except psycopg.Error as error:
            if error.sqlstate is None or not (error.sqlstate in REFUSED or error.sqlstate.startswith("MB")):
                pytest.fail(f"not refused: {error.sqlstate} {error}")
            return
        if any(value not in (None, False) for row in rows for value in row):
            pytest.fail(f"got through: {rows[:3]}")
        if not found.description:
            pytest.fail("got through")

    def understands(self, attempt: str) -> None:
        """Fails if the attempt names something that does not exist. An attacker who may not use the schema
        would be refused all the same."""
        if attempt.startswith(("select", "insert", "update", "delete")):
            with self.db.transaction(force_rollback=True):
                self.db.execute(f"prepare attempt as {attempt.replace('<lease>', self.lease)}".encode())
                self.db.execute("deallocate attempt")

    def standing(self) -> Any:
        """What no attempt may change: others' events, keys, rights, locks, and the owners of functions."""
        return queue_names(self.db), self.db.execute(
            "select (select count(*) from pgmb.log_main), (select count(*) from pgmb.log_other),"
            " (select count(*) from pgmb.delayed),"
            " (select array_agg(name order by name) from pgmb.stream), (select count(*) from pgmb.api_key),"
            " (select array_agg(url) from pgmb.endpoint),"
            " (select count(*) from pg_roles where rolname = any (%s)"
            "   and (rolsuper or rolcreaterole or rolbypassrls)),"
            " (select count(*) from pg_proc where proowner <> (select nspowner from pg_namespace"
            "   where nspname = 'pgmb') and pronamespace::regnamespace::text in ('pgmb', 'pgmb_internal')),"
            " (select count(*) from pg_locks l where l.pid <> pg_backend_pid() and l.granted"
            "   and l.mode = 'AccessExclusiveLock' and l.database = (select oid from pg_database"
            "   where datname = current_database()) and l.relation is not null)",
            [self.roles],
        ).fetchone()


class Installations:
    """pgmb as each of those who may install it has it, with what attackers are after."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._made: dict[str, tuple[str, str | None]] = {}

    @contextmanager
    def copy(self, kind: str) -> Iterator[Target]:
        """A copy in a database of its own, which is dropped afterwards."""
        original, owner = self._made.get(kind) or self._install(kind)
        database = create_database(self._server, original)
        if owner is not None:
            self._give(database, owner)
        try:
            with psycopg.connect(self._server.dsn(database, owner), autocommit=True) as db:
                target = Target(self._server, database, db)
                try:
                    yield target
                finally:
                    target.leave()
        finally:
            drop_database(self._server, database)
        for role in target.roles:
            self._server.admin().execute(sql.SQL("drop role {}").format(sql.Identifier(role)))

    def drop(self) -> None:
        for database, owner in self._made.values():
            drop_database(self._server, database)
            if owner is not None:
                self._server.admin().execute(sql.SQL("drop role {}").format(sql.Identifier(owner)))

    def _install(self, kind: str) -> tuple[str, str | None]:
        admin = self._server.admin()
        database = create_database(self._server)
        owner = None
        if kind != SUPERUSER:
            owner = f"plain_{os.getpid()}_{next(_numbers)}"
            role = sql.Identifier(owner)
            admin.execute(sql.SQL("create role {} login").format(role))
            self._give(database, owner)
            if kind == PLAIN_OWNER:
                admin.execute(sql.SQL("grant pgmb_matcher, pgmb_parser to {}").format(role))
        self._made[kind] = database, owner
        with psycopg.connect(self._server.dsn(database, owner), autocommit=True) as db:
            schema.install(db)
            for statement in PREPARED:
                db.execute(statement.encode())
        return database, owner

    def _give(self, database: str, owner: str) -> None:
        self._server.admin().execute(
            sql.SQL("alter database {} owner to {}").format(sql.Identifier(database), sql.Identifier(owner))
        )
