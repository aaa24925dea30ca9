"""How many rows an action of Spark went through."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def counted(rows: DataFrame) -> tuple[DataFrame, Callable[[], int]]:
    """The same rows, and what tells their number once they were written."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as f

    observation = Observation()
    observed = rows.observe(observation, f.count(f.lit(1)).alias("rows"))
    return observed, lambda: int(observation.get["rows"])
