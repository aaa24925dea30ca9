"""pgmb lake: as a program, and on the session that tests share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pgmb import cli
from pgmb.cli import lake as commands
from pgmb.cli.spark.failures import explained
from pgmb.lake.care import LocalRun
from pgmb.lake.spark import SparkRun
from tests.lake.conftest import DB, Lake

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.new_database]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def pgmb_lake(dsn: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setenv("PGMB_DSN", dsn)
        monkeypatch.setattr(sys, "argv", ["pgmb", "lake", *words])
        capsys.readouterr()
        code: Any = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code or 0
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def on_spark(pgmb_lake: Run, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    @contextmanager
    def shared(*_: object) -> Generator[SparkSession]:
        with explained(tmp_path / "log"):
            yield spark

    monkeypatch.setattr(commands, "session", shared)
    return pgmb_lake


@pytest.fixture
def without_spark(pgmb_lake: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """What a command does itself is the same wherever its tasks run."""
    monkeypatch.setattr(commands, "session", lambda *_: nullcontext())
    monkeypatch.setattr("pgmb.lake.spark.SparkRun", lambda _: LocalRun(1))
    return pgmb_lake


def test_init_and_status_need_no_spark(pgmb_lake: Run, db: DB, tmp_path: Path) -> None:
    assert pgmb_lake("status")[:2] == (0, "No stream has a lake. Create one with: pgmb lake init URL\n")
    code, _, said = pgmb_lake("archive")
    assert code == 1
    assert "no stream has a lake" in said
    url = str(tmp_path / "lake")
    assert pgmb_lake("init", url, "--keep-hot", "1d")[:2] == (0, f"Stream main is archived to {url}.\n")
    assert pgmb_lake("init", url, "--keep-hot", "2d")[0] == 0, "again, with another setting"
    (shown,) = json.loads(pgmb_lake("status", "--json")[1])
    assert (shown["stream"], shown["url"], shown["keep_hot"]) == ("main", url, "P2D")
    assert (shown["archived"], shown["waiting"]) == (0, 0)
    assert db.execute("select archive from pgmb.stream").fetchone() == (True,)
    code, _, said = pgmb_lake("init", str(tmp_path / "other"))
    assert code == 1
    assert f"stream main is archived to {url}" in said
    assert not (tmp_path / "other").exists()
    code, _, said = pgmb_lake("init", url, "--stream", "nothing")
    assert (code, "stream 'nothing' does not exist" in said) == (1, True)
    code, told, _ = pgmb_lake("archive", "--once")
    assert (code, told) == (0, "Nothing to archive: no sealed segment and no dead letter waits.\n")
    db.execute("select pgmb.create_queue('q', '{#}'), pgmb.publish('t', '1')")
    db.execute("select pgmb.bury(lease, error => 'no') from pgmb.receive('q')")
    (shown,) = json.loads(pgmb_lake("status", "--json")[1])
    assert (shown["dead_waiting"], shown["dead_waiting_for"] is None) == (1, False)
    assert "dead letters" in pgmb_lake("status")[1]
    assert pgmb_lake("archive", "--once")[:2] == (0, "main: verified 1 dead letters\n")
    (shown,) = json.loads(pgmb_lake("status", "--json")[1])
    assert (shown["dead_waiting"], shown["dead_waiting_for"]) == (0, None)
    assert pgmb_lake("archive", "--storage-option", "x")[0] == 2


def test_a_dry_run_shows_the_plan_and_changes_nothing(pgmb_lake: Run, lake: Lake) -> None:
    lake.publish(10)
    lake.publish(10)
    planned = json.loads(pgmb_lake("archive", "--dry-run", "--json")[1])
    assert [(one["stream"], one["segment"]) for one in planned] == [("main", 0), ("main", 1)]
    assert "sealed at" in pgmb_lake("archive", "--dry-run")[1]
    assert lake.files() == []
    assert lake.value("select count(*) from pgmb.archived") == 0
    assert "main" in pgmb_lake("status")[1]


def test_spark_archives_and_only_what_is_new(on_spark: Run, lake: Lake) -> None:
    lake.publish(500)
    lake.publish(0)
    code, said, error = on_spark("archive", "--once", "--json")
    assert code == 0, error
    done = json.loads(said)
    assert (done["stream"], done["segments"], done["events"], done["adopted"]) == (
        "main",
        [0, 1],
        500,
        False,
    )
    assert lake.is_exact()
    assert on_spark("archive")[1] == "Nothing to archive: no sealed segment and no dead letter waits.\n"
    lake.publish(100)
    code, said, _ = on_spark("archive", "--stream", "main")
    assert said.startswith("main: verified segment 2, 100 events, 1 files of ")
    assert lake.is_exact()
    (shown,) = json.loads(on_spark("status", "--json")[1])
    assert (shown["archived"], shown["events"], shown["waiting"]) == (3, 600, 0)
    assert on_spark("verify", "--master", "local[2]")[1] == "main: 3 segments with 600 events are sound.\n"


def test_one_that_is_not_needed_says_so(without_spark: Run, lake: Lake) -> None:
    lake.publish(10)
    held = lake.archiver().archive()
    next(held)
    lake.publish(10)
    assert "Another archiver works on stream main." in without_spark("archive")[2]


def test_following_archives_what_is_sealed_later(
    without_spark: Run, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 2:
            raise KeyboardInterrupt
        lake.publish(30)

    monkeypatch.setattr(commands, "time", SimpleNamespace(sleep=wait))
    code, said, _ = without_spark("archive", "--follow", "--every", "2m", "--json")
    assert (code, waited) == (130, [120.0, 120.0])
    assert [json.loads(line)["events"] for line in said.splitlines()] == [30]
    assert lake.is_exact()


def test_a_failed_verification_is_an_error_of_the_command(without_spark: Run, lake: Lake) -> None:
    lake.publish(100)
    archiver = lake.archiver()
    archiver.settle = lambda *_given, **_options: None  # type: ignore[method-assign]
    next(iter(archiver.archive()))
    lake.files()[0].unlink()
    code, _, said = without_spark("archive")
    assert code == 1
    assert "segment 0: date=" in said
    assert "--repair" in said
    code, said, error = without_spark("archive", "--repair")
    assert code == 0, error
    assert "100 events" in said
    assert lake.is_exact()


def test_spark_runs_tasks_in_parallel_and_returns_results_in_order(spark: SparkSession) -> None:
    run = SparkRun(spark)
    assert run.parallelism == 2
    assert run(str, range(5), str) == ["0", "1", "2", "3", "4"]
    assert run(str, [], str) == []
