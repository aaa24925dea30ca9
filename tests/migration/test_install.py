"""Installing: at once from many places, again, as a plain owner, and away again."""

from __future__ import annotations

import itertools
import os
import re
import threading
from collections.abc import Callable, Iterator
from importlib.resources import as_file, files
from typing import Any

import psycopg
import pytest
from psycopg import sql

from harness.databases import create_database, drop_database
from harness.server import Server
from pgmb import schema
from pgmb.errors import Conflict, PgmbError, SchemaVersionError
from tests.migration.catalog import catalog

_numbers = itertools.count(1)


def at_once(work: Callable[[str], object], targets: list[str]) -> list[BaseException]:
    """Runs `work` for all targets in threads that start together; the errors."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(targets))

    def run(target: str) -> None:
        start.wait()
        try:
            work(target)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    return errors


@pytest.mark.slow
def test_installs_into_one_empty_database_at_once_all_succeed(empty_dsn: str, dsn: str) -> None:
    assert at_once(schema.install, [empty_dsn] * 8) == []
    with psycopg.connect(empty_dsn) as many, psycopg.connect(dsn) as once:
        assert catalog(many) == catalog(once)
        many.execute("select pgmb.publish('t', '1')")


@pytest.mark.slow
def test_installs_into_three_databases_at_once_all_succeed(fresh_server: Any) -> None:
    """On a server of its own, where the roles, which databases share, do not exist yet."""
    server: Server = fresh_server()
    names = [create_database(server) for _ in range(3)]
    assert at_once(schema.install, [server.dsn(name) for name in names for _ in range(2)]) == []
    catalogs = []
    for name in names:
        with server.connect(name) as connection:
            catalogs.append(catalog(connection))
    assert all(each == catalogs[0] for each in catalogs)
    roles = server.admin().execute("select count(*) from pg_roles where rolname ~ '^pgmb_'").fetchone()
    assert roles == (6,)


def test_installing_again_changes_nothing(empty_dsn: str) -> None:
    schema.install(empty_dsn)
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute("select pgmb.create_queue('q')")
        connection.execute("select pgmb.publish('t', '1')")
        before = catalog(connection)
        stamp = connection.execute("select i::text from pgmb.installation i").fetchone()
        for _ in range(2):
            schema.install(connection)
        assert catalog(connection) == before
        assert connection.execute("select i::text from pgmb.installation i").fetchone() == stamp
        assert connection.execute("select payload from pgmb.receive('q')").fetchall() == [(1,)]
    schema.verify(empty_dsn)


def test_grants_given_to_roles_survive_installing_again(empty_dsn: str, server: Server) -> None:
    role = f"survivor_{os.getpid()}_{next(_numbers)}"
    schema.install(empty_dsn)
    server.admin().execute(sql.SQL("create role {}").format(sql.Identifier(role)))
    try:
        with psycopg.connect(empty_dsn, autocommit=True) as connection:
            connection.execute("select pgmb.create_queue('q')")
            connection.execute("select pgmb.grant_publish('main', %s)", [role])
            connection.execute("select pgmb.grant_consume('q', %s)", [role])
            before = catalog(connection)
            schema.install(connection)
            assert catalog(connection) == before
            connection.execute(sql.SQL("set role {}").format(sql.Identifier(role)))
            connection.execute("select pgmb.publish('t', '1')")
            assert len(connection.execute("select * from pgmb.receive('q')").fetchall()) == 1
            connection.execute("reset role")
            connection.execute(sql.SQL("drop owned by {}").format(sql.Identifier(role)))
    finally:
        server.admin().execute(sql.SQL("drop role {}").format(sql.Identifier(role)))


def test_uninstalling_leaves_nothing(empty_dsn: str) -> None:
    everything = (
        "select 'class', relname::text from pg_class where oid >= 16384 and"
        " relnamespace::regnamespace::text !~ '^pg_'"
        " union all select 'proc', proname from pg_proc where oid >= 16384"
        " union all select 'type', typname from pg_type where oid >= 16384"
        " and typnamespace::regnamespace::text !~ '^pg_'"
        " union all select 'schema', nspname from pg_namespace where oid >= 16384 and nspname !~ '^pg_'"
        " union all select 'trigger', tgname from pg_trigger union all select 'policy', polname"
        " from pg_policy"
        " union all select 'acl', objoid::text from pg_default_acl, lateral (select oid as objoid) o"
        " union all select 'init', objoid::text from pg_init_privs where objoid >= 16384"
        " union all select 'comment', objoid::text from pg_description where objoid >= 16384"
        " union all select 'shared', objid::text from pg_shdepend where dbid ="
        "   (select oid from pg_database where datname = current_database())"
        " order by 1, 2"
    )
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        before = connection.execute(everything).fetchall()
        schema.install(connection)
        connection.execute("select pgmb.create_stream('other')")
        connection.execute("select pgmb.create_queue('q', stream => 'other')")
        connection.execute("select pgmb.publish('t', '1', stream => 'other')")
        connection.execute("select pgmb.rotate('other')")
        connection.execute("select pgmb.maintain()")
        schema.uninstall(connection)
        assert connection.execute(everything).fetchall() == before
        assert schema.installed_version(connection) is None
        schema.uninstall(connection)
        schema.install(connection)


def test_a_newer_schema_is_refused(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("update pgmb.installation set version = %s", [schema.VERSION + 1])
        before = catalog(connection)
        with pytest.raises((psycopg.Error, SchemaVersionError)) as caught:
            schema.install(connection)
        error: BaseException | None = caught.value
        while error is not None and not isinstance(error, psycopg.Error):
            error = error.__cause__
        assert isinstance(error, psycopg.Error)
        assert error.sqlstate == "MB030"
        connection.execute("rollback")
        assert catalog(connection) == before
        assert schema.installed_version(connection) == schema.VERSION + 1


def refusal(connection: psycopg.Connection[Any]) -> psycopg.Error:
    """What the server said when an install was refused."""
    with pytest.raises((psycopg.Error, PgmbError)) as caught:
        schema.install(connection)
    error: BaseException | None = caught.value
    while error is not None and not isinstance(error, psycopg.Error):
        error = error.__cause__
    assert isinstance(error, psycopg.Error)
    connection.execute("rollback")
    return error


@pytest.mark.parametrize(
    "change",
    [
        "alter table pgmb.installation drop column tables",
        "update pgmb.installation set tables = 'others'",
    ],
)
def test_the_tables_of_another_development_version_are_refused(dsn: str, change: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(change.encode())
        before = catalog(connection)
        error = refusal(connection)
        assert error.sqlstate == "MB030"
        assert "pgmb uninstall" in (error.diag.message_hint or "")
        assert catalog(connection) == before
        schema.uninstall(connection)
        schema.install(connection)


def test_a_schema_of_that_name_that_is_another_s_is_refused(empty_dsn: str) -> None:
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute("create schema pgmb; create table pgmb.messages (id bigint)")
        error = refusal(connection)
        assert error.sqlstate == "MB006"
        assert "alter schema pgmb rename to old_pgmb" in (error.diag.message_hint or "")
        assert connection.execute("select to_regnamespace('pgmb_internal')").fetchone() == (None,)
        connection.execute("alter schema pgmb rename to old_pgmb")
        schema.install(connection)
        assert connection.execute("select count(*) from old_pgmb.messages").fetchone() == (0,)


def test_comments_in_tables_need_no_new_install(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = ["create table a (\n  b int -- what it is\n);"]
    others = ["-- A table.\ncreate table a (  b int\n);", "create table a ( b bigint );"]
    same, changed = ([text] for text in others)
    assert schema._digest_of(tables) == schema._digest_of(same) != schema._digest_of(changed)


def test_a_database_without_the_schema_is_told_apart(empty_dsn: str) -> None:
    assert schema.installed_version(empty_dsn) is None
    with pytest.raises(SchemaVersionError):
        schema.verify(empty_dsn)


@pytest.fixture
def owned(server: Server) -> Iterator[Callable[[bool], str]]:
    """`owned(createrole)` makes a database that belongs to a plain role; the connection string as that
    role."""
    made: list[tuple[str, str]] = []

    def make(createrole: bool) -> str:
        role = f"owner_{os.getpid()}_{next(_numbers)}"
        option = sql.SQL("createrole" if createrole else "nocreaterole")
        server.admin().execute(sql.SQL("create role {} login {}").format(sql.Identifier(role), option))
        name = create_database(server)
        server.admin().execute(
            sql.SQL("alter database {} owner to {}").format(sql.Identifier(name), sql.Identifier(role))
        )
        made.append((role, name))
        return server.dsn(name, role)

    yield make
    for role, name in made:
        drop_database(server, name)
        server.admin().execute(sql.SQL("drop role {}").format(sql.Identifier(role)))


def works(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("select pgmb.create_stream('s', keep_for => '0 s', rotate_every => '0 s')")
        connection.execute("select pgmb.create_queue('q', stream => 's')")
        connection.execute("select pgmb.publish('t', '1', stream => 's')")
        connection.execute("select pgmb.publish('t', '2', stream => 's', delay => '1 microsecond')")
        for _ in range(3):
            connection.execute("select pgmb.maintain()")
            connection.execute("select pgmb.tick('s')")
        rows = connection.execute("select lease, payload from pgmb.receive('q')").fetchall()
        assert [payload for _, payload in rows] == [1, 2]
        connection.execute("select pgmb.ack(%s)", [rows[0][0]])
        schema.install(connection)
        schema.uninstall(connection)


@pytest.mark.parametrize("createrole", [True, False])
def test_a_plain_owner_of_the_database_can_install_and_use_it(
    owned: Callable[[bool], str], createrole: bool
) -> None:
    dsn = owned(createrole)
    schema.install(dsn)
    works(dsn)


@pytest.mark.parametrize("createrole", [True, False])
def test_a_plain_owner_can_install_where_the_roles_do_not_exist(fresh_server: Any, createrole: bool) -> None:
    server: Server = fresh_server()
    option = "createrole" if createrole else "nocreaterole"
    server.admin().execute(f"create role owner login {option}")
    server.admin().execute("create database mine owner owner")
    dsn = server.dsn("mine", "owner")
    schema.install(dsn)
    roles = server.admin().execute("select count(*) from pg_roles where rolname ~ '^pgmb_'").fetchone()
    assert roles == ((6,) if createrole else (0,))
    works(dsn)


def test_the_emitted_script_runs_as_one_transaction(empty_dsn: str) -> None:
    """psql -f and Python run the same text: it begins and commits itself and depends on no setting."""
    script = schema.emit()
    assert re.search(r"^begin;$", script, re.MULTILINE)
    assert script.rstrip().endswith("commit;")
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute("create schema aside")
        connection.execute("set search_path = aside")
        connection.execute("set standard_conforming_strings = on; set check_function_bodies = on")
        connection.execute(script)
        assert connection.execute("show search_path").fetchone() == ("aside",)
        rows = connection.execute(
            "select relname from pg_class where relnamespace = 'aside'::regnamespace"
        ).fetchall()
        assert rows == []


def test_a_failure_half_way_leaves_nothing(empty_dsn: str) -> None:
    script = schema.emit().rstrip().removesuffix("commit;") + "select 1 / 0;\ncommit;"
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        with pytest.raises(psycopg.errors.DivisionByZero):
            connection.execute(script)
        connection.execute("rollback")
        assert connection.execute("select to_regnamespace('pgmb')").fetchone() == (None,)
        assert connection.execute("select to_regnamespace('pgmb_internal')").fetchone() == (None,)


def test_a_schema_of_another_role_is_not_filled_with_functions_of_the_owner(empty_dsn: str) -> None:
    """Its owner could replace functions that run with the rights of the owner of pgmb."""
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute("create role squatter")
        connection.execute("create schema pgmb_internal authorization squatter")
        with pytest.raises(Conflict, match="belongs to squatter"):
            schema.install(connection)
        connection.execute("drop schema pgmb_internal; drop role squatter")
        schema.install(connection)


def test_every_function_compiles(dsn: str) -> None:
    """The script turns body checks off because functions refer to later ones; here they are checked."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        rows = connection.execute(
            "select oid::regprocedure::text, pg_get_functiondef(oid) from pg_proc"
            " where pronamespace = any ('{pgmb,pgmb_internal}'::regnamespace[])"
        ).fetchall()
        connection.execute("set check_function_bodies = on")
        for _, definition in rows:
            connection.execute(definition)


def test_the_manifest_lists_every_file_once_with_a_reason() -> None:
    """A file that it does not list is not installed."""
    with as_file(files("pgmb") / "sql") as root:
        found = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
        lines = (root / "manifest.txt").read_text().splitlines()
    listed = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    assert all(len(entry) == 2 for entry in listed), "each line is a file and what it holds"
    expected = sorted(["manifest.txt", *(path for path, _ in listed)])
    assert [path for path in found if not path.startswith("migrations/")] == expected
    assert schema.manifest() == [path for path, _ in listed]


def test_file_names_follow_the_policy() -> None:
    """ls sql/ is the architecture: a folder for each subject, NNNN_what.sql for each version from 2."""
    paths = schema.manifest()
    assert len(paths) > 50
    word = r"[a-z]+(?:_[a-z]+)*"
    assert [path for path in paths if not re.fullmatch(rf"(compat/)?{word}/{word}\.sql", path)] == []
    root = files("pgmb") / "sql"
    found = (root / "migrations").iterdir() if (root / "migrations").is_dir() else []
    migrations = sorted(found, key=lambda entry: entry.name)
    names = [entry.name for entry in migrations]
    assert all(re.fullmatch(r"\d{4}_[a-z0-9]+(_[a-z0-9]+)*\.sql", name) for name in names), names
    assert [int(name[:4]) for name in names] == list(range(2, schema.VERSION + 1))
    for entry in migrations:
        assert not re.search(r"create\s+(or\s+replace\s+)?function", entry.read_text(), re.IGNORECASE), (
            f"{entry.name} restates a function; all functions are applied after the migrations"
        )


def test_no_function_is_defined_twice() -> None:
    """A later file must not redefine what an earlier one said."""
    found: list[str] = []
    for path in schema.manifest():
        text = (files("pgmb") / "sql").joinpath(*path.split("/")).read_text()
        found += [
            " ".join(match.split())
            for match in re.findall(
                r"^create or replace function (pgmb(?:_internal)?\.\w+\([^$]*?\))\n", text, re.MULTILINE
            )
        ]
    assert len(found) > 40
    assert len(found) == len(set(found))


def test_installing_what_is_installed_waits_for_no_open_transaction_and_blocks_none(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    """As consumers, publishers, dispatchers and readers of status hold locks on everything that they use."""
    schema.install(db, compat=["pgmq"])
    relations = "select format('%I.%I', n.nspname, c.relname), c.relkind from pg_class c join pg_namespace n"
    relations += (
        " on n.oid = c.relnamespace where n.nspname in ('pgmb', 'pgmq') and c.relkind in ('r', 'p', 'v')"
    )
    with psycopg.connect(dsn) as user:
        for relation, kind in user.execute(relations.encode()).fetchall():
            if kind == "v":
                user.execute(f"select from {relation} limit 0".encode())
            else:
                user.execute(f"lock table {relation} in row exclusive mode".encode())
        db.execute("set statement_timeout = '60s'")
        for compat in ((), ("pgmq",)):
            schema.install(db, compat)
