"""Independent readers find in the table what the log has, and so does the digest by its definition."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import datafusion
import polars
import pytest

from harness.s3 import BUCKET
from tests.lake.conftest import COLUMNS, DB, Lake, plain_digest

# In a process of its own: at its end DuckDB tells at length what it leaked.
BY_DUCKDB = """
import pickle, sys, duckdb
duckdb.sql("set timezone = 'UTC'")
sys.stdout.buffer.write(pickle.dumps(duckdb.sql(sys.argv[1]).fetchall()))
"""

pytestmark = [pytest.mark.new_database]


@pytest.fixture(params=["disk", "s3"])
def archived(
    request: pytest.FixtureRequest, dsn: str, db: DB, tmp_path: Path, s3_options: dict[str, str]
) -> Lake:
    """Two segments in a table."""
    if request.param == "disk":
        return _filled(Lake(dsn, db, str(tmp_path / "lake")))
    return _filled(Lake(dsn, db, f"s3://{BUCKET}/readers", s3_options))


def _filled(lake: Lake) -> Lake:
    lake.publish(5000)
    lake.publish(2000)
    lake.archive()
    return lake


def recorded(lake: Lake) -> list[tuple[int, int, bytes]]:
    return lake.db.execute("select segment, events, digest from pgmb.archived order by 1").fetchall()


def digested(lake: Lake, rows: list[tuple[Any, ...]]) -> list[tuple[int, int, bytes]]:
    """Segments with their counts and digests, computed from rows of a reader without code of the product."""
    derived = {
        id
        for (id,) in lake.db.execute(
            "select pgmb.derive_id(e.seq, e.published_at, s.salt)::text"
            " from pgmb.log_main e, pgmb.stream s where e.id is null"
        )
    }
    found: dict[int, list[tuple[Any, ...]]] = {}
    for row in rows:
        found.setdefault(row[0] >> 40, []).append(row)
    return [(n, len(found[n]), plain_digest(found[n], derived)) for n in sorted(found)]


def test_polars_has_the_digest_of_the_log(archived: Lake) -> None:
    table = polars.read_delta(archived.url, storage_options=archived.options)
    rows = table.select(COLUMNS).sort("seq").rows()
    assert rows == archived.logged()
    assert digested(archived, rows) == recorded(archived)
    assert digested(archived, rows[:-1]) != recorded(archived)


def test_duckdb_has_the_digest_of_the_log(lake: Lake) -> None:
    _filled(lake)
    query = f"select {', '.join(COLUMNS)} from read_parquet({lake.table().file_uris()}) order by seq"
    done = subprocess.run([sys.executable, "-c", BY_DUCKDB, query], capture_output=True, check=True)
    rows = pickle.loads(done.stdout)
    assert rows == lake.logged()
    assert digested(lake, rows) == recorded(lake)


def test_datafusion_has_the_digest_of_the_log(lake: Lake) -> None:
    _filled(lake)
    context = datafusion.SessionContext()
    # By its own reader of Parquet: that of a registered DeltaTable or dataset is another's.
    files = lake.table().file_uris()
    for number, file in enumerate(files):
        context.register_parquet(f"file_{number}", file)
    every = " union all ".join(
        f"select {', '.join(COLUMNS)} from file_{number}" for number in range(len(files))
    )
    batches = context.sql(f"select * from ({every}) events order by seq").collect()
    rows = [tuple(row[name] for name in COLUMNS) for batch in batches for row in batch.to_pylist()]
    assert rows == lake.logged()
    assert digested(lake, rows) == recorded(lake)
