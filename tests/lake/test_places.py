"""A table of the lake has a folder of its own: nobody else's files are in it, and it is in nobody else's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psycopg
import pytest
from deltalake import DeltaTable

from harness.s3 import bucket
from pgmb.errors import Conflict, ForeignTable
from pgmb.lake.archive import init
from pgmb.lake.delta import EventTable
from pgmb.lake.storage import Storage
from tests.lake.conftest import Lake

DB = psycopg.Connection[Any]

pytestmark = pytest.mark.new_database


def streams(db: DB) -> list[tuple[str, str]]:
    return [
        (str(name), str(url))
        for name, url in db.execute(
            "select s.name, l.url from pgmb.lake l join pgmb.stream s on s.id = l.stream order by 1"
        )
    ]


@pytest.mark.parametrize("inside", ["audit", "date=2026-01-01/audit", "_delta_log/audit"])
def test_a_lake_inside_another_stream_s_is_refused(lake: Lake, inside: str) -> None:
    lake.db.execute("select pgmb.create_stream('audit')")
    with pytest.raises(Conflict, match="would lie in the folder"):
        init(lake.dsn, "audit", f"{lake.url}/{inside}")
    with pytest.raises(Conflict, match="would lie in the folder"):
        init(lake.dsn, "audit", str(Path(lake.url).parent))
    with pytest.raises(Conflict, match="would lie in the folder"):
        init(lake.dsn, "audit", f"{lake.url}/x/../{inside}")
    assert [name for name, _ in streams(lake.db)] == ["main"]


def test_a_lake_inside_a_table_that_the_database_does_not_know_is_refused(
    dsn: str, db: DB, tmp_path: Path
) -> None:
    """Of another database, or of the user."""
    EventTable.create(Storage.at(str(tmp_path / "theirs")), "another", "main")
    with pytest.raises(ForeignTable, match="belongs to another stream or database"):
        init(dsn, "main", str(tmp_path / "theirs"))
    with pytest.raises(ForeignTable, match="lies in the folder of the table"):
        init(dsn, "main", str(tmp_path / "theirs" / "deep" / "ours"))
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    with pytest.raises(ForeignTable, match="lies in the folder of the table"):
        init(dsn, "main", str(tmp_path / "link" / "ours"))
    assert streams(db) == []


def test_a_folder_with_files_is_refused(dsn: str, db: DB, tmp_path: Path) -> None:
    (tmp_path / "full" / "deep").mkdir(parents=True)
    (tmp_path / "full" / "deep" / "only copy.csv").write_text("1")
    with pytest.raises(ForeignTable, match=r"is not empty: it holds deep/only copy\.csv"):
        init(dsn, "main", str(tmp_path / "full"))
    assert streams(db) == []
    (tmp_path / "empty" / "deep").mkdir(parents=True)
    init(dsn, "main", str(tmp_path / "empty"))
    # A command that is repeated finds its own table.
    init(dsn, "main", str(tmp_path / "empty"))


def test_an_object_store_s_folder_with_objects_is_refused(
    dsn: str, db: DB, s3_options: dict[str, str]
) -> None:
    bucket(s3_options).put_object(Key="places/full/deep/only copy.csv", Body=b"1")
    with pytest.raises(ForeignTable, match="is not empty"):
        init(dsn, "main", "s3://lake/places/full", options=s3_options)
    EventTable.create(Storage.at("s3://lake/places/theirs", s3_options), "another", "main")
    with pytest.raises(ForeignTable, match="lies in the folder of the table"):
        init(dsn, "main", "s3://lake/places/theirs/ours", options=s3_options)
    assert streams(db) == []
    init(dsn, "main", "s3://lake/places/ours", options=s3_options)


def test_a_log_that_names_a_file_outside_of_the_table_is_refused(lake: Lake, tmp_path: Path) -> None:
    lake.publish(10)
    lake.archive()
    commit = max(Path(lake.url, "_delta_log").glob("*.json"))
    (tmp_path / "secret.parquet").write_text("1")
    lines = [json.loads(line) for line in commit.read_text().splitlines()]
    for line in lines:
        if "add" in line:
            line["add"]["path"] = "../secret.parquet"
    commit.write_text("\n".join(map(json.dumps, lines)))
    table = EventTable(Storage.at(lake.url), "any", DeltaTable(lake.url))
    with pytest.raises(ForeignTable, match="outside of the table's folder"):
        table.files(-1, 1 << 62)
