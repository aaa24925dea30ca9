"""Projections for tests and faults: events of which some do not fit, an erasure, and a checker.

The checker is DuckDB, which reads the events of the lake and extracts fields by its own functions; no code of
the product decides what fits.
"""

from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys
import time
from typing import Any

import psycopg
import pyarrow.compute
import pyarrow.parquet
from deltalake import DeltaTable, Schema
from deltalake.transaction import AddAction, RemoveAction

from pgmb.lake.delta import files_of
from pgmb.lake.events import EVENTS, TABLE_SCHEMA
from pgmb.lake.projection.columns import parse_columns
from pgmb.lake.projection.declaration import Declaration
from pgmb.lake.storage import Storage
from pgmb.lake.task import DateWriter, by_day

pc: Any = pyarrow.compute
pq: Any = pyarrow.parquet

COLUMNS = (
    "n bigint not null, total decimal(10,2), paid boolean, city string from customer.city, at timestamp,"
    " extra json"
)
ORDERS = Declaration(name="orders", topics=["order.*"], columns=parse_columns(COLUMNS))

_GOOD: dict[str, list[Any]] = {
    "total": [1, 12.5, "3.10", 99999999.99, None],
    "paid": [True, False],
    "customer": [{"city": "Łódź"}, {"city": None}, {}, None, {"city": "x", "zip": 7}],
    "at": ["2026-01-31T10:00:00Z", "2026-01-31T10:00:00.123456+02:00"],
    "extra": [{"a": [1, 2.5, None]}, "text", 7, True, None],
    "note": ["not declared", 5],
}
_BAD: dict[str, list[Any]] = {
    "n": ["7", 1.5, None, 2**63, [1]],
    "total": [1.234, "twelve", True, 100000000, {}],
    "paid": ["true", 1],
    "customer": ["city", {"city": 3}, [1]],
    "at": ["yesterday", "2026-01-31T10:00:00", 1769853600],
}
_NOT_OBJECTS = ["null", "[1]", '"order"', "17"]

# In a process of its own: at its end DuckDB tells at length what it leaked.
_BY_DUCKDB = """
import pickle, sys, duckdb
duckdb.sql("set timezone = 'UTC'")
# Queries of seconds would write a progress bar to stdout.
duckdb.sql("set enable_progress_bar = false")
queries = pickle.load(sys.stdin.buffer)
sys.stdout.buffer.write(pickle.dumps([duckdb.sql(query).fetchall() if query else [] for query in queries]))
"""
_EXPECTED = r"""
with events as (
  select *, coalesce(json_type(payload), 'NULL') = 'OBJECT' object, json_type(payload, '$.n') n_type,
    json_type(payload, '$.total') total_type, json_extract_string(payload, '$.total') total_text,
    json_type(payload, '$.paid') paid_type, json_type(payload, '$.customer') customer_type,
    json_type(payload, '$.customer.city') city_type, json_type(payload, '$.at') at_type,
    json_extract_string(payload, '$.at') at_text, json_type(payload, '$.extra') extra_type
  from read_parquet({files}) where regexp_full_match(topic, 'order\.[^.]+')
    and coalesce(headers, '') not like '{{"pgmb-erased":%'
), fitting as (
  select *,
    object and n_type in ('BIGINT', 'UBIGINT')
      and try_cast(json_extract_string(payload, '$.n') as bigint) is not null n_fits,
    object and (total_type is null or total_type = 'NULL' or total_type in ('BIGINT', 'UBIGINT', 'DOUBLE', 'VARCHAR')
      and coalesce(try_cast(total_text as decimal(38, 10)) = try_cast(total_text as decimal(10, 2)), false)) total_fits,
    object and coalesce(paid_type in ('BOOLEAN', 'NULL'), true) paid_fits,
    object and coalesce(customer_type in ('OBJECT', 'NULL'), true) and coalesce(city_type in ('VARCHAR', 'NULL'), true) city_fits,
    object and (at_type is null or at_type = 'NULL' or at_type = 'VARCHAR'
      and regexp_full_match(at_text, '\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)')) at_fits
  from events
)
select seq, id, topic, key, published_at,
  case when n_fits then cast(json_extract_string(payload, '$.n') as bigint) end,
  case when total_fits and total_type <> 'NULL' then cast(total_text as decimal(10, 2)) end,
  case when paid_fits and paid_type <> 'NULL' then json_extract_string(payload, '$.paid') = 'true' end,
  case when city_fits and city_type <> 'NULL' then json_extract_string(payload, '$.customer.city') end,
  case when at_fits and at_type <> 'NULL' then cast(at_text as timestamptz) end,
  case when object and extra_type <> 'NULL' then cast(json_extract(payload, '$.extra') as varchar) end,
  case when not (n_fits and total_fits and paid_fits and city_fits and at_fits) then payload end,
  not (n_fits and total_fits and paid_fits and city_fits and at_fits),
  cast(published_at as date)
from fitting order by seq
"""  # noqa: E501 - SQL
_HELD = """
select event_seq, event_id, event_topic, event_key, event_published_at, n, total, paid, city, "at", extra,
  rescued, rescue_reason is not null, cast(event_date as date)
from read_parquet({files}, hive_partitioning = true) order by event_seq
"""


def payload(chance: random.Random, number: int) -> str:
    """The payload of an order; of every fifth one something does not fit."""
    given = {"n": number, **{name: chance.choice(values) for name, values in _GOOD.items()}}
    for name in chance.sample(list(given)[1:], chance.randrange(3)):
        del given[name]
    if chance.random() < 0.2:
        if chance.random() < 0.1:
            return chance.choice(_NOT_OBJECTS)
        name = chance.choice(list(_BAD))
        given[name] = chance.choice(_BAD[name])
    return json.dumps(given, separators=(",", ":"), ensure_ascii=False)


def publish(db: psycopg.Connection[Any], chance: random.Random, events: int, *, base: int = 0) -> None:
    """Publish orders and other events; some were published on another day."""
    rows = [
        (
            chance.choice(["order.paid", "order.sent", "order.paid.late", "customer.moved"]),
            f"k{chance.randrange(9)}",
            payload(chance, base + number),
            chance.randrange(3) if chance.random() < 0.1 else 0,
        )
        for number in range(1, events + 1)
    ]
    with db.cursor() as cursor:
        cursor.executemany(
            "insert into pgmb.log_main (topic, key, payload, published_at)"
            " values (%s, %s, %s, now() - %s * interval '1 day')",
            rows,
        )


Rows = list[tuple[Any, ...]]


def expected_and_held(lake: str, table: str) -> tuple[Rows, Rows]:
    """The rows that a projection of ORDERS must have, recomputed from the events of a lake, and those of its
    table."""
    files = DeltaTable(lake).file_uris(), DeltaTable(table).file_uris()
    queries = [
        query.format(files=some) if some else None
        for query, some in zip((_EXPECTED, _HELD), files, strict=True)
    ]
    done = subprocess.run(
        [sys.executable, "-c", _BY_DUCKDB], input=pickle.dumps(queries), capture_output=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr.decode()[-2000:])
    wanted, found = pickle.loads(done.stdout)
    return wanted, found


def erase(url: str, key: str) -> int:
    """Erase the events of a key from a lake on disk: files without them replace those that had them, which
    are removed. Returns how many events there were."""
    storage = Storage.at(url)
    table = DeltaTable(url)
    actions: list[AddAction | RemoveAction] = []
    erased, gone = 0, []
    for file in files_of(table, -1, 1 << 62):
        found = pq.read_table(f"{url}/{file.path}", partitioning=None)
        kept = found.filter(pc.not_equal(found["key"], key))
        if kept.num_rows == found.num_rows:
            continue
        erased += found.num_rows - kept.num_rows
        gone.append(file.path)
        actions.append(RemoveAction(file.path, True, int(time.time() * 1000)))
        for batch in kept.combine_chunks().to_batches():
            for day, events in by_day(batch, EVENTS.at):
                writer = DateWriter(storage, EVENTS, day, file.lowest_seq, 1 << 40)
                writer.add(events)
                for made in writer.finish():
                    statistics = {
                        "numRecords": made.rows,
                        "minValues": made.lowest,
                        "maxValues": made.highest,
                        "nullCount": dict.fromkeys(EVENTS.statistics, 0),
                    }
                    actions.append(
                        AddAction(
                            path=made.path, size=made.bytes, partition_values={"date": made.date},
                            modification_time=made.written_at, data_change=True, stats=json.dumps(statistics),
                        )
                    )  # fmt: skip
    if actions:
        table.create_write_transaction(
            actions, "append", Schema.from_arrow(TABLE_SCHEMA), partition_by=["date"]
        )
    for path in gone:
        (storage.folder / path).unlink()  # type: ignore[operator]
    return erased
