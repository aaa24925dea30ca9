"""Databases inside a throwaway server."""

from __future__ import annotations

import collections
import contextlib
import graphlib
import itertools
import os
import time
from collections.abc import Generator
from typing import Any

import psycopg
from psycopg import sql
from psycopg.pq import ExecStatus, TransactionStatus

from harness.server import Server

_numbers = itertools.count(1)

# After this many users a database is dropped, because deleted rows pile up in its tables.
_USERS = 50
# It keeps this many sessions for the next user.
_SESSIONS = 4
# Whatever DDL a test runs, rights included, one of these has another row afterwards.
_CATALOGS = (
    "pg_attribute", "pg_class", "pg_constraint", "pg_default_acl", "pg_event_trigger", "pg_extension",
    "pg_largeobject_metadata", "pg_namespace", "pg_policy", "pg_proc", "pg_publication", "pg_rewrite",
    "pg_sequence", "pg_trigger", "pg_type",
)  # fmt: skip
# `discard all` without `discard plans`: to plan the statements of pgmb's functions again is expensive.
_FORGET = b"""
close all; set session authorization default; reset all; deallocate all; unlisten *;
discard sequences; discard temp; select pg_advisory_unlock_all()
"""

# Drops the schemas, relations and functions that are newer than the object with this oid.
_DROP = """
do $$
declare
  made record;
begin
  for made in
    select n.nspname as name from pg_namespace n where n.oid > {newest} and n.nspname !~ '^pg_'
  loop
    execute format('drop schema %I cascade', made.name);
  end loop;
  for made in
    select c.oid, case c.relkind when 'v' then 'view' when 'S' then 'sequence' else 'table' end as kind
    from pg_class c where c.oid > {newest} and c.relkind in ('r', 'p', 'v', 'S')
    and not exists (select from pg_depend d where d.classid = 'pg_class'::regclass and d.objid = c.oid
      and d.refclassid = 'pg_class'::regclass and d.refobjid <> c.oid and d.deptype in ('a', 'i'))
  loop
    if exists (select from pg_class c where c.oid = made.oid) then
      execute format('drop %s %s cascade', made.kind, made.oid::regclass);
    end if;
  end loop;
  for made in select p.oid from pg_proc p where p.oid > {newest} loop
    if exists (select from pg_proc p where p.oid = made.oid) then
      execute format('drop routine %s cascade', made.oid::regprocedure);
    end if;
  end loop;
end $$
"""


def install(dsn: str) -> None:
    """Install pgmb. With PGMB_LOOP_ONLY set, receives take no shorter ways than the loop."""
    from pgmb import schema

    schema.install(dsn)
    if not os.environ.get("PGMB_LOOP_ONLY"):
        return
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "create or replace function pgmb_internal.takes_short_ways() returns boolean"
            " language sql immutable parallel safe as 'select false'"
        )


def create_database(server: Server, template: str | None = None) -> str:
    """A new database with a name of its own, copied from `template` if one is given.

    Nobody may be connected to the template meanwhile.
    """
    name = f"pgmb_{os.getpid()}_{next(_numbers)}"
    server.admin().execute(
        sql.SQL("create database {} template {} strategy {}").format(
            sql.Identifier(name),
            sql.Identifier(template or "template0"),
            # Two checkpoints, which cost little without fsync, are cheaper than logging every page.
            sql.Identifier("file_copy"),
        )
    )
    return name


def drop_database(server: Server, name: str) -> None:
    """Drops a database and whatever sessions are left in it."""
    server.admin().execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))


class Database:
    """A copy of a template, with sessions in it that outlive their users."""

    def __init__(self, server: Server, template: str) -> None:
        self.server = server
        self.name = create_database(server, template)
        self.users = 0
        self.since = ""
        self._idle: list[psycopg.Connection[Any]] = []
        self._lent: list[psycopg.Connection[Any]] = []
        self._keeper: psycopg.Connection[Any] | None = None
        # psycopg warns of connections that are garbage before their session is closed.
        self._former: list[psycopg.Connection[Any]] = []

    @property
    def dsn(self) -> str:
        return self.server.dsn(self.name)

    def connect(self) -> psycopg.Connection[Any]:
        """An autocommit connection, over an earlier user's session if there is one. It need not be closed."""
        connection: psycopg.Connection[Any]
        if self._idle:
            former = self._idle.pop()
            self._former.append(former)
            connection = psycopg.Connection(former.pgconn)
            connection.autocommit = True
        else:
            connection = psycopg.connect(self.dsn, autocommit=True)
        self._lent.append(connection)
        return connection

    @property
    def keeper(self) -> psycopg.Connection[Any]:
        """A session for the harness alone. It is never reset, so its prepared statements stay."""
        if self._keeper is None:
            self._keeper = psycopg.connect(
                self.dsn, autocommit=True, options="-c plan_cache_mode=force_generic_plan"
            )
        return self._keeper

    def take_back(self) -> None:
        """Ends what the users of sessions began, and forgets what they set; closes those still at work."""
        for connection in self._lent:
            session = connection.pgconn
            if connection.closed:
                continue
            if session.transaction_status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
                session.exec_(b"rollback")
            if (
                len(self._idle) < _SESSIONS
                and session.transaction_status == TransactionStatus.IDLE
                and session.exec_(_FORGET).status == ExecStatus.TUPLES_OK
            ):
                self._idle.append(connection)
            else:
                connection.close()
        self._lent.clear()

    def alone(self) -> bool:
        """Whether nobody else has a session here. Those of clients that have gone are waited for."""
        ours = [connection.info.backend_pid for connection in (self.keeper, *self._idle)]
        question = (
            "select count(*) from pg_stat_activity where datname = %s and backend_type = 'client backend'"
            " and not pid = any (%s)"
        )
        deadline = time.monotonic() + 1
        while self.server.admin().execute(question, [self.name, ours]).fetchone() != (0,):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    def drop(self) -> None:
        kept = [self._keeper] if self._keeper else []
        for connection in (*self._lent, *self._idle, *self._former, *kept):
            connection.close()
        drop_database(self.server, self.name)


class Databases:
    """Copies of a template, each lent to one user at a time.

    The rows that a user leaves in tables of pgmb are replaced by the template's; new schemas, tables, views
    and functions are dropped. A database in which anything else has changed is dropped itself.
    """

    def __init__(self, server: Server, template: str) -> None:
        self._server, self._template = server, template
        self._free: list[Database] = []
        self._question = ""
        self._counts: dict[str, int] = {}
        self._rows: dict[str, list[str]] = {}
        self._referring: dict[str, set[str]] = {}
        self._sequences = ""
        self._drop = b""
        self._balance: collections.Counter[str] = collections.Counter()

    @contextlib.contextmanager
    def lend(self, purpose: str) -> Generator[Database]:
        """A database for a user with this purpose. If most such users change more than rows, a new one."""
        if self._balance[purpose] < -2:
            database = Database(self._server, self._template)
            try:
                yield database
            finally:
                database.drop()
            return
        database = self._free.pop() if self._free else self._create()
        try:
            yield database
            restored = self._restored(database)
        except BaseException:
            database.drop()
            raise
        if restored:
            self._balance[purpose] += 1
            self._free.append(database)
        else:
            self._balance[purpose] -= 1
            database.drop()

    def close(self) -> None:
        while self._free:
            self._free.pop().drop()

    def _create(self) -> Database:
        database = Database(self._server, self._template)
        if not self._question:
            self._look(database.keeper)
        database.since = _transaction_id(database.keeper)
        return database

    def _look(self, connection: psycopg.Connection[Any]) -> None:
        """Learns what the template has."""
        # One counter numbers the objects of all databases of a server.
        ((newest,),) = connection.execute(
            "select greatest((select max(oid) from pg_class), (select max(oid) from pg_proc),"
            " (select max(oid) from pg_namespace))::bigint"
        ).fetchall()
        self._drop = _DROP.format(newest=newest).encode()
        relations = connection.execute(
            "select oid::regclass::text, relkind = 'S' from pg_class where relkind in ('r', 'S')"
            " and relnamespace::regnamespace::text in ('pgmb', 'pgmb_internal')"
        ).fetchall()
        references = connection.execute(
            "select confrelid::regclass::text, conrelid::regclass::text from pg_constraint"
            " where contype = 'f' and confrelid <> conrelid"
        ).fetchall()
        order: dict[str, set[str]] = {name: set() for name, is_sequence in relations if not is_sequence}
        for referred, referring in references:
            order[referred].add(referring)
        self._referring = order
        tables = list(graphlib.TopologicalSorter(order).static_order())
        touched = "coalesce(bool_or(age(xmin) < age(%(since)s::xid)), false)"
        name = "current_database()"
        this = f"(select oid from pg_database where datname = {name})"
        self._question = " union all ".join(
            [
                *(f"select '{table}', count(*), {touched} from {table}" for table in (*_CATALOGS, *tables)),
                f"select 'database', count(*), {touched} from pg_database where datname = {name}",
                f"select 'settings', count(*), false from pg_db_role_setting where setdatabase = {this}",
                f"select 'prepared', count(*), false from pg_prepared_xacts where database = {name}",
            ]
        )
        self._counts = {name: count for name, count, _ in self._ask(connection, _transaction_id(connection))}
        for name in tables:
            rows = connection.execute(f"select t::text from {name} t".encode())
            values = [sql.Literal(row).as_string(connection) for (row,) in rows]
            self._rows[name] = [
                f"insert into {name} overriding system value select ({value}::{name}).*" for value in values
            ]
        places = [
            (name, *connection.execute(f"select last_value, is_called from {name}".encode()).fetchall()[0])
            for name, is_sequence in relations
            if is_sequence
        ]
        self._sequences = "select " + ", ".join(
            f"setval('{name}', {last}, {called})" for name, last, called in places
        )

    def _ask(self, connection: psycopg.Connection[Any], since: str) -> list[tuple[str, int, bool]]:
        """Of every table its rows, and whether one of them was written after transaction `since`."""
        # Prepared: planning takes longer than the query itself.
        return connection.execute(self._question.encode(), {"since": since}, prepare=True).fetchall()

    def _changed(self, connection: psycopg.Connection[Any], since: str) -> set[str]:
        """The tables that are not as they were when transaction `since` ended."""
        found = self._ask(connection, since)
        return {name for name, count, touched in found if touched or count != self._counts[name]}

    def _restored(self, database: Database) -> bool:
        """Whether a database is as the template again."""
        database.users += 1
        if database.users >= _USERS:
            return False
        database.take_back()
        if not database.alone():
            return False
        connection = database.keeper
        try:
            changed = self._changed(connection, database.since)
            if not changed <= self._rows.keys():
                connection.execute(self._drop)
                changed = self._changed(connection, database.since)
        except psycopg.Error:  # a test may terminate all sessions, or make what cannot simply be dropped
            return False
        if not changed <= self._rows.keys():
            return False
        # A table that refers to one of them may lose its rows with theirs: on delete cascade.
        emptied = set(changed)
        while found := {one for name in emptied for one in self._referring[name]} - emptied:
            emptied |= found
        # Tables that refer to others come first; they are filled again last.
        tables = [name for name in self._rows if name in emptied]
        statements = [self._sequences, *(f"delete from {name}" for name in tables)]
        for name in reversed(tables):
            statements += self._rows[name]
        with connection.transaction():
            connection.execute("; ".join(statements).encode(), prepare=False)
            database.since = _transaction_id(connection)
        return True


def _transaction_id(connection: psycopg.Connection[Any]) -> str:
    ((found,),) = connection.execute("select pg_current_xact_id()::xid::text").fetchall()
    return str(found)
