"""pgmb spark as far as no Spark is needed: lag, refusals, lines of JSON, what errors come down to."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgmb.cli.spark import failures, files, lines
from pgmb.errors import InvalidArgument
from tests.cli.conftest import Run

DB = psycopg.Connection[Any]
NOWHERE = "host=127.0.0.1 port=1 dbname=x connect_timeout=2"


def confirm(db: DB, reader: str, ago: timedelta = timedelta(0)) -> None:
    """A reader for whom an event waits, published so long ago."""
    db.execute("select pgmb.confirm('main', %s, pgmb.position())", [reader])
    db.execute("select pgmb.publish('t', '1')")
    db.execute("update pgmb.log_main set published_at = now() - %s", [ago])


# -- lag -----------------------------------------------------------------------------------------------------


def test_lag_lists_readers(run: Run, db: DB) -> None:
    assert run("spark", "lag", "--json").json == []
    assert run("spark", "lag", "--max-lag", "1s").code == 0
    confirm(db, "hourly", timedelta(hours=2))
    (told,) = run("spark", "lag", "--json").json
    assert (told["reader"], told["stream"], told["waiting"]) == ("hourly", "main", 1)
    shown = run("spark", "lag")
    assert shown.code == 0
    assert "hourly" in shown.out
    assert "2h" in shown.out


def test_lag_is_for_monitoring(run: Run, db: DB) -> None:
    confirm(db, "hourly", timedelta(hours=2))
    assert run("spark", "lag", "--max-lag", "3h").code == 0
    late = run("spark", "lag", "--max-lag", "1h")
    assert late.code == 1
    assert "hourly of stream main is 2h late" in late.err
    assert run("spark", "lag", "--max-lag", "1h", "--json").json[0]["reader"] == "hourly"
    db.execute("select pgmb.confirm('main', 'prompt', pgmb.position())")
    assert run("spark", "lag", "prompt", "--max-lag", "1s").code == 0
    assert run("spark", "lag", "prompt", "hourly", "--max-lag", "1s").code == 1
    missing = run("spark", "lag", "nobody")
    assert missing.code == 1
    assert "no reader nobody" in missing.err
    assert run("spark", "lag", dsn=NOWHERE).code == 3


def test_a_reader_that_lost_events_is_too_late(run: Run, db: DB) -> None:
    db.execute("select pgmb.alter_stream('main', keep_for => '0 s', drop_unread => true)")
    confirm(db, "hourly")
    db.execute("select pgmb.rotate()")
    db.execute("select pgmb.maintain()")
    assert "lost events" in run("spark", "lag", "--max-lag", "1h").err


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("read", "main", "--format", "parquet"), 2, "needs --to"),
        (("read", "main", "--to", "new", "--format", "screen"), 2, "--to is for"),
        (("read", "main", "--to", "."), 1, "exists already"),
        (("read", "main", "--from", "yesterweek"), 2, "not a point in time"),
        (("read", "main", "--limit", "0"), 2, ""),
        (("read", "main", "--conf", "memory"), 2, "NAME=VALUE"),
        (("publish", "no/such/file.csv"), 1, "does not exist"),
        (("publish", "."), 2, "--format"),
        (("publish", ".", "--format", "csv", "--app", "a"), 2, "go together"),
        (("lag", "--max-lag", "soon"), 2, "not a duration"),
    ],
)
def test_refusals(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: tuple[str, ...], code: int, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run("spark", *words)
    assert (outcome.code, "Traceback" in outcome.err) == (code, False), outcome.err
    assert told in outcome.err


@pytest.mark.parametrize("words", [("read", "main"), ("publish", "rows.csv", "--topic", "t")], ids=" ".join)
def test_no_server_or_stream_is_told_before_spark_starts(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    (tmp_path / "rows.csv").write_text("a\n1\n")
    outcome = run("spark", *words, dsn=NOWHERE)
    assert outcome.code == 1
    assert [line.split(":")[0] for line in outcome.err.splitlines()] == ["Error", "Hint"]
    assert "stream 'nope' does not exist" in run("spark", "read", "nope").err


def test_without_java_it_says_so(dsn: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pgmb", "spark", "read", "main"],
        env={**os.environ, "PGMB_DSN": dsn, "JAVA_HOME": str(tmp_path / "none"), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["Error", "Hint"]
    assert "Java 17" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [("read", "main"), ("publish", "empty.csv", "--topic", "t")], ids=" ".join)
def test_without_the_extra_it_says_what_to_install(dsn: str, tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "empty.csv").write_text("a\n1\n")
    program = (
        f"import sys; sys.modules['pyspark'] = None; sys.argv = ['pgmb', 'spark', *{words!r}]\n"
        "from pgmb.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PGMB_DSN": dsn},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert 'pip install "pgmb[spark]"' in done.stderr
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["Error", "Hint"]


# -- lines and files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "columns", "event"),
    [
        (
            '{"topic": "t", "key": "k", "payload": {"a": 1.50}, "headers": {"h": 1}, "id": "i"}',
            {},
            ("t", "k", '{"a": 1.50}', '{"h": 1}', "i", None),
        ),
        ('{"payload": "text"}', {}, (None, None, '"text"', None, None, None)),
        ('{"payload": null, "headers": null, "key": null}', {}, (None, None, "null", None, None, None)),
        ('{"topic": "t", "n": 1, "m": [ 1.0 ]}', {}, ("t", None, '{"n":1,"m":[ 1.0 ]}', None, None, None)),
        (
            '{"kind": "t", "user": 7, "at": "2030-01-01", "n": 1}',
            {"topic": "kind", "key": "user"},
            ("t", "7", '{"at":"2030-01-01","n":1}', None, None, None),
        ),
        (
            '{"topic": "t", "due": "2030-01-01T00:00:00Z", "id": 5}',
            {"at": "due", "id": "", "payload": ""},
            ("t", None, '{"id":5}', None, None, "2030-01-01T00:00:00Z"),
        ),
    ],
)
def test_a_line_is_an_event(text: str, columns: dict[str, str], event: tuple[str | None, ...]) -> None:
    assert lines.row(text, columns) == event


@pytest.mark.parametrize(
    "text", ["{", "1", "[]", '"x"', '{"topic": {}}', '{"payload": tru}', "{}x" * 50, "\ud800"]
)
def test_a_line_that_is_none_is_named(text: str) -> None:
    with pytest.raises(InvalidArgument, match="not an event"):
        lines.row(text, {})


def test_a_path_says_its_format(tmp_path: Path) -> None:
    assert files.format_of("a.parquet") is files.Format.PARQUET
    assert files.format_of("a.snappy.parquet") is files.Format.PARQUET
    assert files.format_of("a.csv.gz") is files.Format.CSV
    assert files.format_of("a.ndjson") is files.Format.JSONL
    assert files.format_of("a.b") is None
    assert files.format_of(str(tmp_path)) is None
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / ".part.crc").touch()
    assert files.format_of(str(tmp_path)) is None
    (tmp_path / "part-0.txt").touch()
    assert files.format_of(str(tmp_path)) is files.Format.JSONL
    (tmp_path / "part-0.csv").touch()
    assert files.format_of(str(tmp_path)) is files.Format.CSV


# -- what errors come down to --------------------------------------------------------------------------------

TRACEBACKS = """Job aborted
Traceback (most recent call last):
  File x
KeyError: 1

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File y
pgmb.errors.NotFound: stream 's' does not exist
Hint: Create it.
\tat java.lang.Thread"""


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (
            "[X_Y] Failed: Traceback (most recent call last):\n  File\nValueError: no\n SQLSTATE: 38000",
            "no",
            None,
        ),
        (
            TRACEBACKS,
            "stream 's' does not exist",
            "Create it.",
        ),
        ("[PATH_NOT_FOUND] Path does not exist: x. SQLSTATE: 42K03", "Path does not exist: x.", None),
        ("", "Spark failed", None),
    ],
)
def test_an_error_is_one_line(text: str, message: str, hint: str | None) -> None:
    assert failures.said(text) == (message, hint)
