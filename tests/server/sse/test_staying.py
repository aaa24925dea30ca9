"""While a reader stays: heartbeats, who it is, a database that goes away, an end that is announced."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from harness.stalling import StallingProxy
from pgmb import schema
from pgmb.server import sse
from pgmb.server.application import Application, Context
from pgmb.server.limits import Limits
from pgmb.server.sse import Subscription
from pgmb.server.sse import app as sse_app
from tests.conftest import FreshServer
from tests.server.hosting import served
from tests.server.sse.client import EVENTS, Client, make_key, publish


@pytest.fixture
def beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hearts beat four times a second."""
    monkeypatch.setattr(sse_app, "HEARTBEAT_EVERY", 0.25)


@pytest.mark.usefixtures("beats")
async def test_a_quiet_connection_is_kept_alive_and_its_place_young(
    dsn: str, key: str, db: psycopg.Connection[Any]
) -> None:
    async with served(Application(dsn, parts=[sse.routes])) as port:
        async with Client(port, EVENTS, key=key, topic="mine") as client:
            await client.until(lambda: client.last_id != "")
            begun = client.last_id
            publish(db, 1, 2, 3, topic="others")
            await client.until(lambda: client.last_id != begun)
            assert client.got == []
            assert client.comments >= 2
        publish(db, 4, topic="mine")
        async with Client(port, EVENTS, key=key, topic="mine", last_event_id=client.last_id) as back:
            assert await back.numbers(1) == [4]


ENDS = {
    "dropped": "select pgmb.drop_api_key('k')",
    "expired": "update pgmb.api_key set expires_at = clock_timestamp() where name = 'k'",
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("way", ["key", "ticket", "cookie", "cookie and a ticket that is none"])
async def test_what_a_key_reads_ends_within_seconds_of_it(
    dsn: str, key: str, db: psycopg.Connection[Any], way: str, end: str
) -> None:
    made: list[Context] = []

    def also(context: Context) -> list[Any]:
        made.append(context)
        return []

    other = make_key(db, "read:main", name="other")
    async with served(Application(dsn, parts=[sse.routes, also])) as port:
        access, options = made[0].access, dict[str, Any](key=key)
        holder = await access._key(key)
        assert holder is not None
        if way == "ticket":
            options = {"ticket": await access.ticket(holder, ["read:main"], timedelta(minutes=1))}
        elif way.startswith("cookie"):
            session, _ = await access.login(key) or ("", None)
            options = {"headers": {"Cookie": f"pgmb_session={session}"}}
            if "ticket" in way:
                options["ticket"] = "none"
        async with Client(port, EVENTS, **options) as client, Client(port, EVENTS, key=other) as stays:
            await client.until(lambda: client.last_id != "")
            await stays.until(lambda: stays.last_id != "")
            await asyncio.to_thread(db.execute, ENDS[end].encode())
            await asyncio.wait_for(client.ended.wait(), 10)
            publish(db, 1)
            assert await stays.numbers(1) == [1]
            assert client.messages == []


async def test_a_session_that_ends_ends_what_it_reads(dsn: str, key: str) -> None:
    made: list[Context] = []

    def also(context: Context) -> list[Any]:
        made.append(context)
        return []

    async with served(Application(dsn, parts=[sse.routes, also])) as port:
        session, _ = await made[0].access.login(key) or ("", None)
        async with Client(port, EVENTS, headers={"Cookie": f"pgmb_session={session}"}) as client:
            await client.until(lambda: client.last_id != "")
            await made[0].access.logout(session)
            await asyncio.wait_for(client.ended.wait(), 10)


async def test_a_ticket_is_good_once(dsn: str, key: str, db: psycopg.Connection[Any]) -> None:
    contexts: list[Context] = []

    def part(context: Context) -> list[Any]:
        contexts.append(context)
        return list(sse.routes(context))

    async with served(Application(dsn, parts=[part])) as port:
        access = contexts[0].access
        holder = await access._key(key)
        assert holder is not None
        ticket = await access.ticket(holder, ["read:main"], lasts=timedelta(seconds=30))
        async with Client(port, EVENTS, ticket=ticket) as client:
            assert client.status == 200
            await client.until(lambda: client.last_id != "")
            publish(db, 1)
            assert await client.numbers(1) == [1]
        async with Client(port, EVENTS, ticket=ticket) as client:
            assert client.status == 401
        async with Client(port, EVENTS, ticket=key) as client:
            assert client.status == 401, "a key is no ticket: it never stands in a URL"


async def test_whoever_is_sent_away_is_told_when_to_come_back(dsn: str, key: str) -> None:
    app = Application(dsn, parts=[sse.routes])
    async with served(app) as port, Client(port, EVENTS, key=key) as client:
        await client.until(lambda: client.last_id != "")
        await app.drain()
        await asyncio.wait_for(client.ended.wait(), 30)
        assert client.retry is not None
        async with Client(port, EVENTS, key=key) as late:
            # 503 would have a browser never come back.
            assert late.status == 200
            await asyncio.wait_for(late.ended.wait(), 30)
            assert late.retry is not None


async def test_no_more_readers_than_fit(dsn: str, key: str) -> None:
    app = Application(dsn, parts=[sse.routes], limits=Limits(clients=1))
    async with served(app) as port, Client(port, EVENTS, key=key) as client:
        await client.until(lambda: client.last_id != "")
        async with Client(port, EVENTS, key=key) as other:
            await asyncio.wait_for(other.ended.wait(), 30)
            assert other.last_id == ""


@pytest.mark.crash
async def test_a_database_that_restarts_is_waited_for(fresh_server: FreshServer) -> None:
    server = fresh_server()
    dsn = server.dsn()
    schema.install(dsn)
    with psycopg.connect(dsn, autocommit=True) as db:
        key = make_key(db, "read:main")
    async with served(Application(dsn, parts=[sse.routes])) as port, Client(port, EVENTS, key=key) as client:
        await client.until(lambda: client.last_id != "")
        with psycopg.connect(dsn, autocommit=True) as db:
            publish(db, 1)
        await client.numbers(1)
        await asyncio.to_thread(server.restart, "immediate")
        with psycopg.connect(dsn, autocommit=True) as db:
            publish(db, 2)
        assert await client.numbers(2) == [1, 2]


@pytest.mark.usefixtures("beats")
async def test_readers_stay_or_come_back_without_a_traceback_when_the_database_is_away(
    dsn: str, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that a key lets in, and those whose application asks the same database."""
    checks = 0

    async def authorize(_: Request) -> bool:
        nonlocal checks
        checks += 1
        async with await psycopg.AsyncConnection.connect(proxy.dsn) as conn:
            return bool(await conn.execute("select 1"))

    with StallingProxy(dsn) as proxy:
        own = sse.create_sse_app(proxy.dsn, authorize=authorize, subscription=lambda _: Subscription())
        async with (
            served(Application(proxy.dsn, parts=[sse.routes])) as port,
            served(own) as own_port,
            Client(port, EVENTS, key=key) as stays,
            Client(own_port, "/") as ends,
        ):
            for client in (stays, ends):
                await client.until(lambda: client.last_id != "")  # noqa: B023
            checked = checks
            await ends.until(lambda: checks > checked)
            proxy.cut()
            await asyncio.wait_for(ends.ended.wait(), 30)
            async with Client(own_port, "/") as late:
                await asyncio.wait_for(late.ended.wait(), 30)
                assert (late.status, late.retry is None) == (200, False)
            proxy.restore()
            async with Client(own_port, "/", last_event_id=ends.last_id) as back:
                await back.until(lambda: back.last_id != "")
                with psycopg.connect(dsn, autocommit=True) as db:
                    publish(db, 1)
                assert await back.numbers(1) == await stays.numbers(1) == [1]
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


async def test_an_application_decides_by_itself(dsn: str, db: psycopg.Connection[Any]) -> None:
    async def subscription(request: Request) -> Subscription | None:
        room = request.query_params.get("room")
        if room is None:
            raise HTTPException(400, "which room?")
        if room == "closed":
            return None
        return Subscription(topics=("chat.#",), equals={"payload": {"room": room}}, named=True)

    app = sse.create_sse_app(
        dsn,
        authorize=lambda request: request.headers.get("x-user") == "me",
        subscription=subscription,
    )
    me = {"X-User": "me"}
    async with served(app) as port:
        for headers, query, status in [
            ({}, {"room": "a"}, 401),
            (me, {}, 400),
            (me, {"room": "closed"}, 204),
        ]:
            async with Client(port, "/", headers=headers, **query) as client:
                assert client.status == status
        async with Client(port, "/", headers=me, room="a") as client:
            await client.until(lambda: client.last_id != "")
            for topic, room in [("chat.said", "a"), ("chat.said", "b"), ("other", "a"), ("chat.left", "a")]:
                db.execute("select pgmb.publish(%s, json_build_object('room', %s::text))", [topic, room])
            await client.events(2)
        assert [got.event for got in client.got] == ["chat.said", "chat.left"]
