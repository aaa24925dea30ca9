"""Independent readers find in the table what the log has, and so does the digest by its definition."""

from __future__ import annotations

import pickle
import subprocess
import sys
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


def filled(lake: Lake) -> Lake:
    """Two segments in a table, the first of which has more than one block of the digest."""
    lake.publish(4200)
    lake.publish(300)
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


def by_polars(lake: Lake) -> list[tuple[Any, ...]]:
    return polars.read_delta(lake.url, storage_options=lake.options).select(COLUMNS).sort("seq").rows()


def by_duckdb(lake: Lake) -> list[tuple[Any, ...]]:
    query = f"select {', '.join(COLUMNS)} from read_parquet({lake.table().file_uris()}) order by seq"
    done = subprocess.run([sys.executable, "-c", BY_DUCKDB, query], capture_output=True, check=True)
    found: list[tuple[Any, ...]] = pickle.loads(done.stdout)
    return found


def by_datafusion(lake: Lake) -> list[tuple[Any, ...]]:
    context = datafusion.SessionContext()
    # By its own reader of Parquet: that of a registered DeltaTable or dataset is another's.
    files = lake.table().file_uris()
    for number, file in enumerate(files):
        context.register_parquet(f"file_{number}", file)
    every = " union all ".join(
        f"select {', '.join(COLUMNS)} from file_{number}" for number in range(len(files))
    )
    batches = context.sql(f"select * from ({every}) events order by seq").collect()
    return [tuple(row[name] for name in COLUMNS) for batch in batches for row in batch.to_pylist()]


def test_polars_duckdb_and_datafusion_have_the_digest_of_the_log(lake: Lake) -> None:
    logged = filled(lake).logged()
    for reader in (by_polars, by_duckdb, by_datafusion):
        assert reader(lake) == logged, reader.__name__
    # They are equal: the digest is the same for each.
    assert digested(lake, logged) == recorded(lake)
    assert digested(lake, logged[:-1]) != recorded(lake)


def test_polars_has_the_digest_of_the_log_on_s3(dsn: str, db: DB, s3_options: dict[str, str]) -> None:
    lake = filled(Lake(dsn, db, f"s3://{BUCKET}/readers", s3_options))
    rows = by_polars(lake)
    assert rows == lake.logged()
    assert digested(lake, rows) == recorded(lake)
