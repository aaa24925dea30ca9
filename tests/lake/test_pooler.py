"""Through a transaction pooler, archived history is read, and nothing is left in sessions that others use."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from harness.lake import Here
from harness.pgbouncer import PgBouncer
from harness.server import Server
from pgmb.errors import HistoryGone, WrongServer
from pgmb.lake.archive import Archiver
from pgmb.spark.source.offsets import ShardOffset
from pgmb.spark.source.shards import ShardLog
from tests.lake.conftest import Lake


@pytest.fixture
def pooled(server: Server, lake: Lake) -> Iterator[str]:
    """All clients share one session of the server."""
    with PgBouncer.start(server, settings={"default_pool_size": 1}) as bouncer:
        yield bouncer.dsn(lake.db.info.dbname)


def test_one_query_reads_the_lake_and_the_next_one_does_not(lake: Lake, pooled: str) -> None:
    lake.publish(10)
    log, other = ShardLog(pooled, "main", read_lake=True), ShardLog(pooled, "main")
    start = ShardOffset(log.frontier().position)
    lake.publish(100)
    lake.archive()
    lake.age()
    assert lake.dropped() == [0, 1]
    assert log.advance(start, log.frontier(), None, 1000, 1).numbers >= 100
    with pytest.raises(HistoryGone):
        other.advance(start, other.frontier(), None, 1000, 1)
    log.close()
    other.close()


def test_an_archiver_refuses_a_pooler_where_its_lock_would_stay(lake: Lake, pooled: str) -> None:
    lake.publish(10)
    with pytest.raises(WrongServer, match="pooler"):
        list(Archiver(pooled, "main", Here()).archive())
    with psycopg.connect(pooled) as connection:
        locks = connection.execute("select count(*) from pg_locks where locktype = 'advisory'")
        assert locks.fetchone() == (0,)
