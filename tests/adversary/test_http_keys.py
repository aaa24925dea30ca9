"""The holder of an HTTP key tries to do, or to see, what its scopes do not allow."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

import pgmb
from pgmb.delivery.sealing import generate_key
from pgmb.server import create_app
from tests.server.asking import asking, bearer, make_key

SCOPES = ["publish:main", "read:main", "consume:mine", "inspect"]
TOKEN = "T0KEN-a1b2c3d4e5f6"
URL = f"https://hooks.example.org/services/{TOKEN}/v1/x?token={TOKEN}"

EVENT = {"topic": "t", "payload": 1}
OTHERS: dict[str, list[tuple[str, str, Any]]] = {
    "publish:main": [
        ("POST", "/v1/streams/other/events", EVENT),
        ("POST", "/v1/streams/main%2F..%2Fother/events", EVENT),
        ("POST", "/v1/streams/MAIN/events", EVENT),
        ("GET", "/v1/streams/main/events", None),
        ("GET", "/v1/streams/main/earliest", None),
        ("POST", "/v1/queues/mine/receive", {}),
        ("GET", "/v1/queues", None),
        ("GET", "/v1/endpoints", None),
        ("POST", "/v1/keys", {"name": "x", "scopes": ["publish:main"]}),
        ("GET", "/ui", None),
        ("GET", "/metrics", None),
    ],
    "read:main": [
        ("GET", "/v1/streams/other/events", None),
        ("GET", "/v1/streams/other/position", None),
        ("GET", "/v1/streams/other", None),
        ("POST", "/v1/streams/main/events", EVENT),
        ("POST", "/v1/tickets", {"scopes": ["read:other"]}),
        ("POST", "/v1/tickets", {"scopes": ["read:*"]}),
        ("POST", "/v1/tickets", {"scopes": ["operate"]}),
        ("POST", "/v1/queues", {"name": "q"}),
        ("DELETE", "/v1/queues/mine", None),
        ("GET", "/ui/queues", None),
    ],
    "consume:mine": [
        ("POST", "/v1/queues/yours/receive", {}),
        ("POST", "/v1/queues/mine%2f..%2fyours/receive", {}),
        ("GET", "/v1/queues/yours/dead_letters", None),
        ("POST", "/v1/queues/yours/dead_letters/redrive", {}),
        ("POST", "/v1/queues/mine/leases/{lease}/ack", {}),
        ("POST", "/v1/queues/mine/leases/{lease}/bury", {}),
        ("POST", "/v1/queues/mine/leases/{lease}/extend", {"lease_for": 60}),
        ("POST", "/v1/streams/main/events", EVENT),
        ("GET", "/v1/streams/main/events", None),
        ("DELETE", "/v1/queues/mine", None),
    ],
    "inspect": [
        ("POST", "/v1/streams/main/events", EVENT),
        ("POST", "/v1/queues/mine/receive", {}),
        ("POST", "/v1/queues/mine/dead_letters/drop", {"all": True}),
        ("POST", "/v1/endpoints", {"name": "x", "url": "https://example.org/"}),
        ("DELETE", "/v1/endpoints/e", None),
        ("POST", "/v1/endpoints/e/rotate_secret", {}),
        ("POST", "/v1/keys", {"name": "x", "scopes": ["inspect"]}),
        ("DELETE", "/v1/keys/operator", None),
        ("POST", "/v1/tickets", {"scopes": ["consume:mine"]}),
        ("POST", "/ui/queues/pause", None),
    ],
}
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


@pytest.fixture
async def client(dsn: str, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[httpx.AsyncClient]:
    monkeypatch.setenv("PGMB_SECRET_KEY", generate_key())
    with pgmb.connect(dsn) as broker:
        broker.create_stream("other")
        broker.create_queue("mine")
        broker.create_queue("yours")
        broker.publish("t", {"of": "yours"})
        broker.create_endpoint("e", URL, "nothing", headers={"Authorization": f"Bearer {TOKEN}"})
    async with asking(create_app(dsn)) as client:
        yield client


async def test_no_scope_reaches_beyond_itself(dsn: str, client: httpx.AsyncClient) -> None:
    operator = make_key(dsn, "operator", "operate")
    received = await client.post("/v1/queues/yours/receive", headers=bearer(operator), json={})
    lease = received.json()["lease"]
    assert lease is not None
    got_through: list[str] = []
    for scope, attempts in OTHERS.items():
        key = make_key(dsn, scope, scope)
        for method, path, body in attempts:
            said = await client.request(
                method, path.format(lease=lease), headers=bearer(key), json=body if body is not None else None
            )
            # 409: the lease is not this queue's; 303: to the login.
            if said.status_code not in (303, 401, 403, 404, 405, 409):
                got_through.append(f"{scope}: {method} {path}: {said.status_code} {said.text[:80]}")
    assert got_through == []
    acked = await client.post(f"/v1/queues/yours/leases/{lease}/ack", headers=bearer(operator), json={})
    assert acked.json() == {"count": 1}


async def test_what_is_no_key_opens_nothing(dsn: str, client: httpx.AsyncClient) -> None:
    key = make_key(dsn, "operator", "operate")
    # Right after it was used: what is remembered of a key is no session.
    assert (await client.get("/v1/queues", headers=bearer(key))).status_code == 200
    for name, value in NO_KEYS:
        headers = {name: value.format(key=key)}
        assert (await client.get("/v1/queues", headers=headers)).status_code == 401, headers
        made = await client.post("/v1/queues", headers=headers, json={"name": "q"})
        assert made.status_code == 401, headers


async def test_a_ticket_is_good_once_and_for_its_scopes(dsn: str, client: httpx.AsyncClient) -> None:
    key = make_key(dsn, "reader", "read:main")
    made = await client.post("/v1/tickets", headers=bearer(key), json={"scopes": ["read:main"]})
    ticket = made.json()["ticket"]
    assert (await client.get(f"/v1/streams/main?ticket={ticket}")).status_code == 401
    assert (await client.head(f"/v1/streams/other/events?ticket={ticket}")).status_code == 403
    assert (await client.head(f"/v1/streams/main/events?ticket={ticket}")).status_code == 401


async def test_a_form_of_another_site_changes_nothing(dsn: str, client: httpx.AsyncClient) -> None:
    key = make_key(dsn, "operator", "operate")
    login = await client.post("/ui/login", data={"key": key})
    assert login.status_code == 303
    for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {}):
        said = await client.post("/ui/queue", data={"name": "mine", "action": "pause"}, headers=headers)
        assert said.status_code in (403, 404, 405)
        made = await client.post("/v1/queues", json={"name": "q"}, headers=headers)
        assert made.status_code == 403


async def test_no_redirect_names_the_host_of_the_request(dsn: str, client: httpx.AsyncClient) -> None:
    key = make_key(dsn, "operator", "operate")
    assert (await client.get("/v1/queues", headers=bearer(key))).status_code == 200
    for path in ("/", "/ui", "/ui/queues", "/ui/queues/", "/v1/queues/", "/livez/", "/ui//evil.example"):
        said = await client.get(path, headers={"Host": "evil.example", "Accept": "text/html"})
        target = said.headers.get("location", "/")
        assert target.startswith("/"), (path, target)
        assert not target.startswith("//"), (path, target)


async def test_login_goes_on_to_pages_of_its_own_alone(dsn: str, client: httpx.AsyncClient) -> None:
    key = make_key(dsn, "operator", "operate")
    for wanted in (
        "//evil.example",
        "https://evil.example",
        "/\\evil.example",
        "javascript:alert(1)",
        "/ui/\r\nX: y",
    ):
        said = await client.post("/ui/login", data={"key": key, "next": wanted})
        assert said.headers["location"].startswith("/ui"), wanted


async def test_the_secrets_of_an_endpoint_are_seen_by_operators_alone(
    dsn: str, client: httpx.AsyncClient
) -> None:
    inspect = make_key(dsn, "inspector", "inspect")
    operator = make_key(dsn, "operator", "operate")
    altered = await client.patch("/v1/endpoints/e", headers=bearer(operator), json={"url": URL + "&a=b"})
    assert altered.status_code in (200, 204), altered.text
    assert (await client.get("/v1/endpoints/e", headers=bearer(operator))).json()["url"] == URL + "&a=b"
    listed = (await client.get("/v1/endpoints", headers=bearer(inspect))).json()["endpoints"]
    assert [one["url"] for one in listed] == ["https://hooks.example.org/services/…/v1/x?…"]
    await client.post("/ui/login", data={"key": inspect})
    pages = ["/v1/endpoints", "/v1/endpoints/e", "/v1/endpoints/e/attempts", "/ui/endpoints", "/ui/audit"]
    pages += ["/ui/endpoint?name=e", f"/ui/endpoints?search={TOKEN}", "/ui/events?stream=main"]
    for path in pages:
        said = await client.get(path)
        assert said.status_code == 200, (path, said.text[:200])
        assert TOKEN not in said.text.replace(f"search={TOKEN}", "").replace(f'value="{TOKEN}"', ""), path
    # Nor does a search tell whether it is there.
    assert "example.org" not in (await client.get(f"/ui/endpoints?search={TOKEN}")).text
    with pgmb.connect(dsn) as broker, broker.connection() as conn:
        (stored,) = conn.execute("select headers::text from pgmb.endpoint").fetchone() or ("",)
        assert TOKEN not in stored
        assert json.loads(stored)["Authorization"].startswith("pgmb-sealed:")
        conn.execute("select pgmb.announce_disabled(id, name, url, 'gone') from pgmb.endpoint")
        (told,) = conn.execute(
            "select payload::text from pgmb.log_main where topic = 'pgmb.endpoint.disabled'"
        ).fetchone() or ("",)
        assert TOKEN not in told
