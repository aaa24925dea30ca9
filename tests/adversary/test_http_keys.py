"""The holder of an HTTP key tries to do, or to see, what its scopes do not allow."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import pgmb
from pgmb._core.keys import KEY, digest, generate
from pgmb.server import access
from tests.adversary.serving import TOKEN, URL, Served
from tests.server.asking import bearer, make_key

pytestmark = [pytest.mark.once, pytest.mark.asyncio(loop_scope="module")]

EVENT = {"topic": "t", "payload": 1}
ATTEMPTS: dict[str, list[tuple[str, str, Any]]] = {
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
EACH = [(scope, *attempt) for scope, attempts in ATTEMPTS.items() for attempt in attempts]


@pytest.mark.parametrize(
    ("scope", "method", "path", "body"),
    EACH,
    ids=[f"{scope} {method} {path} {json.dumps(body)}"[:100] for scope, method, path, body in EACH],
)
async def test_no_scope_reaches_beyond_itself(
    served: Served, scope: str, method: str, path: str, body: Any
) -> None:
    answer = await served.ask(method, path, scope, body)
    # 409: the lease is not this queue's; 303: to the login.
    assert answer.status_code in (303, 401, 403, 404, 405, 409), answer.text[:200]


ENDS = datetime(2100, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    "expires_at", [None, ENDS + timedelta(seconds=1), ENDS + timedelta(days=1000)], ids=str
)
async def test_a_key_that_ends_makes_none_that_lasts_longer(
    served: Served, expires_at: datetime | None
) -> None:
    text = generate(KEY)
    with pgmb.connect(served.dsn) as broker, broker.connection() as conn:
        conn.execute("select pgmb.drop_api_key('brief')")
        conn.execute("select pgmb.create_api_key('brief', %s, '{operate}', %s)", [digest(text), ENDS])
    asked = {"name": "child", "scopes": ["inspect"], "expires_at": expires_at and expires_at.isoformat()}
    answer = await served.ask("POST", "/v1/keys", body=asked, headers=bearer(text))
    assert answer.status_code == 403, answer.text


async def ticket(served: Served) -> str:
    made = await served.ask("POST", "/v1/tickets", "read:main", {"scopes": ["read:main"]})
    return str(made.json()["ticket"])


async def test_a_ticket_opens_no_request_that_takes_a_header(served: Served) -> None:
    answer = await served.ask("GET", f"/v1/streams/main?ticket={await ticket(served)}")
    assert answer.status_code == 401


async def test_a_ticket_is_good_for_its_scopes_alone(served: Served) -> None:
    answer = await served.ask("HEAD", f"/v1/streams/other/events?ticket={await ticket(served)}")
    assert answer.status_code == 403


async def test_a_ticket_is_good_once(served: Served) -> None:
    given = await ticket(served)
    assert (await served.ask("HEAD", f"/v1/streams/main/events?ticket={given}")).status_code == 200
    assert (await served.ask("HEAD", f"/v1/streams/main/events?ticket={given}")).status_code == 401


ENDED = {
    "dropped": "select pgmb.drop_api_key('waits')",
    "expired": "update pgmb.api_key set expires_at = clock_timestamp() where name = 'waits'",
}


@pytest.mark.parametrize("end", ENDED)
async def test_a_long_poll_ends_with_its_key(
    served: Served, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "RECHECK_EVERY", 0.1)
    with pgmb.connect(served.dsn) as broker, broker.connection() as conn:
        conn.execute("select pgmb.drop_api_key('waits')")
        broker.create_queue("quiet", ["quiet"])
        key = make_key(served.dsn, "waits", "consume:quiet")
        asked = asyncio.create_task(
            served.ask("POST", "/v1/queues/quiet/receive", body={"wait": 25}, headers=bearer(key))
        )
        while not served.watched:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        conn.execute(ENDED[end].encode())
        answer = await asyncio.wait_for(asked, 15)
    assert answer.json() == {"queue": "quiet", "lease": None, "events": []}


HIDDEN = "H1DDEN-f6e5d4c3b2a1"


@pytest.mark.parametrize("scope", ["inspect", "operate"])
@pytest.mark.parametrize(
    "path",
    ["/v1/endpoints", "/v1/endpoints/sealed", "/ui/endpoints", "/ui/endpoint?name=sealed", "/ui/audit"],
)
async def test_the_values_of_sealed_headers_are_shown_to_nobody(
    served: Served, path: str, scope: str
) -> None:
    made = {"url": "https://example.org/", "name": "sealed", "headers": {"X-Api-Key": HIDDEN}}
    created = await served.ask("POST", "/v1/endpoints", "operate", made)
    assert created.status_code in (200, 201), created.text
    assert HIDDEN not in created.text
    await served.sign_in(scope)
    answer = await served.client.get(path)
    assert answer.status_code == 200
    assert "sealed" in answer.text
    assert HIDDEN not in answer.text
    with pgmb.connect(served.dsn) as broker, broker.connection() as conn:
        stored = conn.execute("select headers::text from pgmb.endpoint where name = 'sealed'").fetchone()
    assert HIDDEN not in str(stored)


PAGES = [
    "/v1/endpoints",
    "/v1/endpoints/e",
    "/v1/endpoints/e/attempts",
    "/ui/endpoints",
    "/ui/audit",
    "/ui/endpoint?name=e",
    f"/ui/endpoints?search={TOKEN}",
    "/ui/events?stream=main",
]


@pytest.mark.parametrize("path", PAGES)
async def test_the_token_in_an_endpoint_is_seen_by_operators_alone(served: Served, path: str) -> None:
    altered = await served.ask("PATCH", "/v1/endpoints/e", "operate", {"url": URL})
    assert altered.status_code in (200, 204), altered.text
    await served.sign_in("inspect")
    answer = await served.client.get(path)
    assert answer.status_code == 200, answer.text[:200]
    assert TOKEN not in answer.text.replace(f"search={TOKEN}", "").replace(f'value="{TOKEN}"', "")


async def test_an_operator_sees_the_url_of_an_endpoint_and_an_inspector_its_host(served: Served) -> None:
    assert (await served.ask("GET", "/v1/endpoints/e", "operate")).json()["url"] == URL
    seen = (await served.ask("GET", "/v1/endpoints", "inspect")).json()["endpoints"]
    assert [one["url"] for one in seen if one["name"] == "e"] == [
        "https://hooks.example.org/services/…/v1/x?…"
    ]


async def test_a_search_does_not_tell_whether_a_token_is_there(served: Served) -> None:
    await served.sign_in("inspect")
    assert "example.org" not in (await served.client.get(f"/ui/endpoints?search={TOKEN}")).text


async def test_the_token_in_a_header_is_not_stored(served: Served) -> None:
    with pgmb.connect(served.dsn) as broker, broker.connection() as conn:
        ((stored,),) = conn.execute("select headers::text from pgmb.endpoint where name = 'e'").fetchall()
    assert TOKEN not in stored
    assert json.loads(stored)["Authorization"].startswith("pgmb-sealed:")


async def test_the_event_about_a_disabled_endpoint_has_no_token(served: Served) -> None:
    with pgmb.connect(served.dsn) as broker, broker.connection() as conn:
        conn.execute(
            "select pgmb_internal.announce_disabled(id, name, url, 'gone')"
            " from pgmb.endpoint where name = 'e'"
        )
        (told,) = conn.execute(
            "select payload::text from pgmb.log_main where topic = 'pgmb.endpoint.disabled'"
        ).fetchone() or ("",)
    assert "example.org" in told
    assert TOKEN not in told
