"""Somebody who looks at the dashboard, without a browser."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from html import unescape
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urlencode

import httpx
import psycopg

import pgmb
from pgmb.server import dashboard
from pgmb.server.application import Application
from tests.server.asking import make_key

HOSTILE = "\"><script>alert(1)</script>'/../%2F?#&\u202edne"
"""A name that a queue, a topic or a key may have."""


class Visitor:
    """Signed in by a key with one scope. Paths are below where the application is mounted."""

    def __init__(self, client: httpx.AsyncClient, root: str = "") -> None:
        self.client = client
        self.root = root

    async def get(self, path: str, **options: Any) -> httpx.Response:
        return await self.client.get(self.root + path, **options)

    async def page(self, path: str, **options: Any) -> str:
        answer = await self.get(path, **options)
        assert answer.status_code == 200, (path, answer.status_code, answer.text[:300])
        return answer.text

    async def csrf(self) -> str:
        found = re.search(r'name="csrf" value="([^"]+)"', await self.page("/ui/audit"))
        assert found is not None
        return unescape(found[1])

    async def send(self, path: str, **fields: Any) -> httpx.Response:
        """A form of the session's own."""
        sent = {"csrf": await self.csrf(), **fields}
        return await self.client.post(
            self.root + path, data=sent, headers={"Sec-Fetch-Site": "same-origin"}, follow_redirects=True
        )


async def sign_in(client: httpx.AsyncClient, key: str, root: str = "", **fields: str) -> httpx.Response:
    return await client.post(f"{root}/ui/login", data={"key": key, **fields})


@asynccontextmanager
async def visiting(
    dsn: str, scope: str | None = "operate", root: str = "", **options: Any
) -> AsyncGenerator[Visitor]:
    """The dashboard alone, mounted at `root`, and somebody who is signed in unless the scope is None."""
    application = Application(dsn, parts=[dashboard.routes], max_size=4, **options)
    transport = httpx.ASGITransport(application, root_path=root)
    async with (
        application.lifespan(),
        httpx.AsyncClient(transport=transport, base_url="http://pgmb.test") as client,
    ):
        if scope is not None:
            answer = await sign_in(client, make_key(dsn, f"{scope}er", scope), root)
            assert answer.status_code == 303
        yield Visitor(client, root)


class Markup(HTMLParser):
    """What a page is made of: its tags with their attributes, and what its scripts hold."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.within: list[str] = []
        self.inline: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.within.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.within and self.within[-1] == tag:
            self.within.pop()

    def handle_data(self, data: str) -> None:
        if self.within and data.strip():
            self.inline.append(data)

    def addresses(self, *named: str) -> list[str]:
        """Where it leads, and what it loads."""
        named = named or ("href", "src", "action", "formaction", "data-live")
        return [value for _, attrs in self.tags for name in named if (value := attrs.get(name))]


def address(path: str, **query: Any) -> str:
    return f"{path}?{urlencode(query)}"


PAGES = [
    "/ui",
    "/ui/streams",
    "/ui/stream?name=main",
    "/ui/queues",
    address("/ui/queues", search=HOSTILE, sort="dead", down="1"),
    address("/ui/queue", name=HOSTILE),
    "/ui/queue?name=filtered",
    "/ui/queue/edit",
    address("/ui/queue/edit", name=HOSTILE),
    "/ui/events",
    address("/ui/events", stream="main", topic="#", key=HOSTILE, since="2020-01-01T00:00"),
    address("/ui/event", stream="main", seq="SEQ"),
    address("/ui/event", id="RETRIED"),
    "/ui/dead",
    address("/ui/dead", queue=HOSTILE, topic="*.#", error=HOSTILE),
    address("/ui/dead-letter", id="DEAD"),
    "/ui/endpoints",
    address("/ui/endpoint", name=HOSTILE),
    "/ui/endpoint/edit",
    address("/ui/endpoint/edit", name=HOSTILE),
    "/ui/workers",
    "/ui/schedules",
    address("/ui/schedule", name=HOSTILE),
    "/ui/keys",
    "/ui/audit",
    address("/ui/audit", actor=HOSTILE, action=HOSTILE, subject=HOSTILE),
]
"""Every page of a broker in which everything has a hostile name."""


def hostile_pages(dsn: str) -> dict[str, str]:
    """Gives everything in a database a hostile name. Returns where each of PAGES then is."""
    with pgmb.connect(dsn, max_size=1) as broker:
        broker.create_queue(HOSTILE, ["#"])
        broker.create_queue("filtered", ["#"], filter='$.key == "<script>alert(1)</script>"')
        payload = {HOSTILE: [HOSTILE, {"deep": HOSTILE * 50}], "long": "w" * 600_000}
        for _ in range(3):
            topic = HOSTILE.replace("#", "")
            broker.publish(topic, payload, key=HOSTILE, headers={HOSTILE: HOSTILE})
        lease = broker.receive(HOSTILE, max=1)
        seq = next(iter(lease)).seq
        broker.bury(lease, [seq], error=HOSTILE * 3)
        retried = broker.receive(HOSTILE, max=1)
        broker.retry(retried, after=100, error=HOSTILE, detail=HOSTILE)
        event = next(iter(retried)).id
        broker.receive(HOSTILE, max=1)
        broker.pause(HOSTILE, HOSTILE)
        broker.create_endpoint(HOSTILE, "https://a.example/hook", secret=None, description=HOSTILE)
        broker.confirm("main", HOSTILE, broker.position())
        broker.create_schedule(
            HOSTILE, "0 3 * * *", HOSTILE.replace("#", ""), HOSTILE, headers={HOSTILE: HOSTILE}
        )
        broker.create_api_key(HOSTILE, ["inspect"])
    with psycopg.connect(dsn, autocommit=True) as db:
        db.execute("select pgmb.record(%s, %s, %s, jsonb_build_object(%s::text, %s::text))", (HOSTILE,) * 5)
        db.execute(
            "insert into pgmb.attempt"
            " (endpoint, seq, event_id, topic, attempt, seconds, error, detail, response)"
            " select e.id, v.seq, v.id, v.topic, 1, 1, %s, %s, %s from pgmb.endpoint e,"
            " pgmb.browse_event('main', %s) v",
            (HOSTILE, HOSTILE, HOSTILE, seq),
        )
        db.execute("update pgmb.endpoint set state = 'tripped', reason = %s", (HOSTILE,))
        db.execute(
            "select pgmb.worker_heartbeat(gen_random_uuid(), %s, 1, array[%s], app => %s)", (HOSTILE,) * 3
        )
        # That it is bound to other patterns is shown.
        db.execute(
            "select pgmb.declare_queue((select id from pgmb.worker), %s, '{none}', handlers => array[%s])",
            (HOSTILE, HOSTILE),
        )
        ((dead,),) = db.execute("select id from pgmb.dead where seq = %s", (seq,)).fetchall()
    found = {"SEQ": seq, "DEAD": dead, "RETRIED": event}
    return {page: re.sub("SEQ|DEAD|RETRIED", lambda name: str(found[name[0]]), page) for page in PAGES}


def check(path: str, text: str, root: str = "") -> None:
    markup = Markup(text)
    assert "<script>alert" not in text, path
    assert markup.inline == [], path
    for tag, attributes in markup.tags:
        assert "style" not in attributes, (path, tag)
        assert not any(name.startswith("on") for name in attributes), (path, tag, attributes)
        if tag == "script":
            assert (attributes.get("src") or "").startswith(f"{root}/ui/static/"), path
    for one in markup.addresses():
        assert one.startswith((f"{root}/ui", "#content")), (path, one)
        assert "://" not in one.partition("?")[0], (path, one)
