from __future__ import annotations

from collections.abc import AsyncGenerator, Generator

import pytest

import pgmb
from tests.contract.outbox.libraries import LIBRARIES, Library


@pytest.fixture(params=LIBRARIES)
async def library(
    request: pytest.FixtureRequest, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[Library]:
    """Each library with a broker beside it."""
    # These tests run inside an event loop, which Django's synchronous side refuses otherwise.
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
    opened = LIBRARIES[request.param](dsn)
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
def broker(dsn: str) -> Generator[pgmb.Broker]:
    with pgmb.connect(dsn) as broker:
        broker.create_queue("q")
        yield broker


@pytest.fixture
async def abroker(dsn: str) -> AsyncGenerator[pgmb.AsyncBroker]:
    async with await pgmb.aconnect(dsn) as broker:
        await broker.create_queue("q")
        yield broker
