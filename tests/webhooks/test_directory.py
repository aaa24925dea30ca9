"""A dispatcher reads the endpoints that changed, and all of them now and then."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import psycopg

import pgmb
from pgmb.webhooks.lanes import EndpointDirectory
from pgmb.webhooks.store import EndpointRow, Store


class CountingStore(Store):
    """Keeps how many endpoints each reload read."""

    read: list[int]

    async def endpoints(self, since: datetime | None) -> list[EndpointRow]:
        rows = await super().endpoints(since)
        self.read.append(len(rows))
        return rows


async def test_endpoints_that_were_created_together_are_read_again_only_if_they_change(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    db.execute(
        "select pgmb.create_endpoint('e' || n, 'https://endpoint.example/') from generate_series(1, 5) n"
    )
    db.execute("update pgmb.endpoint set changed_at = changed_at - interval '1 minute'")
    directory = EndpointDirectory(None, lambda: 0.0)
    async with await pgmb.aconnect(dsn) as broker, broker.connection() as connection:
        store = CountingStore(connection, 10.0)
        store.read = []
        for _ in range(4):
            await directory.reload(store)
        assert store.read[0] == 5
        assert store.read[-1] == 0
        db.execute("select pgmb.alter_endpoint('e1', max_in_flight => 3)")
        await directory.reload(store)
        assert store.read[-1] == 1
        assert 3 in {lane.endpoint.max_in_flight for lane in directory.lanes.values()}
