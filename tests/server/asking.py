"""An application, and a client that asks it without a network between them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import psycopg

from pgmb._core.keys import KEY, digest, generate
from pgmb.server.application import Application


def make_key(dsn: str, name: str, *scopes: str) -> str:
    """A key that is good for these scopes."""
    text = generate(KEY)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("select pgmb.create_api_key(%s, %s, %s)", (name, digest(text), list(scopes)))
    return text


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@asynccontextmanager
async def asking(application: Application, **options: Any) -> AsyncGenerator[httpx.AsyncClient]:
    """Started, and closed at the end."""
    transport = httpx.ASGITransport(application)
    async with (
        application.lifespan(),
        httpx.AsyncClient(transport=transport, base_url="http://pgmb.test", **options) as client,
    ):
        yield client


def metrics(text: str, names: Sequence[str] = ()) -> dict[str, float]:
    """The samples of a scrape, by name and labels as they are written."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            if not names or name.partition("{")[0] in names:
                found[name] = float(value)
    return found
