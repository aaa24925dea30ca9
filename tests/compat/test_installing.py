"""Installing PGMQ's functions over our log, beside nothing else."""

from __future__ import annotations

from typing import Any, cast

import psycopg
import pytest
from pgmq.install import get_embedded_install_sql
from typer.testing import CliRunner

from pgmb import Conflict, InvalidArgument, schema
from pgmb.cli import app
from tests.conftest import Connect


def queues(dsn: str) -> list[str]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        return [name for (name,) in connection.execute("select queue_name from pgmq.list_queues()")]


def test_it_is_installed_on_request_only(dsn: str, connect: Connect) -> None:
    schema.install(dsn)
    assert connect().execute("select to_regnamespace('pgmq')").fetchone() == (None,)
    schema.install(dsn, compat=["pgmq"])
    connect().execute("select pgmq.create('kept')")
    schema.install(dsn, compat=["pgmq"])
    assert queues(dsn) == ["kept"]


def test_it_is_upgraded_with_the_schema(dsn: str, connect: Connect) -> None:
    schema.install(dsn, compat=["pgmq"])
    connect().execute("select pgmq.create('kept')")
    connect().execute("drop function pgmq.list_queues()")
    connect().execute("drop function public.pgmq_send")
    schema.install(dsn)
    assert queues(dsn) == ["kept"]
    assert connect().execute("select pgmq_send('kept', '{}')").fetchone() == (1,)


def test_it_is_removed_with_the_schema(dsn: str, connect: Connect) -> None:
    schema.install(dsn, compat=["pgmq"])
    connect().execute("select pgmq.create('gone')")
    schema.uninstall(dsn)
    assert connect().execute(
        "select to_regnamespace('pgmq'), to_regnamespace('pgmb'), to_regproc('public.pgmq_send')"
    ).fetchone() == (None, None, None)


def test_uninstalling_leaves_pgmq_itself_alone(dsn: str, connect: Connect) -> None:
    connect().execute(cast("Any", get_embedded_install_sql()))
    schema.uninstall(dsn)
    assert queues(dsn) == []


def test_it_does_not_replace_pgmq_itself(dsn: str, connect: Connect) -> None:
    connect().execute(cast("Any", get_embedded_install_sql()))
    with pytest.raises(Conflict, match="schema pgmq exists") as refused:
        schema.install(dsn, compat=["pgmq"])
    assert refused.value.hint
    schema.install(dsn)
    assert queues(dsn) == []


def test_it_does_not_replace_a_function_of_that_name(dsn: str, connect: Connect) -> None:
    connect().execute("create function public.pgmq_send() returns void language sql as ''")
    with pytest.raises(Conflict, match="pgmq_send"):
        schema.install(dsn, compat=["pgmq"])


def test_no_other_name_is_known(dsn: str) -> None:
    with pytest.raises(InvalidArgument, match="rabbit"):
        schema.install(dsn, compat=["rabbit"])


def test_an_owner_without_superuser(server: Any, connect: Connect) -> None:
    """Who owns a database, and nothing else, installs and uses it, except that public may not be theirs."""
    from harness.postgres import create_database, drop_database

    database = create_database(server)
    with server.admin() as admin:
        admin.execute("create role compat_owner login")
    try:
        with server.connect(database) as connection:
            connection.execute(f'grant create on database "{database}" to compat_owner')
            connection.execute("revoke create on schema public from public")
            connection.execute("grant execute on function pg_control_system() to compat_owner")
        dsn = server.dsn(database, "compat_owner")
        schema.install(dsn, compat=["pgmq"])
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("select pgmq.create('own')")
            connection.execute("select pgmq.send('own', '{}')")
            assert connection.execute("select msg_id from pgmq.read('own', 30, 1)").fetchone() == (1,)
            assert connection.execute("select to_regproc('public.pgmq_send')").fetchone() == (None,)
    finally:
        drop_database(server, database)
        with server.admin() as admin:
            admin.execute("drop role compat_owner")


def test_the_command_line(empty_dsn: str) -> None:
    done = CliRunner().invoke(app, ["install", "--dsn", empty_dsn, "--compat", "pgmq"])
    assert done.exit_code == 0, done.output
    assert "pgmq" in done.output
    assert queues(empty_dsn) == []
    script = CliRunner().invoke(app, ["schema", "emit", "--compat", "pgmq"])
    assert "create table pgmq.queue" in script.output
    assert CliRunner().invoke(app, ["install", "--dsn", empty_dsn, "--compat", "rabbit"]).exit_code != 0
