"""Receiving and settling over REST: under a lease, of that queue alone; long polls that hold nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any
from uuid import uuid4

import httpx
import psycopg
import pytest

from harness.waiting import until
from pgmb import aconnect
from pgmb.server.application import Application
from pgmb.server.limits import Limits
from pgmb.server.rest import routes
from pgmb.server.rest.service import LongPolls
from tests.server.asking import asking, bearer, make_key
from tests.server.hosting import served
from tests.server.rest.api import Api, opened

SETTLEMENTS = ("ack", "retry", "bury", "release", "extend")


@contextlib.asynccontextmanager
async def with_queue(dsn: str, limits: Limits | None = None, **asked: Any) -> AsyncGenerator[Api]:
    async with opened(dsn, limits) as api:
        await api.done("POST", "/v1/queues", json={"name": "q", **asked})
        yield api


async def test_events_come_back_to_the_letter(dsn: str) -> None:
    async with with_queue(dsn) as api:
        body = b'{"topic":"a","key":"k","headers":{"h":[1]},"payload":{"z": 1.00,  "a": "\\u00e9", "z": 2}}'
        headers = {"Content-Type": "application/json"}
        await api.done("POST", "/v1/streams/main/events", content=body, headers=headers)
        answer = await api.ask("POST", "/v1/queues/q/receive", json={})
        assert '{"z": 1.00,  "a": "\\u00e9", "z": 2}' in answer.text
        (event,) = answer.json()["events"]
        assert (event["topic"], event["key"], event["headers"]) == ("a", "k", {"h": [1]})
        assert (event["attempt"], event["stream"]) == (1, "main")


async def test_numbers_of_events_may_be_text(dsn: str) -> None:
    """From 2^53 on those of JavaScript are not exact: it sends them as text."""
    async with with_queue(dsn) as api:
        await api.publish(1, 2)
        received = await api.receive(max=2)
        first, second = (event["seq"] for event in received["events"])
        path = f"/v1/queues/q/leases/{received['lease']}/ack"
        assert (await api.done("POST", path, json={"seqs": [str(first), second]}))["count"] == 2
        for wrong in ("", "-1", "1.0", "x", "1" * 20):
            assert (await api.refused("POST", path, json={"seqs": [wrong]}))[0] == 422
        assert (await api.refused("POST", path, json={"seqs": ["9" * 19]}))[0] in (409, 422)


async def test_nothing_is_a_null_lease(dsn: str) -> None:
    async with with_queue(dsn) as api:
        assert await api.receive() == {"queue": "q", "lease": None, "events": []}
        assert await api.refused("POST", "/v1/queues/none/receive") == (404, "not_found")


async def test_a_lease_is_settled_in_every_way(dsn: str) -> None:
    async with with_queue(dsn) as api:
        await api.publish(*range(5))
        got = await api.receive(lease_for=60)
        seqs = [event["seq"] for event in got["events"]]
        lease = f"/v1/queues/q/leases/{got['lease']}"
        assert await api.done("POST", f"{lease}/ack", json={"seqs": seqs[:1]}) == {"count": 1}
        assert await api.done("POST", f"{lease}/ack", json={"seqs": seqs[:1]}) == {"count": 0}
        retried = {"seqs": seqs[1:2], "after": 0, "error": "not now"}
        assert await api.done("POST", f"{lease}/retry", json=retried) == {"count": 1}
        assert await api.done("POST", f"{lease}/bury", json={"seqs": seqs[2:3]}) == {"count": 1}
        assert await api.done("POST", f"{lease}/release", json={"seqs": seqs[3:4]}) == {"count": 1}
        assert "expires_at" in await api.done("POST", f"{lease}/extend", json={"lease_for": "PT5M"})
        assert await api.done("POST", f"{lease}/ack") == {"count": 1}
        again: list[int] = []
        while len(again) < 2:
            again += [event["payload"] for event in (await api.receive(wait=30))["events"]]
        assert sorted(again) == [1, 3]


async def test_an_expired_lease_is_lost(dsn: str) -> None:
    async with with_queue(dsn) as api:
        await api.publish(1)
        first = (await api.receive(lease_for=0.01))["lease"]
        second = (await api.receive(wait=30))["lease"]
        assert second is not None
        refused = await api.refused("POST", f"/v1/queues/q/leases/{first}/ack")
        assert refused == (409, "lease_lost")


@pytest.mark.parametrize("kind", ["fresh", "retried"])
async def test_a_lease_of_another_queue_is_as_one_that_never_was(dsn: str, kind: str) -> None:
    async with opened(dsn) as api:
        for name in ("mine", "other"):
            await api.done("POST", "/v1/queues", json={"name": name})
        await api.publish(1)
        got = await api.receive("other")
        if kind == "retried":
            path = f"/v1/queues/other/leases/{got['lease']}/retry"
            await api.done("POST", path, json={"after": 0})
            got = await api.receive("other", wait=30)
        key = api.make_key("mine", "consume:mine")
        never = uuid4()
        for how in SETTLEMENTS:
            foreign, unknown = [
                await api.ask("POST", f"/v1/queues/mine/leases/{lease}/{how}", key=key)
                for lease in (got["lease"], never)
            ]
            assert foreign.status_code == unknown.status_code == 409
            assert foreign.text.replace(got["lease"], "") == unknown.text.replace(str(never), "")
            allowed = await api.refused("POST", f"/v1/queues/other/leases/{got['lease']}/{how}", key=key)
            assert allowed == (403, "forbidden")
        assert await api.done("POST", f"/v1/queues/other/leases/{got['lease']}/ack") == {"count": 1}


async def test_a_lease_of_a_lane_is_of_its_queue(dsn: str) -> None:
    async with with_queue(dsn, lanes=["urgent.#"]) as api:
        await api.publish(1, topic="plain")
        got = await api.receive(wait=30)
        assert await api.done("POST", f"/v1/queues/q/leases/{got['lease']}/ack") == {"count": 1}


async def test_a_publish_wakes_a_long_poll(dsn: str) -> None:
    async with with_queue(dsn) as api:
        waiting = asyncio.create_task(api.receive(wait=60))
        await asyncio.sleep(0)
        await api.publish("news")
        async with asyncio.timeout(30):
            assert [event["payload"] for event in (await waiting)["events"]] == ["news"]


async def test_a_long_poll_ends_with_nothing_when_its_time_is_over(dsn: str) -> None:
    async with with_queue(dsn) as api:
        assert (await api.receive(wait=0.05))["lease"] is None
        assert (await api.refused("POST", "/v1/queues/q/receive", json={"wait": 61}))[0] == 422


async def test_those_that_wait_at_one_queue_each_get_something(dsn: str) -> None:
    async with with_queue(dsn) as api:
        waiting = [asyncio.create_task(api.receive(wait=60, max=1)) for _ in range(5)]
        await asyncio.sleep(0)
        await api.publish(*range(5))
        async with asyncio.timeout(60):
            got = [(await one)["events"][0]["payload"] for one in waiting]
        assert sorted(got) == list(range(5))


class Polled:
    """The long polls themselves, at a client that can go away."""

    def __init__(self, polls: LongPolls) -> None:
        self.polls = polls
        self.goes = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.goes.wait()
        return {"type": "http.disconnect"}


async def test_many_long_polls_hold_no_connection_of_the_pool(dsn: str) -> None:
    async with await aconnect(dsn, max_size=2) as broker:
        await broker.create_queue("q")
        polls = LongPolls(broker, 50)
        client: Any = Polled(polls)
        waiting = [
            asyncio.create_task(polls.receive(client, "q", 1, 60, None, client_id=number))
            for number in range(50)
        ]
        await until(lambda: polls.waiting == 50)
        with pytest.raises(Exception, match="too many requests wait"):
            await polls.receive(client, "q", 1, 60, None)
        async with asyncio.timeout(30), broker.connection() as one, broker.connection() as two:
            await one.execute("select 1")
            await two.execute("select 1")
        await polls.drain()
        async with asyncio.timeout(30):
            for waiter in waiting:
                assert not (await waiter).events
        assert polls.waiting == 0


async def test_a_key_leaves_places_of_long_polls_to_others(dsn: str) -> None:
    async with with_queue(dsn, Limits(long_polls=20)) as api, asyncio.TaskGroup() as group:
        others = [api.make_key(f"other{number}", "consume:q") for number in range(2)]
        held = [
            group.create_task(api.ask("POST", "/v1/queues/q/receive", json={"wait": 5})) for _ in range(30)
        ]
        await until(lambda: sum(poll.done() for poll in held) == 12)
        assert {poll.result().status_code for poll in held if poll.done()} == {503}
        for other in others:
            answer = await api.ask("POST", "/v1/queues/q/receive", json={"wait": 0.01}, key=other)
            assert answer.status_code == 200


async def test_a_client_that_goes_away_ends_its_long_poll_and_leaves_no_lease(dsn: str) -> None:
    async with await aconnect(dsn) as broker:
        await broker.create_queue("q")
        polls = LongPolls(broker, 5)
        client: Any = Polled(polls)
        waiting = asyncio.create_task(polls.receive(client, "q", 1, 60, None))
        await until(lambda: polls.waiting == 1)
        client.goes.set()
        async with asyncio.timeout(30):
            assert not (await waiting).events
        await broker.publish("a", 1)
        lease = await anext(aiter(broker.consume("q")))
        assert [event.attempt for event in lease.events] == [1]


async def test_a_client_that_goes_away_during_the_first_look_leaves_no_lease(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await aconnect(dsn) as broker:
        await broker.create_queue("q")
        await broker.publish("a", 1)
        polls = LongPolls(broker, 5)
        client: Any = Polled(polls)
        receive = broker.receive

        async def looking(*given: Any) -> Any:
            lease = await receive(*given)
            client.goes.set()
            # The server notices while the database answers.
            await asyncio.sleep(0.05)
            return lease

        monkeypatch.setattr(broker, "receive", looking)
        async with asyncio.timeout(30):
            assert not (await polls.receive(client, "q", 1, 60, None)).events
        lease = await receive("q", 1)
        assert [event.attempt for event in lease.events] == [1]


async def test_too_many_long_polls_are_told_to_come_back(dsn: str) -> None:
    async with with_queue(dsn, Limits(long_polls=0)) as api:
        answer = await api.ask("POST", "/v1/queues/q/receive", json={"wait": 1})
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["code"] == "too_many_wait"
        assert (await api.receive())["lease"] is None


async def test_a_disconnect_ends_the_wait_over_real_http(dsn: str) -> None:
    key = make_key(dsn, "k", "consume:q")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("select pgmb.create_queue('q')")
    application = Application(dsn, parts=[routes], limits=Limits(long_polls=1))
    async with (
        served(application) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=bearer(key), timeout=60) as other,
    ):

        def listens() -> bool:
            with psycopg.connect(dsn) as connection:
                count = connection.execute(
                    "select count(*) from pg_stat_activity where application_name = 'pgmb listener'"
                    " and datname = current_database()"
                ).fetchone()
            return count == (1,)

        async def another_may_wait() -> bool:
            answer = await other.post("/v1/queues/q/receive", json={"wait": 1})
            return answer.status_code == 200

        first = asyncio.create_task(other.post("/v1/queues/q/receive", json={"wait": 60}))
        await until(listens)
        assert not await another_may_wait()
        # Closes its connection.
        first.cancel()
        async with asyncio.timeout(30):
            while not await another_may_wait():
                pass


async def test_a_server_that_drains_sends_those_who_wait_away(dsn: str) -> None:
    key = make_key(dsn, "k", "operate")
    application = Application(dsn, parts=[routes])
    async with asking(application, headers=bearer(key), timeout=None) as client:
        await client.post("/v1/queues", json={"name": "q"})
        waiting = asyncio.create_task(client.post("/v1/queues/q/receive", json={"wait": 60}))
        # It may come before or after: nobody waits from then on.
        await asyncio.sleep(0)
        await application.drain()
        async with asyncio.timeout(30):
            answer = await waiting
        assert (answer.status_code, answer.json()["lease"]) == (200, None)
