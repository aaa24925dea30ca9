"""Services connect as a role with pgmb_admin, pgmb_publisher and pgmb_consumer, and not as the owner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import conninfo, sql

from harness.server import Server
from pgmb import aconnect
from pgmb.services.ticker import Ticker
from tests.conftest import Connect
from tests.server.rest.api import opened


@pytest.fixture
def serving_dsn(server: Server, dsn: str, connect: Connect) -> Iterator[str]:
    name = f"serving_{uuid4().hex[:8]}"
    role = sql.Identifier(name)
    server.admin().execute(sql.SQL("create role {} login").format(role))
    server.admin().execute(sql.SQL("grant pgmb_admin, pgmb_publisher, pgmb_consumer to {}").format(role))
    yield conninfo.make_conninfo(dsn, user=name)
    connect(autocommit=True).execute(sql.SQL("drop owned by {}").format(role))
    server.admin().execute(sql.SQL("drop role {}").format(role))


async def test_the_http_server_publishes_receives_and_acks(serving_dsn: str) -> None:
    async with opened(serving_dsn) as api:
        await api.done("POST", "/v1/queues", json={"name": "q"})
        await api.publish(1)
        lease = (await api.receive())["lease"]
        assert await api.done("POST", f"/v1/queues/q/leases/{lease}/ack", json={}) == {"count": 1}


async def test_the_ticker_ticks(serving_dsn: str, db: psycopg.Connection[Any]) -> None:
    async with await aconnect(serving_dsn) as broker:
        await broker.publish("a", 1)
        await Ticker().turn(broker)
    assert db.execute("select count(*) from pgmb.tick").fetchone() == (1,)
