"""A request does not wait forever for a connection that gets no answer, nor keep its place in the pool."""

from __future__ import annotations

import asyncio

import pytest

from harness.stalling import StallingProxy
from pgmb.server import database
from pgmb.server.application import Application
from pgmb.server.rest import routes
from tests.server.asking import asking, bearer, make_key


@pytest.mark.parametrize("path", ["/v1/queues", "/v1/queues/q"])
async def test_a_request_on_a_dead_connection_fails_and_the_next_is_answered(
    dsn: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = make_key(dsn, "k", "operate", "inspect")
    with StallingProxy(dsn) as proxy:
        async with asking(Application(proxy.dsn, parts=[routes], max_size=1)) as client:
            created = await client.post("/v1/queues", json={"name": "q"}, headers=bearer(key))
            assert created.is_success
            proxy.stall()
            failed = 0
            async with asyncio.timeout(60):
                while True:
                    monkeypatch.setattr(database, "ANSWER_SECONDS", 0.3 * 2**failed)
                    answer = await client.get(path, headers=bearer(key))
                    if answer.is_success:
                        break
                    assert answer.status_code == 503
                    failed += 1
    assert failed
