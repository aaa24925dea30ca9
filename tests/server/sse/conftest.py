"""A key that may read, and a server to read from."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import psycopg
import pytest

from pgmb.server import sse
from pgmb.server.application import Application
from tests.server.hosting import served
from tests.server.sse.client import make_key


@pytest.fixture
def key(db: psycopg.Connection[Any]) -> str:
    return make_key(db, "read:main")


@pytest.fixture
async def port(dsn: str) -> AsyncGenerator[int]:
    async with served(Application(dsn, parts=[sse.routes])) as port:
        yield port
