"""The command line: parse, call, print; errors with a hint and exit code 1."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgmb
from harness.postgres import Server, create_database, drop_database
from tests.cli.conftest import Run

Done = Callable[..., str]

PGMB = [sys.executable, "-m", "pgmb"]


def shape(dsn: str) -> list[tuple[Any, ...]]:
    """Everything in the schema that an installation makes."""
    with psycopg.connect(dsn) as conn:
        return conn.execute(
            "select 'function', oid::regprocedure::text, pg_get_functiondef(oid), proacl::text from pg_proc"
            " where pronamespace = any ('{pgmb,pgmb_internal}'::regnamespace[])"
            " union all select 'relation', c.relname, string_agg(a.attname || ' ' || format_type(a.atttypid,"
            " a.atttypmod), ',' order by a.attnum), c.relacl::text from pg_class c"
            " join pg_attribute a on a.attrelid = c.oid where relnamespace = 'pgmb'::regnamespace"
            " group by c.oid, c.relname, c.relacl::text"
            " union all select 'constraint', conname, pg_get_constraintdef(oid), null from pg_constraint"
            " where connamespace = 'pgmb'::regnamespace"
            " union all select 'version', version::text, epoch::text, null from pgmb.installation"
            " order by 1, 2"
        ).fetchall()


def test_the_emitted_script_run_by_psql_is_what_python_installs(
    done: Done, server: Server, empty_dsn: str, tmp_path: Path
) -> None:
    other = create_database(server)
    dsn = server.dsn(other)
    psql = ["psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", empty_dsn, "-f"]
    script = tmp_path / "install.sql"
    script.write_text(done("schema", "emit", dsn=""))
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
    script.write_text(done("schema", "emit", "--uninstall", dsn=""))
    subprocess.run([*psql, str(script)], check=True)
    assert pgmb.schema.installed_version(empty_dsn) is None


def test_events_are_published_and_received(done: Done, dsn: str) -> None:
    with pgmb.connect(dsn) as broker:
        broker.create_queue("q")
    identifier = done("publish", "a.b", '{"x":  1}', "--key", "k", "--headers", '{"h":1}', dsn=dsn).strip()
    assert done("publish", "a.c", "-", dsn=dsn, stdin=b'1\n"zwei"\n\n').strip() == "2"
    first, *rest = done("receive", "q", "--max", "10", dsn=dsn).splitlines()
    assert '"payload":{"x":  1}' in first
    event = json.loads(first)
    assert (event["id"], event["topic"], event["key"], event["headers"]) == (identifier, "a.b", "k", {"h": 1})
    assert [json.loads(line)["payload"] for line in rest] == [1, "zwei"]
    assert done("receive", "q", dsn=dsn) == ""


def test_status_is_a_table_or_json(done: Done, dsn: str) -> None:
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


def test_status_and_a_new_endpoint_say_that_nothing_posts_webhooks(
    run: Run, dsn: str, db: psycopg.Connection[Any]
) -> None:
    said = "No dispatcher runs: nothing posts the events of 1 endpoint. Run pgmb serve, or pgmb dispatcher."
    assert said in run("endpoints", "create", "crm", "https://crm.example/", dsn=dsn).err
    assert said in run("status", dsn=dsn).err
    notices: list[str | None] = []
    db.add_notice_handler(lambda notice: notices.append(notice.message_primary))
    db.execute("select pgmb.create_endpoint('crm', 'https://crm.example/')")
    assert notices == ["no dispatcher runs: nothing posts the events of endpoint 'crm'"]
    db.execute("select pgmb.heartbeat(gen_random_uuid(), 'host', 1)")
    assert "dispatcher" not in run("status", dsn=dsn).err


def test_errors_are_a_message_a_hint_and_exit_code_1(run: Run, dsn: str, empty_dsn: str) -> None:
    failed = run("receive", "nowhere", dsn=dsn)
    assert failed.code == 1
    assert failed.out == ""
    assert "queue 'nowhere' does not exist" in failed.err
    assert "Hint: Create it with" in failed.err
    assert "Traceback" not in failed.err
    failed = run("status", dsn=empty_dsn)
    assert (failed.code, "pgmb install" in failed.err) == (1, True)
    failed = run("status", "--dsn", "host=/nonexistent", dsn="")
    assert (failed.code, "Traceback" in failed.err) == (1, False)
    failed = run("publish", "a", "{not json", dsn=dsn)
    assert (failed.code, "json" in failed.err) == (1, True)
    failed = run("serve", "--services", "ticker,cook", dsn=dsn)
    assert failed.code == 1
    assert "Services are dispatcher, http, janitor, scheduler, ticker" in failed.err


@pytest.mark.parametrize("command", [["serve", "--port", "0"], ["janitor"], ["ticker"], ["scheduler"]])
def test_services_run_until_they_are_interrupted(dsn: str, command: list[str]) -> None:
    process = subprocess.Popen([*PGMB, *command, "--dsn", dsn], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("Serving ")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


def test_serve_names_the_services_that_are_not_installed(dsn: str) -> None:
    hidden = "import sys; sys.modules.update(aiohttp=None, uvicorn=None); from pgmb.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", hidden, "serve", "--dsn", dsn],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "Serving janitor, scheduler, ticker.\n"
        said = process.stderr.readline() + process.stderr.readline()
        assert "dispatcher is not installed: pip install 'pgmb[webhooks]'" in said
        assert "http is not installed: pip install 'pgmb[server]'" in said
    finally:
        process.kill()
        process.communicate()
