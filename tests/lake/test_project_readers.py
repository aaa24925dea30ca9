"""A projection as others read it: Arrow, DuckDB, Polars, Spark, and what dbt and SQL are told of it."""

from __future__ import annotations

import subprocess
import sys
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import polars
import pytest
import yaml
from pyspark.sql.types import StructType

import pgmb.lake
from harness.lake import Here
from harness.projections import COLUMNS, ORDERS
from harness.segments import seal
from pgmb import cli
from pgmb.errors import ForeignTable, ProjectionNotFound
from pgmb.lake.archive import init
from pgmb.lake.catalog import spark_view
from pgmb.lake.projection.projector import Projector
from pgmb.lake.projection.table import declare
from pyspark_pgmb import DefaultSource
from tests.lake.conftest import DB, Lake

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def orders(module_db: DB, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Two versions of a projection: of one row, and of three."""
    lake = Lake.__new__(Lake)
    lake.dsn, lake.db, lake.options = module_db.info.dsn, module_db, None
    lake.url = str(tmp_path_factory.mktemp("readers") / "main")
    init(lake.dsn, "main", lake.url, "1 hour")
    declare(lake.dsn, ORDERS)
    for payloads in (['{"n": 1, "total": 1.5}'], ['{"n": 2, "customer": {"city": "Łódź"}}', '{"n": "3"}']):
        for payload in payloads:
            lake.db.execute("select pgmb.publish('order.paid', %s::json, 'k')", [payload])
        seal(lake.db)
        lake.archive()
        list(Projector(lake.dsn, "orders", Here()).run())
    return lake


def test_arrow_polars_and_duckdb_query_the_table(orders: Lake) -> None:
    found = pgmb.lake.table(orders.dsn, "orders")
    rows = found.to_table(columns=["n", "total", "city"]).to_pylist()
    assert sorted(rows, key=lambda row: row["n"] or 0) == [
        {"n": None, "total": None, "city": None},
        {"n": 1, "total": Decimal("1.50"), "city": None},
        {"n": 2, "total": None, "city": "Łódź"},
    ]
    assert pgmb.lake.table(orders.dsn, "orders", version=1).count_rows() == 1
    lazily = polars.scan_pyarrow_dataset(found).filter(polars.col("city") == "Łódź").collect()
    assert lazily["event_key"].to_list() == ["k"]
    # Without os._exit, Arrow's threads sometimes abort the process while Python shuts down, after the answer.
    script = (
        "import os, sys, duckdb, pgmb.lake\norders = pgmb.lake.table(sys.argv[1], 'orders')\n"
        "print(duckdb.sql('select sum(total), count(rescued) from orders').fetchall(), flush=True)\n"
        "os._exit(0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, orders.dsn], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout == "[(Decimal('1.50'), 1)]\n"
    with pytest.raises(ProjectionNotFound, match="there is no projection nothing"):
        pgmb.lake.table(orders.dsn, "nothing")
    with pytest.raises(AttributeError):
        _ = pgmb.lake.nothing  # type: ignore[attr-defined]


def test_spark_reads_the_table_with_its_types(orders: Lake, spark: SparkSession) -> None:
    reading = spark.read.format("pgmb").option("url", orders.dsn)
    frame = reading.option("projection", "orders").load()
    types = dict(frame.dtypes)
    assert (types["n"], types["total"], types["at"], types["event_date"]) == (
        "bigint", "decimal(10,2)", "timestamp", "date",
    )  # fmt: skip
    assert {*types} >= {word.split()[0] for word in COLUMNS.split(", ")}
    row = frame.where("city = 'Łódź'").collect()[0]
    assert (row.n, row.event_key, row.event_topic) == (2, "k", "order.paid")
    assert row.event_date == row.event_published_at.date() or isinstance(row.event_date, date)
    older = spark.read.format("pgmb").options(url=orders.dsn, projection="orders", version="1").load()
    assert older.select("n", "total").collect() == [(1, Decimal("1.50"))]


def test_options_that_cannot_be_right_are_refused(orders: Lake) -> None:
    for given, message in (
        ({"projection": "orders"}, "needs .option"),
        ({"url": orders.dsn, "projection": "nothing"}, "there is no projection nothing"),
        ({"url": orders.dsn, "projection": "orders", "version": "new"}, "version must be a number"),
        ({"url": orders.dsn, "projection": "orders", "subscribe": "x"}, "unknown option subscribe"),
    ):
        with pytest.raises((ValueError, ProjectionNotFound), match=message):
            DefaultSource(given).schema()
    with pytest.raises(ValueError, match="as a batch only"):
        DefaultSource({"url": orders.dsn, "projection": "orders"}).streamReader(StructType())


def test_views_and_sources_name_the_table(
    orders: Lake, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(*words: str) -> str:
        monkeypatch.setenv("PGMB_DSN", orders.dsn)
        monkeypatch.setattr(sys, "argv", ["pgmb", "lake", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        return capsys.readouterr().out

    spark.sql(printed("sql", "orders", "--engine", "spark").strip().rstrip(";"))
    [(count, total)] = spark.sql("select count(*), sum(total) from orders").collect()
    assert (count, total) == (3, Decimal("1.50"))
    assert printed("sql") == (
        f"create or replace view \"orders\" as\nselect * from delta_scan('file://{orders.url}_orders');\n"
    )
    script = f"{printed('sql', '--pinned')}select count(*), max(event_date) is not null from orders"
    done = subprocess.run(
        [sys.executable, "-c", "import sys, duckdb; print(duckdb.sql(sys.argv[1]).fetchall())", script],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout == "[(3, True)]\n"
    (source,) = yaml.safe_load(printed("dbt"))["sources"]
    (table,) = source["tables"]
    assert (source["name"], table["name"]) == ("main", "orders")
    assert table["config"]["meta"]["external_location"] == f"delta_scan('file://{orders.url}_orders')"
    stored = pgmb.lake.table(orders.dsn, "orders").schema.names
    assert sorted(column["name"] for column in table["columns"]) == sorted(stored)
    assert spark_view("a", "postgresql://u:secret@h/d").count("secret") == 0


def test_a_table_that_is_gone_is_named(orders: Lake, tmp_path: Path) -> None:
    url = str(tmp_path / "gone")
    orders.db.execute("update pgmb.lake_projection set url = %s", [url])
    try:
        with pytest.raises(ForeignTable, match="there is no table at"):
            pgmb.lake.table(orders.dsn, "orders")
    finally:
        orders.db.execute("update pgmb.lake_projection set url = %s", [f"{orders.url}_orders"])
