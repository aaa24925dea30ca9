"""An HTTP server whose keys, tickets and sessions attackers hold, without a network."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

import pgmb
from pgmb.server import create_app
from pgmb.server.access import COOKIE
from pgmb.server.application import Application
from pgmb.webhooks.secrets import generate_key
from tests.server.asking import asking, bearer, make_key

TOKEN = "T0KEN-a1b2c3d4e5f6"
URL = f"https://hooks.example.org/services/{TOKEN}/v1/x?token={TOKEN}"


class Served:
    """A server with streams main and other, queues mine and yours, an endpoint with a token in its url."""

    def __init__(self, dsn: str, app: Application, client: httpx.AsyncClient) -> None:
        self.dsn = dsn
        self._app = app
        self.client = client
        self.lease = ""
        """Of an event of queue yours."""
        self._keys: dict[str, str] = {}
        self._sessions: dict[str, str] = {}
        self._addresses = itertools.count(1)

    def key(self, scope: str) -> str:
        """A key with this scope."""
        if scope not in self._keys:
            self._keys[scope] = make_key(self.dsn, f"key for {scope}", scope)
        return self._keys[scope]

    @property
    def watched(self) -> int:
        """How many requests end with their key."""
        assert self._app._context is not None
        return len(self._app._context.access._watches)

    async def ask(
        self, method: str, path: str, scope: str | None = None, body: Any = None, **options: Any
    ) -> httpx.Response:
        """A request with a key of this scope, or with none. No cookie of an earlier one is sent."""
        self.client.cookies.clear()
        headers = {**(bearer(self.key(scope)) if scope else {}), **options.pop("headers", {})}
        return await self.client.request(
            method, path.replace("{lease}", self.lease), headers=headers, json=body, **options
        )

    async def login(self, scope: str, **fields: str) -> httpx.Response:
        """From an address of its own: attempts of one address are limited."""
        transport = httpx.ASGITransport(self._app, client=(f"198.51.100.{next(self._addresses)}", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://pgmb.test") as client:
            return await client.post("/ui/login", data={"key": self.key(scope), **fields})

    async def sign_in(self, scope: str) -> None:
        """The client has the cookie of a session afterwards, until the next `ask`."""
        if scope not in self._sessions:
            answer = await self.login(scope)
            assert answer.status_code == 303, answer.text
            self._sessions[scope] = answer.cookies[COOKIE]
        self.client.cookies.clear()
        self.client.cookies.set(COOKIE, self._sessions[scope])


@asynccontextmanager
async def serving(dsn: str) -> AsyncGenerator[Served]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PGMB_SECRET_KEY", generate_key())
        with pgmb.connect(dsn) as broker:
            broker.create_stream("other")
            broker.create_queue("mine")
            broker.create_queue("yours")
            broker.publish("t", {"of": "yours"})
            broker.create_endpoint("e", URL, "nothing", headers={"Authorization": f"Bearer {TOKEN}"})
        app = create_app(dsn)
        async with asking(app) as client:
            served = Served(dsn, app, client)
            received = await served.ask("POST", "/v1/queues/yours/receive", "operate", {})
            served.lease = received.json()["lease"]
            yield served
            acked = await served.ask("POST", "/v1/queues/yours/leases/{lease}/ack", "operate", {})
            assert acked.json() == {"count": 1}, "the lease of another consumer was lost"
