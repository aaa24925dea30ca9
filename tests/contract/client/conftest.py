from __future__ import annotations

from collections.abc import AsyncGenerator, Generator

import pytest

import pgmb
from tests.contract.client.adapters import AsyncClient, Client, SqlClient, SyncClient


@pytest.fixture(params=["sql", "sync", "async"])
async def client(request: pytest.FixtureRequest, dsn: str) -> AsyncGenerator[Client]:
    """The broker through plain SQL, through the synchronous client, and through the asynchronous one."""
    if request.param == "sql":
        plain = SqlClient(dsn)
        yield plain
        plain.conn.close()
    elif request.param == "sync":
        with pgmb.connect(dsn) as broker:
            yield SyncClient(broker, dsn)
    else:
        async with await pgmb.aconnect(dsn) as abroker:
            yield AsyncClient(abroker, dsn)


@pytest.fixture
def broker(dsn: str) -> Generator[pgmb.Broker]:
    with pgmb.connect(dsn) as broker:
        yield broker
