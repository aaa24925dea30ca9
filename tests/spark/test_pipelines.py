"""For pipelines of one's own: payloads that do not fit are rescued, batches are merged once, and queries hand
over at an exact border."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from pgmb.errors import Conflict
from pgmb.spark import border, decode, read_stream, upsert
from pgmb.spark.pipelines import merge_rows, newest_rows
from tests.spark.stored import ByHand, read_seqs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DB = psycopg.Connection[Any]


def test_payloads_that_do_not_fit_are_rescued(spark: SparkSession) -> None:
    payloads = ['{"n": 1}', '{"n": "one", "t": "x"}', "[1]", "17", "null", "{}", '{"n": null}']
    frame = spark.createDataFrame([(payload,) for payload in payloads], "payload string")
    found = decode(frame, "n int, t string", malformed="rescue").select("payload.n", "payload.t", "rescued")
    assert [tuple(row) for row in found.collect()] == [
        (1, None, None),
        (None, "x", '{"n": "one", "t": "x"}'),
        (None, None, "[1]"),
        (None, None, "17"),
        (None, None, "null"),
        (None, None, None),
        (None, None, None),
    ]
    broken = spark.createDataFrame([('{"a": 1}',), ("{",)], "payload string")
    variants = decode(broken, "variant", malformed="rescue").selectExpr("payload is null", "rescued")
    assert [tuple(row) for row in variants.collect()] == [(False, None), (True, "{")]


def stored(url: Path) -> dict[str, int]:
    rows = DeltaTable(url).to_pyarrow_table().to_pylist()
    assert len({row["key"] for row in rows}) == len(rows)
    return {row["key"]: row["seq"] for row in rows}


def test_batches_are_merged_once_and_queries_hand_over_at_a_border(
    spark: SparkSession, dsn: str, db: DB, tmp_path: Path
) -> None:
    publish = (
        "insert into pgmb.log_main (topic, key, payload)"
        " select 'order', 'k' || n %% 5, json_build_object('n', n) from generate_series(1, %s) n"
    )
    db.execute(publish, [20])
    table, checkpoint = tmp_path / "table", tmp_path / "checkpoint"

    def run() -> None:
        frame = read_stream(spark, dsn, startingOffsets="earliest", maxEventsPerTrigger=7).select(
            "key", "seq", "payload", "published_at"
        )
        query = frame.writeStream.foreachBatch(merged).option("checkpointLocation", str(checkpoint))
        query.trigger(availableNow=True).start().awaitTermination(120)

    merged = upsert(str(table), ["key"], "orders")
    run()
    newest = dict(db.execute("select key, max(seq) from pgmb.log_main group by 1").fetchall())
    assert stored(table) == newest
    version = DeltaTable(table).version()
    assert version == 3, "one commit a batch, after that which created the table"
    # Killed between the commits of the table and of the checkpoint: the last batch is repeated.
    (checkpoint / "commits" / "2").unlink()
    (checkpoint / "commits" / ".2.crc").unlink()
    run()
    assert (stored(table), DeltaTable(table).version()) == (newest, version)
    borders = []
    for number in range(3):
        copy = tmp_path / f"copy {number}"
        shutil.copytree(checkpoint, copy)
        for later in range(number + 1, 3):
            (copy / "commits" / str(later)).unlink()
        borders.append(border(str(copy)))
    db.execute(publish, [4])

    seqs = partial(read_seqs, url=dsn)
    assert seqs(endingOffsets=borders[0]) == [*range(1, 8)], "within a batch that a limit has cut"
    assert seqs(startingOffsets=borders[0], endingOffsets=borders[1]) == [*range(8, 15)]
    assert seqs(startingOffsets=borders[0]) == [*range(8, 25)], "and what came after that batch"
    assert seqs(startingOffsets=borders[1], endingOffsets=borders[2]) == [*range(15, 21)]
    assert seqs(startingOffsets=borders[2]) == [*range(21, 25)]
    assert border(str(checkpoint), "main") == borders[2]
    further = ByHand(url=dsn, startingOffsets=borders[1])
    further.drain()
    assert sorted(seq for _, seq, _ in further.rows) == [*range(15, 25)], "another query goes on from there"
    with pytest.raises(ValueError, match="has 0 sources of stream other"):
        border(str(checkpoint), "other")
    with pytest.raises(ValueError, match="is committed yet"):
        border(str(tmp_path / "nothing"))
    assert json.loads(borders[0])["stream"] == "main"


def test_an_older_row_does_not_replace_a_newer_one(tmp_path: Path) -> None:
    """A query with a new checkpoint merges everything again, as another application."""
    url = str(tmp_path / "table")
    newer, older = (pa.table({"key": ["a", key], "seq": [seq, 1]}) for key, seq in (("b", 9), ("c", 8)))
    assert merge_rows(url, newer, ["key"], "first", 0, "seq")
    assert not merge_rows(url, newer.take([1, 0]), ["key"], "first", 0, "seq"), "that batch was merged"
    assert merge_rows(url, older, ["key"], "second", 0, "seq")
    assert stored(tmp_path / "table") == {"a": 9, "b": 1, "c": 1}
    assert merge_rows(url, older, ["key"], "third", 0, None)
    assert stored(tmp_path / "table") == {"a": 8, "b": 1, "c": 1}, "a later batch wins"


def test_a_batch_of_an_older_checkpoint_is_merged_or_refused(tmp_path: Path) -> None:
    """Its number was committed, with other rows."""

    def rows(*keys: str, seq: int) -> Any:
        return pa.table({"key": list(keys), "seq": [seq] * len(keys)})

    ordered, unordered = str(tmp_path / "ordered"), str(tmp_path / "unordered")
    for url, latest in ((ordered, "seq"), (unordered, None)):
        for batch in range(3):
            assert merge_rows(url, rows(f"k{batch}", "last", seq=batch), ["key"], "app", batch, latest)
        for batch in range(3):
            same = rows(f"k{batch}", "last", seq=batch)
            assert not merge_rows(url, same, ["key"], "app", batch, latest), "the same rows change nothing"
    assert merge_rows(ordered, rows("k1", "new", "last", seq=1), ["key"], "app", 1, "seq")
    assert stored(tmp_path / "ordered") == {"k0": 0, "k1": 1, "new": 1, "k2": 2, "last": 2}
    assert not merge_rows(ordered, rows("k2", "last", seq=2), ["key"], "app", 2, "seq")
    with pytest.raises(Conflict, match="batch 1 of 'app' holds other rows than before, and 2 is committed"):
        merge_rows(unordered, rows("k1", "new", "last", seq=1), ["key"], "app", 1, None)
    # No later batch was committed.
    assert merge_rows(unordered, rows("k2", "new", "last", seq=3), ["key"], "app", 2, None)
    assert stored(tmp_path / "unordered") == {"k0": 0, "k1": 1, "k2": 3, "new": 3, "last": 3}


def test_a_batch_has_one_row_for_each_key() -> None:
    rows = pa.table({"key": ["a", "b", "a"], "seq": [3, 1, 2], "value": ["new", "b", "old"]})
    assert sorted(newest_rows(rows, ["key"], "seq").to_pydict()["value"]) == ["b", "new"]
    with pytest.raises(ValueError, match="not unique"):
        newest_rows(rows, ["key"], None)
    assert newest_rows(rows, ["key", "seq"], None).num_rows == 3
    with pytest.raises(ValueError, match="has no column other"):
        newest_rows(rows, ["other"], "seq")
    with pytest.raises(ValueError, match="column key is null in 1 rows"):
        newest_rows(pa.table({"key": pa.array([None], pa.string()), "seq": [1]}), ["key"], "seq")
    with pytest.raises(ValueError, match="at least one key"):
        upsert("x", [], "app")
