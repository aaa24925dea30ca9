"""Tasks wait for a database that is away, as the driver does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import adbc_driver_manager
import psycopg
import pytest
from pyspark.sql.types import StructType

from harness.stalling import StallingProxy
from pgmb.spark import connections
from pgmb.spark.source.readers import BatchReader


@pytest.fixture
def proxy(dsn: str) -> Iterator[StallingProxy]:
    with StallingProxy(dsn) as started:
        yield started


def answer(url: str) -> int:
    with connections.transaction(url) as cursor:
        cursor.execute("select 1")
        return int(cursor.fetchone()[0])


def restore_after_two(proxy: StallingProxy) -> None:
    while (proxy.refused or 0) < 2:
        time.sleep(0.02)
    proxy.restore()


def test_a_task_waits_for_a_database_that_comes_back(proxy: StallingProxy) -> None:
    assert answer(proxy.dsn) == 1
    proxy.cut()
    threading.Thread(target=restore_after_two, args=[proxy], daemon=True).start()
    assert answer(proxy.dsn) == 1


def test_a_task_does_not_wait_for_ever(proxy: StallingProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "RECONNECT_SECONDS", 0.1)
    assert answer(proxy.dsn) == 1
    proxy.cut()
    with pytest.raises(adbc_driver_manager.Error):
        answer(proxy.dsn)


def test_a_database_that_was_never_reached_is_not_waited_for(proxy: StallingProxy) -> None:
    proxy.cut()
    with pytest.raises(adbc_driver_manager.Error):
        answer(proxy.dsn)
    assert proxy.refused == 1


def test_a_new_worker_waits_for_the_database_that_its_driver_planned_with(
    proxy: StallingProxy, db: psycopg.Connection[Any]
) -> None:
    db.execute("select pgmb.publish('t', '1')")
    reader = BatchReader({"url": proxy.dsn}, StructType().add("seq", "long"))
    (partition,) = reader.partitions()
    assert proxy.dsn not in connections._reached
    proxy.cut()
    threading.Thread(target=restore_after_two, args=[proxy], daemon=True).start()
    assert sum(batch.num_rows for batch in reader.read(partition)) == 1
