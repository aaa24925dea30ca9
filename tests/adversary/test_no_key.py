"""A client without a key tries to get in: by what is no key, and by operations that forgot to ask for one.

Connections and requests before a key is known are bounded: see tests/server/test_connections.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from pgmb.server.rest import OPERATIONS
from tests.adversary.serving import Served
from tests.server.rest.test_scopes import path_of

pytestmark = [pytest.mark.once, pytest.mark.asyncio(loop_scope="module")]

NO_KEYS = [
    ("Authorization", "Bearer "),
    ("Authorization", "Bearer pgmb_key_"),
    ("Authorization", "Basic cGdtYjpwZ21i"),
    ("Authorization", "Bearer pgmb_key_' or true --"),
    ("Authorization", "Bearer " + "x" * 10_000),
    ("Cookie", "pgmb_session="),
    ("Cookie", "pgmb_session={key}"),
    ("Cookie", "pgmb_session=pgmb_session_{key}"),
    ("X-Forwarded-User", "operator"),
    ("X-Api-Key", "{key}"),
]
REQUESTS: dict[str, tuple[str, str, Any]] = {
    "reading": ("GET", "/v1/queues", None),
    "changing": ("POST", "/v1/queues", {"name": "q"}),
    "scraping": ("GET", "/metrics", None),
    "following": ("GET", "/v1/streams/main/events", None),
}


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
@pytest.mark.parametrize(("name", "value"), NO_KEYS, ids=[f"{one}: {two[:40]}" for one, two in NO_KEYS])
async def test_what_is_no_key_opens_nothing(
    served: Served, name: str, value: str, request_: tuple[str, str, Any]
) -> None:
    # Right after the key was used: what is remembered of a key is no session.
    assert (await served.ask("GET", "/v1/queues", "operate")).status_code == 200
    method, path, body = request_
    headers = {name: value.replace("{key}", served.key("operate"))}
    assert (await served.ask(method, path, body=body, headers=headers)).status_code == 401


CLOSED = {f"{one.method} {one.path}": one for one in OPERATIONS if one.needs is not None}


@pytest.mark.parametrize("operation", CLOSED)
async def test_no_operation_is_open(served: Served, operation: str) -> None:
    method, path = CLOSED[operation].method, path_of(CLOSED[operation])
    assert (await served.ask(method, path)).status_code == 401


PAGES = [
    "/ui",
    "/ui/audit",
    "/ui/dead",
    "/ui/dead-letter?id=1",
    "/ui/endpoint?name=e",
    "/ui/endpoints",
    "/ui/event/raw?stream=main&seq=1",
    "/ui/event?stream=main&seq=1",
    "/ui/events",
    "/ui/live",
    "/ui/queue?name=mine",
    "/ui/queues",
    "/ui/stream?name=main",
    "/ui/streams",
]


@pytest.mark.parametrize("path", PAGES)
async def test_every_page_leads_to_the_login(served: Served, path: str) -> None:
    answer = await served.ask("GET", path)
    assert answer.status_code in (303, 401)
    assert answer.headers.get("location", "/ui/login").startswith("/ui/login")


@pytest.mark.parametrize("path", [page.partition("?")[0] for page in PAGES])
async def test_no_form_is_taken(served: Served, path: str) -> None:
    answer = await served.ask("POST", path, data={"name": "mine", "action": "pause"})
    assert answer.status_code in (303, 401, 403, 405)
    assert answer.headers.get("location", "/ui/login").startswith("/ui/login")
