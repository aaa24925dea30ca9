"""Told to stop: whoever listens is sent away in a manner that has a browser come back."""

from __future__ import annotations

from pgmb.server import create_app
from tests.server.asking import asking, bearer, make_key


async def test_a_reader_that_comes_while_it_drains_is_told_to_come_back(dsn: str) -> None:
    """A browser's EventSource gives up on any other status than 200."""
    key = make_key(dsn, "reads", "read:main")
    application = create_app(dsn)
    async with asking(application, headers=bearer(key), timeout=30) as client:
        await application.drain()
        told = await client.get("/v1/streams/main/events")
        assert (told.status_code, told.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert told.text.startswith("retry: ")
        assert (await client.get("/v1/streams/other/events")).status_code == 403, "known before"
