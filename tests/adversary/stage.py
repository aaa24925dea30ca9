"""What attackers meet, and how their attempts are judged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import psycopg
from psycopg import sql

from harness.server import Server

REFUSED = ("42501", "42703", "42883", "42P01", "3F000", "23514", "0A000", "42602", "22023")
"""Not allowed, or out of sight."""


class Stage:
    def __init__(self, server: Server, database: str, db: psycopg.Connection[Any], suffix: str) -> None:
        self.db = db
        self.roles: list[str] = []
        self._server, self._database, self._suffix = server, database, suffix
        self._open: list[psycopg.Connection[Any]] = []

    def prepare(self) -> None:
        """Streams main and other, queues mine and yours, an event that is leased, and one with a delay."""
        for statement in (
            "select pgmb.create_stream('other')",
            "select pgmb.create_queue('mine'), pgmb.create_queue('yours')",
            "select pgmb.publish('t', '{\"secret\": 1}')",
            "select pgmb.publish('t', '{\"secret\": 2}', stream => 'other')",
            "select pgmb.publish('later', '3', delay => '1 hour')",
            "create table held as select lease from pgmb.receive('yours', lease_for => '1 hour')",
            "select pgmb.create_endpoint('hook', 'https://example.org/x?token=secret', '{nothing}')",
            "select pgmb.create_api_key('k', sha256('x'), '{operate}')",
        ):
            self.db.execute(statement)

    @property
    def lease(self) -> str:
        row = self.db.execute("select lease::text from held limit 1").fetchone()
        assert row is not None
        return str(row[0])

    def role(self, name: str, *grants: str) -> psycopg.Connection[Any]:
        """A connection as a role of its own with these grants; {} stands for its name."""
        full = f"{name}_{self._suffix}"
        self._server.admin().execute(sql.SQL("create role {} login").format(sql.Identifier(full)))
        self.roles.append(full)
        superuser = psycopg.connect(self._server.dsn(self._database), autocommit=True)
        with superuser:
            for grant in grants:
                superuser.execute(grant.format(full).encode())
        found = psycopg.connect(self._server.dsn(self._database, full), autocommit=True)
        found.execute("set statement_timeout = '20s'")
        self._open.append(found)
        return found

    def leave(self) -> None:
        for one in self._open:
            one.close()

    def standing(self) -> Any:
        """What no attempt may have changed: others' events, keys, rights, locks, and who owns what."""
        return self.db.execute(
            "select (select count(*) from pgmb.log_main), (select count(*) from pgmb.log_other),"
            " (select count(*) from pgmb.delayed), (select array_agg(name order by name) from pgmb.queue),"
            " (select array_agg(name order by name) from pgmb.stream), (select count(*) from pgmb.api_key),"
            " (select array_agg(url) from pgmb.endpoint),"
            " (select count(*) from pg_roles where rolsuper or rolcreaterole or rolbypassrls),"
            " (select count(*) from pg_proc where proowner <> (select nspowner from pg_namespace"
            "   where nspname = 'pgmb') and pronamespace = 'pgmb'::regnamespace),"
            " (select count(*) from pg_locks l where l.pid <> pg_backend_pid() and l.granted"
            "   and l.mode = 'AccessExclusiveLock' and l.database = (select oid from pg_database"
            "   where datname = current_database()) and l.relation is not null)"
        ).fetchone()


def got_through(attacker: psycopg.Connection[Any], attempts: Iterable[str], **given: str) -> list[str]:
    """The attempts that were not refused."""
    through: list[str] = []
    for attempt in attempts:
        statement = attempt
        for name, value in given.items():
            statement = statement.replace(f"<{name}>", value)
        try:
            with attacker.transaction():
                found = attacker.execute(statement.encode())
                rows = found.fetchall() if found.description else []
        except psycopg.Error as error:
            if error.sqlstate is None or not (error.sqlstate in REFUSED or error.sqlstate.startswith("MB")):
                through.append(f"{statement}: {error.sqlstate} {error}")
            continue
        if any(value not in (None, False) for row in rows for value in row):
            through.append(f"{statement}: {rows[:3]}")
        elif not found.description:
            through.append(statement)
    return through
