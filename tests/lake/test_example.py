"""The pipeline of examples/lake: orders of lake and log become sums that late orders correct, and alerts."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.segments import seal
from tests.docs.test_snippets import ROOT
from tests.lake.conftest import Lake
from tests.spark.test_examples import _in_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.new_database, pytest.mark.minutes, pytest.mark.timeout(1500)]

NINE = datetime(2026, 9, 1, 9, tzinfo=UTC)


def place(lake: Lake, hour: int, country: str, *totals: float) -> None:
    at = (NINE + timedelta(hours=hour)).isoformat()
    for total in totals:
        order = {"country": country, "total": total, "placed_at": at}
        lake.db.execute("select pgmb.publish('order.paid', %s::json)", [json.dumps(order)])


def published(lake: Lake, after: int = 0) -> list[tuple[str, int, str, float, int]]:
    """What the pipeline has published: topic, hour, country, revenue, orders."""
    found: list[tuple[str, int, str, float, int]] = []
    rows = lake.db.execute(
        "select topic::text, payload::text from pgmb.log_revenue where seq > %s order by seq", [after]
    )
    for topic, payload in rows.fetchall():
        one: dict[str, Any] = json.loads(payload)
        hour = (datetime.fromisoformat(one["hour"]) - NINE) // timedelta(hours=1)
        found.append((topic.removeprefix("revenue."), hour, one["country"], one["revenue"], one["orders"]))
    return sorted(found)


def test_late_orders_correct_sums_and_alerts_exactly_once(
    spark: SparkSession, lake: Lake, tmp_path: Path
) -> None:
    program = ROOT / "examples" / "lake" / "revenue.py"
    asked = ("--url", lake.dsn, "--checkpoint", str(tmp_path / "checkpoint"), "--hours", "3")
    lake.db.execute(
        "select pgmb.create_stream('revenue'), pgmb.create_queue('alerts', '{revenue.low}', 'revenue')"
    )
    for hour in range(3):
        place(lake, hour, "DE", 60, 40)
        place(lake, hour, "FR", 10)
    seal(lake.db)
    lake.archive()
    lake.age()
    assert lake.dropped() == [0]
    # From the log: an hour that is low, and one that shows that it is over.
    place(lake, 3, "DE", 20)
    place(lake, 4, "DE", 90)
    _in_session(spark, program, *asked)
    assert published(lake) == [
        ("hour", 0, "DE", 100, 2), ("hour", 0, "FR", 10, 1), ("hour", 1, "DE", 100, 2),
        ("hour", 1, "FR", 10, 1), ("hour", 2, "DE", 100, 2), ("hour", 2, "FR", 10, 1),
        ("hour", 3, "DE", 20, 1), ("hour", 4, "DE", 90, 1), ("low", 3, "DE", 20, 1),
    ]  # fmt: skip
    assert lake.value("select count(*) from pgmb.receive('alerts')") == 1
    last = lake.value("select max(seq) from pgmb.log_revenue")
    # Late orders, of an hour that the log has dropped and of the one that was low.
    place(lake, 1, "FR", 5)
    place(lake, 3, "DE", 70)
    _in_session(spark, program, *asked)
    assert published(lake, last) == [
        ("hour", 1, "FR", 15, 2), ("hour", 3, "DE", 90, 2), ("recovered", 3, "DE", 90, 2)
    ]  # fmt: skip
