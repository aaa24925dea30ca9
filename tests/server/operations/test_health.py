"""/livez and /readyz: who should be asked, and why not."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest

import pgmb
from harness.postgres import Server
from pgmb import aconnect
from pgmb.server import create_app
from pgmb.server.tasks import SharedResult
from tests.server.asking import asking


async def test_it_is_ready_where_the_schema_fits_and_writes_are_taken(dsn: str) -> None:
    application = create_app(dsn)
    async with asking(application) as client:
        live = await client.get("/livez")
        assert (live.status_code, live.text) == (200, "ok\n")
        ready = await client.get("/readyz")
        assert ready.status_code == 200
        assert ready.json() == {
            "ready": True,
            "checks": {
                "database": {"ok": True},
                "schema": {"ok": True, "detail": f"version {pgmb.schema.VERSION}"},
                "primary": {"ok": True},
                "progress": {"ok": True},
            },
        }
        assert ready.headers["cache-control"] == "no-store"
        await application.drain()
        ended = await client.get("/readyz")
        assert ended.status_code == 503
        assert ended.json()["checks"]["staying"]["ok"] is False
        assert (await client.get("/livez")).status_code == 200


async def test_without_a_ticker_it_says_so_and_stays_ready(dsn: str, db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.publish('a', '1')")
    db.execute("update pgmb.log_main set published_at = published_at - interval '10 minutes'")
    async with asking(create_app(dsn)) as client:
        stuck = await client.get("/readyz")
        assert stuck.status_code == 200, "requests are served, here as well as elsewhere"
        assert stuck.json()["checks"]["progress"]["ok"] is False
        assert "is a ticker running?" in stuck.json()["checks"]["progress"]["detail"]
        db.execute("select pgmb.tick('main')")

        async def moves() -> None:
            while not (await client.get("/readyz")).json()["checks"]["progress"]["ok"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

        await asyncio.wait_for(moves(), 30)


async def test_a_server_that_takes_no_writes_is_not_ready(dsn: str) -> None:
    async with (
        await aconnect(dsn, options="-c default_transaction_read_only=on") as broker,
        asking(create_app(broker=broker)) as client,
    ):
        refused = await client.get("/readyz")
        assert refused.status_code == 503
        assert refused.json()["checks"]["primary"] == {"ok": False, "detail": "the server takes no writes"}


async def test_another_version_of_the_schema_is_named(dsn: str, db: psycopg.Connection[Any]) -> None:
    async with asking(create_app(dsn)) as client:
        db.execute("update pgmb.installation set version = version + 1")
        assert (await client.get("/readyz")).json()["checks"]["schema"]["ok"] is True
        db.execute("update pgmb.installation set version = version + 1")
        await asyncio.sleep(1.1)
        found = (await client.get("/readyz")).json()["checks"]["schema"]
        assert found["ok"] is False
        assert f"version {pgmb.schema.VERSION} is needed, it is at version" in found["detail"]


async def test_without_a_database_it_lives_and_says_so(dsn: str, server: Server) -> None:
    """Nothing of the address is told: whoever asks need not have a key."""
    async with (
        await aconnect(dsn, min_size=0, max_size=1, max_wait=2) as broker,
        asking(create_app(broker=broker)) as client,
        broker.connection(),
    ):
        # The only connection is taken.
        gone = await client.get("/readyz")
        assert (gone.status_code, (await client.get("/livez")).status_code) == (503, 200)
        assert gone.json() == {
            "ready": False,
            "checks": {"database": {"ok": False, "detail": "the database does not answer"}},
        }


async def test_a_herd_shares_one_look() -> None:
    looks = 0
    now = 0.0

    async def look() -> int:
        nonlocal looks
        looks += 1
        await asyncio.sleep(0)
        return looks

    shared = SharedResult(look, lasts=1.0, clock=lambda: now)
    assert await asyncio.gather(*(shared.get(5) for _ in range(100))) == [1] * 100
    now = 0.9
    assert await shared.get(5) == 1
    now = 2.0
    assert await asyncio.gather(*(shared.get(5) for _ in range(100))) == [2] * 100


async def test_a_look_that_hangs_holds_nobody_and_is_not_begun_twice() -> None:
    begun = 0

    async def look() -> None:
        nonlocal begun
        begun += 1
        await asyncio.Event().wait()

    shared = SharedResult(look)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await shared.get(0.01)
    assert begun == 1
    await shared.close()


async def test_a_look_that_fails_fails_for_all_who_share_it() -> None:
    async def look() -> None:
        raise ValueError("no")

    shared = SharedResult(look)
    found = await asyncio.gather(*(shared.get(5) for _ in range(3)), return_exceptions=True)
    assert [type(error) for error in found] == [ValueError] * 3
