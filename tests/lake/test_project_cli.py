"""pgmb lake project: as a program, and on the session that tests share."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from harness.segments import seal
from pgmb.cli import lake_project
from pgmb.cli.spark.failures import explained
from tests.lake.conftest import Lake
from tests.lake.test_cli import Run, pgmb_lake

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["pgmb_lake"]

pytestmark = [pytest.mark.new_database]

ADD = ("add", "order.paid", "--schema", "order bigint not null, total decimal(10,2)", "--table", "orders")


@pytest.fixture
def project(pgmb_lake: Run) -> Run:
    return lambda *words: pgmb_lake("project", *words)


@pytest.fixture
def on_spark(project: Run, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    @contextmanager
    def shared(*_: object) -> Generator[SparkSession]:
        with explained(tmp_path / "log"):
            yield spark

    monkeypatch.setattr(lake_project, "session", shared)
    return project


def publish(lake: Lake, *payloads: str) -> None:
    for payload in payloads:
        lake.db.execute("select pgmb.publish('order.paid', %s::json, 'k')", [payload])
    seal(lake.db)
    lake.archive()


def test_projections_are_declared_listed_and_dropped(project: Run, lake: Lake, tmp_path: Path) -> None:
    assert project("list")[:2] == (0, "No projections. Declare one with: pgmb lake project add\n")
    code, _, said = project("run")
    assert (code, "there are no projections" in said) == (1, True)
    assert project(*ADD)[:2] == (0, f"Projection orders of stream main is at {lake.url}_orders.\n")
    code, _, said = project("add", "#", "--schema", "order text", "--table", "orders")
    assert code == 1
    assert "projection orders is declared differently" in said
    assert "--replace" in said
    code, _, said = project("add", "#", "--schema", "order texts", "--table", "other")
    assert (code, "there is no type texts" in said) == (1, True)
    file = tmp_path / "projections.yml"
    file.write_text(
        "projections:\n"
        "  orders: {topics: order.paid, columns: {order: bigint not null, total: 'decimal(10,2)'}}\n"
        "  raw: {topics: ['#'], bad: drop, columns: {any: json}}\n"
    )
    assert project("apply", str(file))[1].splitlines() == [
        f"Projection {name} of stream main is at {lake.url}_{name}." for name in ("orders", "raw")
    ]
    told = json.loads(project("list", "--json")[1])
    assert [(one["name"], one["bad"], one["generation"]) for one in told] == [
        ("orders", "rescue", 1), ("raw", "drop", 1),
    ]  # fmt: skip
    assert "Nothing to project" in project("run")[2], "and Spark is not started for that"
    assert project("drop", "raw", "--yes")[1] == (
        f"Projection raw is forgotten. Its files are at {lake.url}_raw.\n"
    )
    assert project("drop", "raw", "--yes")[0] == 1


def test_projections_run_on_spark_or_without(
    on_spark: Run, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_spark(*ADD)
    publish(lake, '{"order": 1, "total": 9.5}', '{"order": "2", "note": 1}')
    code, said, error = on_spark("run")
    assert code == 0, error
    assert said == "orders: projected up to segment 0, 2 rows, 1 rescued, 0 dropped, 1 new files\n"
    listed = on_spark("list")[1]
    assert all(word in listed for word in ("changed type", "string instead of number", "appeared", "note"))
    publish(lake, '{"order": 3}')
    done = json.loads(on_spark("run", "orders", "--no-spark", "--json")[1])
    assert (done["projection"], done["segment"], done["rows"]) == ("orders", 1, 3)
    on_spark(*ADD, "--bad", "drop", "--replace")
    code, _, said = on_spark("run", "--no-spark")
    assert (code, "pgmb lake project backfill orders" in said) == (1, True)
    assert "2 rows, 0 rescued, 1 dropped" in on_spark("backfill", "orders", "--no-spark")[1]
    gone = on_spark("vacuum", "orders", "--keep", "0s", "--dry-run")[1].splitlines()
    assert gone[-1] == "orders: 2 files to remove."
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 2:
            raise KeyboardInterrupt
        publish(lake, '{"order": 4}')

    monkeypatch.setattr(lake_project, "time", SimpleNamespace(sleep=wait))
    code, said, _ = on_spark("run", "--follow", "--every", "2m", "--no-spark", "--json")
    assert (code, waited) == (130, [120.0, 120.0])
    assert [json.loads(line)["rows"] for line in said.splitlines()] == [3]
