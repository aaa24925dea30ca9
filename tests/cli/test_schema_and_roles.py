"""The command line: parse, call, print; errors with a hint and exit code 1."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgmb
from harness.postgres import Server, create_database, drop_database

PGMB = [sys.executable, "-m", "pgmb"]


def run(*arguments: str, dsn: str | None = None, stdin: str = "") -> subprocess.CompletedProcess[str]:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PGMB_DSN", "DATABASE_URL")
    }
    if dsn is not None:
        environment["PGMB_DSN"] = dsn
    return subprocess.run(
        [*PGMB, *arguments],
        input=stdin,
        text=True,
        capture_output=True,
        env=environment,
        timeout=60,
        check=False,
    )


def done(*arguments: str, dsn: str | None = None, stdin: str = "") -> str:
    result = run(*arguments, dsn=dsn, stdin=stdin)
    assert result.returncode == 0, result.stderr
    return result.stdout


def shape(dsn: str) -> list[tuple[Any, ...]]:
    """Everything in the schema that an installation makes."""
    with psycopg.connect(dsn) as conn:
        return conn.execute(
            "select 'function', oid::regprocedure::text, pg_get_functiondef(oid), proacl::text from pg_proc"
            " where pronamespace = 'pgmb'::regnamespace"
            " union all select 'relation', c.relname, string_agg(a.attname || ' ' || format_type(a.atttypid,"
            " a.atttypmod), ',' order by a.attnum), c.relacl::text from pg_class c"
            " join pg_attribute a on a.attrelid = c.oid where relnamespace = 'pgmb'::regnamespace"
            " group by c.oid, c.relname, c.relacl::text"
            " union all select 'constraint', conname, pg_get_constraintdef(oid), null from pg_constraint"
            " where connamespace = 'pgmb'::regnamespace"
            " union all select 'version', version::text, epoch::text, null from pgmb.installation"
            " order by 1, 2"
        ).fetchall()


def test_the_schema_is_installed_upgraded_and_removed(empty_dsn: str) -> None:
    assert run("upgrade", dsn=empty_dsn).returncode == 1
    assert "Installed schema pgmb" in done("install", dsn=empty_dsn)
    assert "is at version" in done("upgrade", dsn=empty_dsn)
    assert f"schema {pgmb.schema.VERSION}" in done("version", dsn=empty_dsn)
    refused = run("uninstall", dsn=empty_dsn)
    assert (refused.returncode, "--yes" in refused.stderr) == (2, True)
    assert pgmb.schema.installed_version(empty_dsn) == pgmb.schema.VERSION
    done("uninstall", "--yes", dsn=empty_dsn)
    assert pgmb.schema.installed_version(empty_dsn) is None
    assert "not installed" in done("version", dsn=empty_dsn)


def test_the_emitted_script_run_by_psql_is_what_python_installs(
    server: Server, empty_dsn: str, tmp_path: Path
) -> None:
    other = create_database(server)
    dsn = server.dsn(other)
    psql = ["psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", empty_dsn, "-f"]
    script = tmp_path / "install.sql"
    script.write_text(done("schema", "emit"))
    for _ in range(2):
        ran = subprocess.run([*psql, str(script)], capture_output=True, text=True, check=False)
        assert (ran.returncode, ran.stderr) == (0, "")
        pgmb.schema.install(dsn)
        assert shape(empty_dsn) == shape(dsn)
    drop_database(server, other)
    with pgmb.connect(empty_dsn) as broker:
        broker.create_queue("q")
        broker.publish("a", 1)
        assert len(broker.receive("q")) == 1
    script.write_text(done("schema", "emit", "--uninstall"))
    subprocess.run([*psql, str(script)], check=True)
    assert pgmb.schema.installed_version(empty_dsn) is None


def test_events_are_published_and_received(dsn: str) -> None:
    with pgmb.connect(dsn) as broker:
        broker.create_queue("q")
    identifier = done("publish", "a.b", '{"x":  1}', "--key", "k", "--headers", '{"h":1}', dsn=dsn).strip()
    assert done("publish", "a.c", "-", dsn=dsn, stdin='1\n"zwei"\n\n').strip() == "2"
    first, *rest = done("receive", "q", "--max", "10", dsn=dsn).splitlines()
    assert '"payload":{"x":  1}' in first
    event = json.loads(first)
    assert (event["id"], event["topic"], event["key"], event["headers"]) == (identifier, "a.b", "k", {"h": 1})
    assert [json.loads(line)["payload"] for line in rest] == [1, "zwei"]
    assert done("receive", "q", dsn=dsn) == ""


def test_status_is_a_table_or_json(dsn: str) -> None:
    with pgmb.connect(dsn) as broker:
        broker.create_queue("mail", ["a.#"])
        broker.publish_many("a", range(3))
    shown = done("status", dsn=dsn)
    assert "mail" in shown
    assert "waiting" in shown
    told = json.loads(done("status", "--json", dsn=dsn))
    assert told["queues"][0]["queue"] == "mail"
    assert told["queues"][0]["waiting"] == 3
    assert told["streams"][0]["stream"] == "main"


def test_errors_are_a_message_a_hint_and_exit_code_1(dsn: str, empty_dsn: str) -> None:
    failed = run("receive", "nowhere", dsn=dsn)
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert "queue 'nowhere' does not exist" in failed.stderr
    assert "Hint: Create it with" in failed.stderr
    assert "Traceback" not in failed.stderr
    failed = run("status", dsn=empty_dsn)
    assert (failed.returncode, "pgmb install" in failed.stderr) == (1, True)
    failed = run("status", "--dsn", "host=/nonexistent")
    assert (failed.returncode, "Traceback" in failed.stderr) == (1, False)
    failed = run("publish", "a", "{not json", dsn=dsn)
    assert (failed.returncode, "json" in failed.stderr) == (1, True)
    failed = run("serve", "--roles", "ticker,cook", dsn=dsn)
    assert failed.returncode == 1
    assert "Roles are dispatcher, http, janitor, scheduler, ticker" in failed.stderr


@pytest.mark.parametrize("command", [["serve", "--port", "0"], ["janitor"], ["ticker"], ["scheduler"]])
def test_roles_run_until_they_are_interrupted(dsn: str, command: list[str]) -> None:
    process = subprocess.Popen([*PGMB, *command, "--dsn", dsn], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("Serving ")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()
