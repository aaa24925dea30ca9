"""pgmb spark read and publish: files and the screen, as programs and on a session that tests share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import pgmb
from harness.terminal import Terminal
from pgmb import cli
from pgmb.cli.spark import publish, read
from pgmb.cli.spark.failures import explained

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.once(18), pytest.mark.timeout(600)]

DB = psycopg.Connection[Any]


class Shared:
    """Runs commands in this process on the session that tests share, as an entry point does."""

    def __init__(self, dsn: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        monkeypatch.setenv("PGMB_DSN", dsn)

    def __call__(self, *words: str) -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "argv", ["pgmb", "spark", *words])
        self._capsys.readouterr()
        code: Any = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code or 0
        out, err = self._capsys.readouterr()
        return code, out, err

    def done(self, *words: str) -> str:
        code, out, err = self(*words)
        assert code == 0, err
        return out


@pytest.fixture
def pgmb_spark(
    dsn: str,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> Shared:
    @contextmanager
    def shared(*_: object) -> Generator[SparkSession]:
        with explained(tmp_path / "log"):
            yield spark

    for command in (read, publish):
        monkeypatch.setattr(command, "session", shared)
    return Shared(dsn, monkeypatch, capsys)


def logged(db: DB, stream: str) -> list[tuple[Any, ...]]:
    return db.execute(
        f"select topic, key, payload::text, headers::text from pgmb.log_{stream} order by seq"
    ).fetchall()


def ids(dsn: str, stream: str) -> list[Any]:
    with pgmb.connect(dsn) as broker:
        found = broker.between(stream, broker.earliest(stream), broker.position(stream))
        return sorted(event.id for event in found)


ODD = ["1", '"text"', "null", '{"a": [1.50, null],\n "ü": "\\n\\u0000"}', "12345678901234567890.10"]


def test_lines_of_json_there_and_back_to_the_letter(
    pgmb_spark: Shared, dsn: str, db: DB, tmp_path: Path
) -> None:
    db.execute("select pgmb.create_stream('copy')")
    for number, payload in enumerate(ODD):
        key, headers = (None, None) if number % 2 else (f"k{number}", '{"h": 1}')
        db.execute("select pgmb.publish('t.a', %s::json, %s, %s::json)", [payload, key, headers])
    folder = tmp_path / "events"
    assert pgmb_spark.done("read", "main", "--to", str(folder), "--format", "jsonl") == "5\n"
    written = [line for part in sorted(folder.glob("*.txt")) for line in part.read_text().splitlines()]
    assert len(written) == 5
    assert json.loads(written[0])["headers"] == {"h": 1}
    assert pgmb_spark.done("publish", str(folder), "--stream", "copy") == "5\n"
    written_once = {
        (topic, key, payload.replace("\n", " "), headers)
        for topic, key, payload, headers in logged(db, "main")
    }
    assert set(logged(db, "copy")) == written_once
    assert ids(dsn, "copy") == ids(dsn, "main")


def test_tables_with_names_of_their_own(
    pgmb_spark: Shared, spark: SparkSession, db: DB, tmp_path: Path
) -> None:
    table, text = str(tmp_path / "orders.parquet"), tmp_path / "orders.csv"
    spark.createDataFrame(
        [("o.new", 7, 1.5), ("o.paid", 8, None)], "kind string, customer int, sum double"
    ).write.parquet(table)
    told = pgmb_spark.done("publish", table, "--topic-column", "kind", "--key-column", "customer")
    assert told == "2\n"
    assert sorted(row[:2] for row in logged(db, "main")) == [("o.new", "7"), ("o.paid", "8")]
    db.execute("select pgmb.create_stream('csv')")
    text.write_text('customer,note\n007,"a ""quote"", and\nmore"\n')
    assert pgmb_spark.done("publish", str(text), "--topic", "o.new", "--stream", "csv") == "1\n"
    ((topic, key, payload, _),) = logged(db, "csv")
    assert (topic, key) == ("o.new", None)
    assert json.loads(payload) == {"customer": "007", "note": 'a "quote", and\nmore'}


def test_a_version_is_published_once(pgmb_spark: Shared, db: DB, tmp_path: Path) -> None:
    lines = tmp_path / "events.jsonl"
    lines.write_text('{"topic": "t", "payload": 1}\n\n{"topic": "t", "payload": 2}\n')
    version = ("--app", "nightly", "--version")
    assert pgmb_spark.done("publish", str(lines), *version, "3") == "2\n"
    code, out, err = pgmb_spark("publish", str(lines), *version, "3")
    assert (code, out) == (0, "0\n")
    assert "already" in err
    assert pgmb_spark.done("publish", str(lines), *version, "4") == "2\n"
    assert len(logged(db, "main")) == 4


def test_the_screen(pgmb_spark: Shared, dsn: str) -> None:
    with pgmb.connect(dsn) as broker:
        broker.publish_many("a.b", range(5))
        between = broker.position()
        broker.publish("c.\x1b[31md", {"n": 5}, key="k")
    assert [
        line.split(" ", 2)[2] for line in pgmb_spark.done("read", "main", "--limit", "2").splitlines()
    ] == [
        "a.b 0",
        "a.b 1",
    ]
    told = pgmb_spark.done("read", "main", "--from", str(between))
    assert told.endswith('c.\\x1b[31md [k] {"n":5}\n')
    assert told.count("\n") == 1
    printed = pgmb_spark.done("read", "main", "--from", "1h", "--topic", "a.b", "--format", "jsonl")
    assert [json.loads(line)["payload"] for line in printed.splitlines()] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("read nope", "stream 'nope' does not exist"),
        ("publish bad.jsonl", "not an event"),
        ("publish bare.jsonl", "needs a topic"),
        ("publish rows.csv", "need a topic"),
        ("publish rows.csv --topic t --key-column nope", "nope"),
        ("publish rows.csv --topic t --stream nope", "stream 'nope' does not exist"),
        ("publish no.parquet --topic t", "arquet"),
    ],
)
def test_errors_are_a_line(
    pgmb_spark: Shared, db: DB, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"topic": "t", "payload": 1}\n{"topic": "t", "payl\n')
    (tmp_path / "bare.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    (tmp_path / "no.parquet").write_text("not that")
    words = [str(tmp_path / word) if (tmp_path / word).exists() else word for word in command.split()]
    code, out, err = pgmb_spark(*words)
    assert (code, out) == (1, ""), err
    assert told in err
    assert [line.split(":")[0] for line in err.splitlines()] in (["Error"], ["Error", "Hint"])
    assert logged(db, "main") == []


@pytest.mark.minutes
def test_as_programs_they_are_quiet_and_leave_nothing(dsn: str, db: DB, tmp_path: Path) -> None:
    """One reads into Parquet, the other publishes it, in a terminal."""
    db.execute("select pgmb.create_stream('copy')")
    db.execute("select pgmb.publish_many('t', array(select to_json(n) from generate_series(1, 1000) n))")
    work, temporary, written = tmp_path / "work", tmp_path / "tmp", tmp_path / "written"
    for folder in (work, temporary):
        folder.mkdir()
    env = {
        **os.environ,
        "PGMB_DSN": dsn,
        "TMPDIR": str(temporary),
        "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1",
    }
    command = [sys.executable, "-m", "pgmb", "spark"]
    done = subprocess.run(
        [*command, "read", "main", "--to", str(written), "--master", "local[2]"],
        env=env,
        cwd=work,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1000\n", "")
    with Terminal([*command, "publish", str(written), "--stream", "copy"], env=env) as shown:
        shown.wait_for(lambda: "tasks" in shown.text, 500)
        assert shown.finish(500) == 0
        assert shown.text.strip().endswith("1000")
        assert "WARN" not in shown.text
    assert sorted(int(row[2]) for row in logged(db, "copy")) == list(range(1, 1001))
    assert list(work.iterdir()) == []
    assert list(temporary.iterdir()) == []


@pytest.mark.minutes
def test_as_a_program_it_tells_what_went_wrong(dsn: str, tmp_path: Path) -> None:
    """Its JVM is gone when the program ends: the error must be read before."""
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"topic": "t", "payload": 1}\n{"topic": "t", "payl\n')
    done = subprocess.run(
        [sys.executable, "-m", "pgmb", "spark", "publish", str(bad), "--master", "local[2]"],
        env={**os.environ, "PGMB_DSN": dsn, "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "not an event" in done.stderr
