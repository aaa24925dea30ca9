"""Promise: a query whose database was restored elsewhere from a dump refuses to go on, and says why."""

from __future__ import annotations

import subprocess
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from harness.postgres import Server, binaries
from pgmb.errors import PgmbError
from tests.conftest import FreshServer
from tests.spark.stored import ByHand, Stored

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.slow, pytest.mark.once(18), pytest.mark.timeout(600)]


def restored(dsn: str, into: Server, dump: Path) -> str:
    """The same database in another cluster, under the same name."""
    name = conninfo_to_dict(dsn)["dbname"]
    into.admin().execute(sql.SQL("create database {}").format(sql.Identifier(str(name))))
    programs = binaries(into.major)
    roles = subprocess.run(
        [programs / "pg_dumpall", "--roles-only", "-d", dsn], check=True, capture_output=True
    ).stdout
    # Not all of them are new there.
    subprocess.run(
        [programs / "psql", "-X", "-q", "-d", into.dsn()], input=roles, check=True, capture_output=True
    )
    subprocess.run([programs / "pg_dump", "-Fc", "-f", dump, "-d", dsn], check=True, capture_output=True)
    subprocess.run(
        [programs / "pg_restore", "--exit-on-error", "-d", into.dsn(str(name)), dump],
        check=True,
        capture_output=True,
    )
    return into.dsn(str(name))


# `make score-spark` has it, on 15: the build of 18 has no pg_dump.
@pytest.mark.minutes
def test_a_query_refuses_a_restored_database(
    spark: SparkSession, dsn: str, pg_major: int, fresh_server: FreshServer, tmp_path: Path
) -> None:
    if not (binaries(pg_major) / "pg_dump").exists():
        pytest.skip("the build of this version has no pg_dump")
    with psycopg.connect(dsn, autocommit=True) as db:
        db.execute("select pgmb.publish('t', '1')")
        Stored(spark, tmp_path, url=dsn, readerName="store").drain()
        db.execute("select pgmb.publish('t', '2')")
    copy = restored(dsn, fresh_server(), tmp_path / "dump")

    going_on = Stored(spark, tmp_path, url=copy, readerName="store")
    with pytest.raises(Exception, match="restored or copied") as refused:
        going_on.drain()
    assert "rebase" in str(refused.value) or "new checkpoint" in str(refused.value)

    with psycopg.connect(copy, autocommit=True) as db:
        db.execute("select pgmb.rebase()")
        db.execute("select pgmb.publish('t', '3')")
    with pytest.raises(Exception, match="new checkpoint"):
        going_on.drain()
    assert going_on.payloads() == [1]

    # The log itself is whole: a new checkpoint reads all of it.
    anew = Stored(spark, tmp_path / "anew", url=copy)
    anew.drain()
    assert sorted(anew.payloads()) == [1, 2, 3]


def test_a_query_refuses_the_log_that_was_rebased_where_it_is(dsn: str, db: psycopg.Connection[Any]) -> None:
    """The cluster is the same, the epoch is not."""
    stored = ByHand(url=dsn)
    db.execute("select pgmb.publish('t', '1')")
    stored.drain()
    db.execute("select pgmb.rebase()")
    db.execute("select pgmb.publish('t', '2')")
    with pytest.raises(PgmbError, match="epoch") as refused:
        stored.drain()
    assert "new checkpoint" in "".join(traceback.format_exception_only(refused.value))
    assert stored.payloads() == [1]
