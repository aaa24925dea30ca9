"""Files of rows: which format a path has, and the events in them as a DataFrame."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from pgmb.cli.spark import lines

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SUFFIXES = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".json": "jsonl",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
}


class Format(StrEnum):
    PARQUET = "parquet"
    CSV = "csv"
    JSONL = "jsonl"


def format_of(path: str) -> Format | None:
    """By the name, or by the first name in a folder; None where it says nothing."""
    place = Path(path)
    inside = sorted(one for one in place.glob("*") if one.name[0] not in "._") if place.is_dir() else []
    for one in (place, *inside[:1]):
        for suffix in reversed(one.suffixes):
            if suffix in _SUFFIXES:
                return Format(_SUFFIXES[suffix])
    # How Spark calls what it wrote as text.
    return Format.JSONL if inside and inside[0].suffix == ".txt" else None


def opened(spark: SparkSession, path: str, kind: Format, columns: Mapping[str, str]) -> DataFrame:
    """The rows as the sink takes them. Columns of CSV are text, as they are in the file."""
    match kind:
        case Format.PARQUET:
            return spark.read.parquet(path)
        case Format.CSV:
            return spark.read.csv(path, header=True, multiLine=True, escape='"')
        case Format.JSONL:
            return lines.events(spark.read.text(path), columns)


def chosen(path: str, given: Format | None) -> Format:
    found = given or format_of(path)
    if found is None:
        raise typer.BadParameter(f"what is in {path}? Say --format parquet, csv or jsonl.")
    return found
