"""Promise: with readUrl a standby serves the reads, also while it lags behind, and nothing is missed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from faults.crew import Crew
from faults.spark.traffic import account
from faults.spark.writers import RecordingWriter, prepare_record, recorded
from harness.postgres import Server
from harness.waiting import until_true
from pgmb import schema
from pgmb.errors import PgmbError
from tests.spark.stored import ByHand, Stored

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.once(18), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def pair(pg_major: int, prepared: Server) -> Iterator[tuple[Server, Server]]:
    with Server.start(pg_major, name="primary", memory=True, copy_of=prepared) as primary:
        schema.install(primary.dsn())
        with primary.connect() as db:
            prepare_record(db)
        with primary.standby() as standby:
            yield primary, standby


def reads(server: Server) -> int:
    """How many rows of the log this server has given out."""
    with server.connect() as db:
        row = db.execute(
            "select coalesce(sum(idx_tup_fetch + seq_tup_read), 0) from pg_stat_user_tables"
            " where relname like 'segment%'"
        ).fetchone()
        assert row is not None
        return int(row[0])


def test_a_replica_serves_the_reads_while_writers_run(
    spark: SparkSession, pair: tuple[Server, Server], tmp_path: Path
) -> None:
    primary, standby = pair
    stored = Stored(
        spark,
        tmp_path,
        url=primary.dsn(),
        readUrl=standby.dsn(),
        maxEventsPerTrigger=100,
        readerName="store",
        replicaTimeout="120s",
    )
    quiet, gate, crew = threading.Event(), threading.Event(), Crew()
    gate.set()
    seed = random.randrange(1 << 30)
    writers = [
        RecordingWriter(number, primary.dsn(), gate=gate, delay=1.0, size=6, seed=seed, finished=quiet)
        for number in range(1, 4)
    ]
    writing = [crew.start(f"writer {writer.number}", writer.run) for writer in writers]
    query = stored.start("1 second")
    try:
        _wait_for(lambda: len(stored.payloads()) > 40, query)
        with standby.connect() as replica:
            replica.execute("select pg_wal_replay_pause()")
            # Events are committed that the replica does not have: the query waits for it.
            row = primary.admin().execute("select count(*) from recorded").fetchone()
            assert row is not None
            known = row[0]
            _wait_for(
                lambda: (
                    primary.admin().execute("select count(*) > %s from recorded", [known + 20]).fetchone()
                    == (True,)
                ),
                query,
            )
            replica.execute("select pg_wal_replay_resume()")
        before = len(stored.payloads())
        _wait_for(lambda: len(stored.payloads()) > before + 40, query)
    finally:
        quiet.set()
        query.stop()
    crew.join(*writing)
    stored.drain()
    with primary.connect() as db:
        judged = account(stored.payloads(), recorded(db))
    assert judged.clean, f"{judged}, seed {seed}"
    # Sessions report what they read some seconds later.
    until_true(lambda: reads(standby) > judged.committed / 2)


def test_a_replica_that_stays_behind_is_told(pair: tuple[Server, Server]) -> None:
    primary, standby = pair
    stored = ByHand(url=primary.dsn(), readUrl=standby.dsn(), stream="behind")
    with primary.connect() as db, standby.connect() as replica:
        db.execute("select pgmb.create_stream('behind')")
        db.execute("select pgmb.publish('t', '1', stream => 'behind')")
        db.commit()
        stored.drain()
        replica.execute("select pg_wal_replay_pause()")
        replica.commit()
        db.execute("select pgmb.publish('t', '2', stream => 'behind')")
        db.commit()
        try:
            with pytest.raises(PgmbError, match="has not yet replayed"):
                stored.drain(replicaTimeout="1s")
        finally:
            replica.execute("select pg_wal_replay_resume()")
    stored.drain()
    assert stored.payloads() == [1, 2]


def _wait_for(condition: Any, query: Any) -> None:
    deadline = time.monotonic() + 180
    while not condition():
        if (failure := query.exception()) is not None:
            raise failure
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.05)
