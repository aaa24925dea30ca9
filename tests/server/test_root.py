"""The way in."""

from __future__ import annotations

from pgmb.server import create_app
from tests.server.asking import asking


async def test_browsers_go_to_the_dashboard_and_others_are_told_what_there_is(dsn: str) -> None:
    async with asking(create_app(dsn)) as client:
        page = await client.get("/", headers={"Accept": "text/html,*/*"})
        assert (page.status_code, page.headers["location"]) == (303, "/ui")
        told = (await client.get("/")).json()
        assert (await client.get(told["openapi"])).status_code == 200
        assert (await client.get(told["live"])).status_code == 200
