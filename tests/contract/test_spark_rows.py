"""Ids that Spark's readers derive are those that pgmb.derive_id makes."""

from __future__ import annotations

import random
from typing import Any
from uuid import uuid4

import psycopg
import pyarrow as pa

from pgmb.spark.source.queries import arrow_schema
from pgmb.spark.source.rows import Rows


def test_ids_are_those_of_the_server(db: psycopg.Connection[Any]) -> None:
    chance = random.Random(5)
    # Moments where a rounding in another way would show, and beyond what an id can hold.
    moments = [chance.randrange(0, 4_000_000_000_000_000) for _ in range(2000)]
    moments += [n * 1000 + 500 for n in range(1_700_000_000_000, 1_700_000_000_300)]
    moments += [-5_000_000, 0, 300_000_000_000_000_000]
    numbers = [chance.randrange(1, 1 << 50) for _ in moments]
    salt = chance.randrange(1 << 62)
    expected = db.execute(
        "select pgmb.derive_id(seq, timestamptz 'epoch' + at * interval '1 microsecond', %s)::text"
        " from unnest(%s::bigint[], %s::bigint[]) with ordinality u (seq, at, n) order by n",
        [salt, numbers, moments],
    ).fetchall()
    given = {place: uuid4() for place in (0, 7, 1000)}
    ids = [given[place].bytes if place in given else None for place in range(len(moments))]
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array(numbers, pa.int64()),
            pa.array(ids, pa.binary(16)),
            pa.array(moments, pa.timestamp("us", tz="UTC")),
        ],
        names=["seq", "id", "published_at"],
    )
    rows = Rows(arrow_schema(["position", "id"]), "main", "here", salt)
    for start in (0, 500):
        made = rows.of(batch.slice(start))
        assert made.column("id").to_pylist() == [
            str(given[place]) if place in given else expected[place][0]
            for place in range(start, len(moments))
        ]
        assert set(made.column("position").to_pylist()) == {"here"}
    assert rows.of(batch.slice(0, 1)).column("id").to_pylist() == [str(given[0])]
    assert rows.of(batch.slice(0, 0)).num_rows == 0
