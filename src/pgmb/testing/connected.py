"""An app on the test's database."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager

from pgmb.app import App


@contextmanager
def connected(app: App, dsn: str) -> Generator[App]:
    """An app on another database, for as long as this lasts."""
    before = app.dsn
    app.close()
    app.dsn = dsn
    try:
        yield app
    finally:
        app.close()
        app.dsn = before


@asynccontextmanager
async def aconnected(app: App, dsn: str) -> AsyncGenerator[App]:
    """The same inside an event loop, which also closes what `apublish` opened there."""
    with connected(app, dsn):
        try:
            yield app
        finally:
            await app.aclose()
