"""The Python snippets of the pages on the lake run as they stand, on tables that were archived."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

from harness.lake import Here
from harness.segments import seal
from pgmb.lake.dead import DeadArchiver
from pgmb.lake.projection.declaration import load
from pgmb.lake.projection.projector import Projector
from pgmb.lake.projection.table import declare
from tests.lake.conftest import Lake

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HOWTO = Path(__file__).resolve().parents[2] / "docs" / "howto"
PAGE = HOWTO / "lake.md"
PROJECTIONS = HOWTO / "projections.md"
FENCE = r"^```{}\n(.*?)^```$"

pytestmark = [pytest.mark.new_database]


def snippets(page: Path, language: str) -> list[str]:
    return re.findall(FENCE.format(language), page.read_text(), re.MULTILINE | re.DOTALL)


def test_the_snippets_read_the_tables(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lake.db.execute("select pgmb.publish('order.paid', '{\"order\": 42}', 'customer-7')")
    lake.db.execute("select pgmb.publish('order.sent', '{}')")
    lake.db.execute("select pgmb.create_queue('bill', '{order.paid}', starting => pgmb.earliest())")
    lake.db.execute("select pgmb.bury(lease, error => 'no such card') from pgmb.receive('bill')")
    seal(lake.db)
    lake.archive()
    lake.age()
    assert lake.dropped() == [0]
    list(DeadArchiver(lake.dsn, "main").archive())
    url = Path(lake.url)
    (url.parent / "parent" / "lake").mkdir(parents=True)
    for name in ("main", "main_dead"):
        (url.parent / "parent" / "lake" / name).symlink_to(url.with_name(name.replace("main", url.name)))
    monkeypatch.chdir(url.parent / "parent")
    first, second, client, dead = snippets(PAGE, "python")
    found: dict[str, Any] = {}
    exec(compile(first, str(PAGE), "exec"), found)
    assert found["orders"].rows() == [("customer-7", "42")]
    done = subprocess.run(
        [sys.executable, "-c", f"{second}\nprint(paid)"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n"
    exec(compile(client.replace("postgresql:///app", lake.dsn), str(PAGE), "exec"), {})
    assert [line.split(maxsplit=2)[2] for line in capsys.readouterr().out.splitlines()] == [
        "order.paid {'order': 42}",
        "order.sent {}",
    ]
    exec(compile(dead, str(PAGE), "exec"), found)
    assert found["worst"].rows() == [("bill", "no such card", 1)]


def test_the_snippets_on_projections_run(
    lake: Lake, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (declared,) = snippets(PROJECTIONS, "yaml")
    for one in load(declared):
        declare(lake.dsn, one)
    for number, city in enumerate(["Paris", "Lyon", "Paris"]):
        given = {"order": number, "total": number + 0.5, "customer": {"city": city}}
        lake.db.execute("select pgmb.publish('order.paid', %s::json, %s)", [json.dumps(given), city])
    seal(lake.db)
    lake.archive()
    list(Projector(lake.dsn, "orders", Here()).run())
    monkeypatch.chdir(tmp_path)
    # The JVM is in another folder.
    arrow, by_duckdb, *on_spark = (
        text.replace("postgresql:///app", lake.dsn).replace('"checkpoints', f'"{tmp_path}/checkpoints')
        for text in snippets(PROJECTIONS, "python")
    )
    found: dict[str, Any] = {"spark": spark}
    exec(compile(arrow, str(PROJECTIONS), "exec"), found)
    assert sorted(found["by_city"].rows()) == [("Lyon", Decimal("1.50")), ("Paris", Decimal("3.00"))]
    done = subprocess.run(
        [sys.executable, "-c", f"{by_duckdb}\nprint(total, flush=True)\nimport os\nos._exit(0)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "4.50\n"
    for text in on_spark:
        exec(compile(text, str(PROJECTIONS), "exec"), found)
    assert (found["largest"].order, found["largest"].city) == (2, "Paris")
    merged = DeltaTable("lake/states").to_pyarrow_table().to_pylist()
    assert sorted((row["key"], row["order"]) for row in merged) == [("Lyon", 1), ("Paris", 2)]
    assert found["done"].count() == 3
