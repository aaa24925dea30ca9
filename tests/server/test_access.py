"""Who asks: keys that expire and are taken back, sessions and their proofs, tickets that are good once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from starlette.requests import Request

from pgmb import aconnect
from pgmb.server.access import COOKIE, Access, Principal, covers, csrf_of
from pgmb.server.problems import Problem
from tests.server.asking import make_key
from tests.server.rest.api import opened, problem


def request(*headers: tuple[str, str], query: str = "") -> Request:
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
    return Request(
        {"type": "http", "headers": raw, "query_string": query.encode(), "path": "/", "method": "GET"}
    )


def by_key(key: str) -> Request:
    return request(("Authorization", f"Bearer {key}"))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def refused(status: int, code: str) -> Iterator[None]:
    with pytest.raises(Problem) as raised:
        yield
    assert (raised.value.status, raised.value.code) == (status, code)


@pytest.mark.once
@pytest.mark.parametrize(
    ("held", "verb", "name", "allowed"),
    [
        (["publish:a"], "publish", "a", True),
        (["publish:a"], "publish", "b", False),
        (["publish:a"], "read", "a", False),
        (["publish:*"], "publish", "b", True),
        (["consume:*"], "consume", None, False),
        (["inspect"], "read", "a", True),
        (["inspect"], "consume", "a", False),
        (["inspect"], "operate", None, False),
        (["operate"], "consume", "a", True),
        (["operate"], "inspect", None, True),
        ([], "read", "a", False),
        (["read:a"], "read", "*", False),
    ],
)
def test_scopes_cover_what_they_name(held: list[str], verb: Any, name: str | None, allowed: bool) -> None:
    assert covers(held, verb, name) is allowed


@pytest.mark.once
def test_a_key_may_hand_on_what_it_has() -> None:
    held = Principal(1, "k", frozenset(["read:*", "publish:a"]))
    assert held.may_all(["read:x", "read:*", "publish:a"])
    for scope in ("publish:*", "publish:b", "inspect", "operate", "consume:a", "read"):
        assert not held.may_all(["read:x", scope])


async def test_a_key_that_is_taken_back_works_for_seconds_at_most(dsn: str) -> None:
    key = make_key(dsn, "k", "read:main")
    clock = Clock()
    async with await aconnect(dsn, max_size=1) as broker:
        access = Access(broker, clock=clock)
        assert (await access.need(by_key(key), "read", "main")).name == "k"
        await broker.drop_api_key("k")
        clock.now += 4.9
        await access.need(by_key(key), "read", "main")
        clock.now += 0.2
        with refused(401, "unauthorised"):
            await access.need(by_key(key), "read", "main")


async def test_a_key_ends_when_it_expires(dsn: str) -> None:
    key = make_key(dsn, "k", "read:main")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("update pgmb.api_key set expires_at = clock_timestamp() - interval '1 second'")
    async with await aconnect(dsn, max_size=1) as broker:
        access = Access(broker)
        with refused(401, "unauthorised"):
            await access.need(by_key(key), "read", "main")
        assert await access.login(key) is None


async def test_what_cannot_be_a_key_is_not_looked_up(dsn: str) -> None:
    async with await aconnect(dsn, max_size=1) as broker:
        access = Access(broker)
        await broker.close()
        for text in ("", "é", "x" * 201):
            assert await access.principal(by_key(text)) is None
        assert await access.principal(request(("Authorization", "Basic x"))) is None
        assert await access.principal(request()) is None


async def test_a_ticket_is_good_once_and_only_where_tickets_are(dsn: str) -> None:
    key = make_key(dsn, "k", "read:*")
    async with await aconnect(dsn) as broker:
        access = Access(broker)
        holder = await access.need(by_key(key), "read", "main")
        text = await access.ticket(holder, ["read:main"], timedelta(seconds=60))
        asked = request(query=f"ticket={text}")
        assert await access.principal(asked) is None
        taken = await asyncio.gather(*(access.principal(asked, ticket=True) for _ in range(8)))
        (principal,) = [one for one in taken if one is not None]
        assert (principal.kind, principal.scopes) == ("ticket", frozenset(["read:main"]))
        with refused(401, "unauthorised"):
            await access.need(asked, "read", "main", ticket=True)
        with refused(403, "forbidden"):
            await access.ticket(holder, ["publish:main"], timedelta(seconds=60))
        over = await access.ticket(holder, ["read:main"], timedelta(seconds=-1))
        assert await access.principal(request(query=f"ticket={over}"), ticket=True) is None


async def test_a_session_ends_at_logout_and_with_its_key(dsn: str) -> None:
    key = make_key(dsn, "k", "operate")
    clock = Clock()
    async with await aconnect(dsn, max_size=1) as broker:
        access = Access(broker, clock=clock)
        assert await access.login("pgmb_key_none") is None
        first, second = [await access.login(key) for _ in range(2)]
        assert first is not None
        assert second is not None
        for session, principal in (first, second):
            found = await access.principal(request(("Cookie", f"{COOKIE}={session}")))
            assert found == principal
        await access.logout(first[0])
        assert await access.principal(request(("Cookie", f"{COOKIE}={first[0]}"))) is None
        await broker.drop_api_key("k")
        clock.now += 10
        assert await access.principal(request(("Cookie", f"{COOKIE}={second[0]}"))) is None


async def test_a_session_needs_its_proof_for_anything_but_reading(dsn: str) -> None:
    async with opened(dsn) as api, await aconnect(dsn, max_size=1) as broker:
        await api.done("POST", "/v1/queues", json={"name": "q"})
        made = await Access(broker).login(api.key)
        assert made is not None
        session, principal = made
        assert principal.csrf == csrf_of(session)
        api.client.cookies.set(COOKIE, session)
        other = await Access(broker).login(api.key)
        assert other is not None
        assert (await api.ask("GET", "/v1/queues", key=None)).status_code == 200
        for given in ({}, {"X-CSRF-Token": "x"}, {"X-CSRF-Token": other[1].csrf or ""}):
            for method, path in (("POST", "/v1/queues/q/pause"), ("DELETE", "/v1/queues/q")):
                answer = await api.ask(method, path, key=None, headers=given)
                assert problem(answer) == (403, "csrf")
        proof = {"X-CSRF-Token": principal.csrf}
        assert (await api.ask("POST", "/v1/queues/q/pause", key=None, headers=proof)).status_code == 204
        # A key in the header counts before a cookie that came along.
        assert (await api.ask("POST", "/v1/queues/q/resume")).status_code == 204
