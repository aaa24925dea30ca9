"""Connecting: the schema's version, poolers, and other people's connections."""

from __future__ import annotations

import os
from datetime import datetime
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row

import pgmb
from harness.pgbouncer import PgBouncer
from harness.postgres import Server
from tests.conftest import Connect


async def test_without_the_schema_both_clients_say_how_to_get_it(empty_dsn: str) -> None:
    with pytest.raises(pgmb.SchemaVersionError, match="not installed") as caught:
        pgmb.connect(empty_dsn)
    assert "pgmb install" in (caught.value.hint or "")
    with pytest.raises(pgmb.SchemaVersionError, match="not installed"):
        await pgmb.aconnect(empty_dsn)


@pytest.mark.parametrize(("found", "fix"), [(0, "pgmb install"), (99, "Upgrade the pgmb package")])
async def test_another_version_is_refused_with_both_numbers_and_the_fix(
    dsn: str, db: psycopg.Connection[Any], found: int, fix: str
) -> None:
    db.execute("update pgmb.installation set version = %s", [found])
    with pytest.raises(
        pgmb.SchemaVersionError, match=f"version {found}.*version {pgmb.schema.VERSION}"
    ) as caught:
        pgmb.connect(dsn)
    assert fix in (caught.value.hint or "")
    with pytest.raises(pgmb.SchemaVersionError):
        await pgmb.aconnect(dsn)


def test_a_wrong_address_fails_at_once() -> None:
    with pytest.raises(psycopg.OperationalError):
        pgmb.connect("host=/nonexistent dbname=x")


def test_a_broker_shows_where_it_is_connected(dsn: str) -> None:
    parts = conninfo_to_dict(dsn)
    with pgmb.connect(f"{dsn} password=secret", max_size=4) as broker:
        shown = repr(broker)
        assert shown.startswith(f"<Broker of '{parts['dbname']}' on {parts['host']}:{parts['port']}, ")
        assert shown.endswith(" of 4 connections>")
    assert repr(broker).endswith(", closed>")
    assert "secret" not in shown


@pytest.mark.skipif(PgBouncer.program() is None, reason="pgbouncer is not installed")
async def test_everything_works_behind_a_pooler_of_transactions(server: Server, dsn: str) -> None:
    name = conninfo_to_dict(dsn)["dbname"]
    # Two server connections for the clients' many: statements of one client go here and there.
    with PgBouncer.start(server, settings={"default_pool_size": 2}) as bouncer:
        pooled = bouncer.dsn(str(name))
        with pgmb.connect(pooled) as broker, pgmb.connect(pooled) as other:
            broker.create_queue("q")
            for n in range(30):
                broker.publish("a", n)
                other.publish_many("a", [n])
                lease = other.receive("q")
                assert [event.payload for event in lease] == [n, n]
                assert not broker.receive("q", ack=lease.id)
            assert broker.publish_many("a", range(5000)) == 5000
            assert len(other.receive("q", 5000)) == 5000
            with broker.connection() as conn:
                assert conn.prepare_threshold is None
        async with await pgmb.aconnect(pooled, min_size=3) as abroker:
            for n in range(30):
                await abroker.publish("a", n)
            assert len(await abroker.receive("q")) == 30


def test_without_a_pooler_statements_are_prepared(broker: pgmb.Broker) -> None:
    with broker.connection() as conn:
        assert conn.prepare_threshold is not None


def test_a_callers_connection_may_have_any_settings(broker: pgmb.Broker, connect: Connect) -> None:
    broker.create_queue("q")
    own = connect(row_factory=dict_row, cursor_factory=psycopg.ClientCursor, autocommit=False)
    own.execute("set timezone = 'Asia/Tokyo'; set datestyle = 'german'; set intervalstyle = 'sql_standard'")
    given = broker.publish("a", {"é": 1}, conn=own)
    own.commit()
    lease = broker.receive("q", conn=own)
    assert (lease.events[0].id, lease.events[0].payload) == (given, {"é": 1})
    assert lease.events[0].published_at.utcoffset() is not None
    lease.ack(conn=own)
    own.commit()


async def test_a_connection_of_the_wrong_kind_is_refused(dsn: str, broker: pgmb.Broker) -> None:
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        with pytest.raises(pgmb.InvalidArgument, match="AsyncConnection"):
            broker.publish("a", 1, conn=conn)  # type: ignore[arg-type]
    latin = psycopg.connect(dsn, client_encoding="latin1")
    with latin, pytest.raises(psycopg.NotSupportedError, match="UTF-8"):
        broker.publish("a", 1, conn=latin)


def test_what_cannot_be_meant_is_refused(broker: pgmb.Broker) -> None:
    with pytest.raises(pgmb.InvalidArgument, match="time zone"):
        broker.publish("a", 1, at=datetime(2030, 1, 1))  # noqa: DTZ001
    with pytest.raises(pgmb.InvalidArgument):
        broker.publish_many("a")  # type: ignore[arg-type]
    with pytest.raises(pgmb.InvalidArgument):
        broker.publish_many([pgmb.NewEvent("a", 1)], [2])  # type: ignore[call-overload]


def test_a_claim_alone_in_its_transaction_does_not_wait_for_the_disk(
    broker: pgmb.Broker, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`durable` is false only without conn= and without ack=."""
    asked: list[bool] = []
    rows = pgmb.Broker._rows

    def noting(self: pgmb.Broker, statement: Any, conn: Any) -> Any:
        if "pgmb.receive" in statement.text:
            asked.append(statement.parameters[-1])
        return rows(self, statement, conn)

    monkeypatch.setattr(pgmb.Broker, "_rows", noting)
    broker.create_queue("q")
    broker.publish_many("a", range(3))
    lease = broker.receive("q", 1)
    broker.receive("q", 1, ack=lease)
    broker.receive("q", 1, conn=db)
    assert asked == [False, True, True]


def test_brokers_close_again_and_again(dsn: str) -> None:
    broker = pgmb.connect(dsn, application_name=f"closing {os.getpid()}")
    broker.close()
    broker.close()


async def test_the_connection_that_came_back_last_goes_out_first(dsn: str) -> None:
    async with await pgmb.aconnect(dsn, min_size=3, max_size=3) as broker:
        async with broker.connection() as one, broker.connection(), broker.connection():
            last = one.info.backend_pid
        for _ in range(4):
            async with broker.connection() as again:
                assert again.info.backend_pid == last
