"""Nobody sees anything without a session; a session comes of a key that may look, and ends."""

from __future__ import annotations

import pytest

from tests.server.asking import make_key
from tests.server.dashboard.visitor import sign_in, visiting

PATHS = [
    "/ui",
    "/ui/",
    "/ui/streams",
    "/ui/stream?name=main",
    "/ui/queues",
    "/ui/queue?name=q",
    "/ui/events",
    "/ui/event?stream=main&seq=1",
    "/ui/event/raw?stream=main&seq=1",
    "/ui/dead",
    "/ui/dead-letter?id=1",
    "/ui/dead-letter/raw?id=1",
    "/ui/endpoints",
    "/ui/endpoint?name=e",
    "/ui/audit",
    "/ui/anything/else",
]


async def test_without_a_session_pages_lead_to_the_login_and_the_rest_is_refused(dsn: str) -> None:
    async with visiting(dsn, None) as visitor:
        for path in PATHS:
            answer = await visitor.get(path)
            assert (answer.status_code, answer.content) == (303, b""), path
            assert answer.headers["location"].startswith("/ui/login"), path
            fragment = await visitor.get(path, headers={"X-Pgmb-Fragment": "1"})
            assert fragment.status_code == 401, path
        assert (await visitor.get("/ui/live")).status_code == 401
        for path in ("/ui/queue", "/ui/dead", "/ui/endpoint", "/ui/logout"):
            answer = await visitor.client.post(path, data={"action": "pause", "name": "q"})
            assert answer.status_code == 401, path
        assert "API key" in await visitor.page("/ui/login")


async def test_a_session_is_a_cookie_that_scripts_and_other_sites_do_not_get(dsn: str) -> None:
    async with visiting(dsn, None) as visitor:
        answer = await sign_in(visitor.client, make_key(dsn, "k", "inspect"), next="/ui/queues?sort=dead")
        assert (answer.status_code, answer.headers["location"]) == (303, "/ui/queues?sort=dead")
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert "path=/" in cookie
        assert "secure" not in cookie
        assert "read-only" in await visitor.page("/ui")
        assert (await visitor.send("/ui/logout")).url.path == "/ui/login"
        assert (await visitor.get("/ui")).status_code == 303


async def test_over_https_the_cookie_is_secure(dsn: str) -> None:
    async with visiting(dsn, None) as visitor:
        key = make_key(dsn, "k", "operate")
        answer = await visitor.client.post("https://pgmb.test/ui/login", data={"key": key})
        assert "secure" in answer.headers["set-cookie"].lower()


@pytest.mark.parametrize(
    "target",
    [
        "https://evil.example",
        "//evil.example",
        "/ui/\\evil.example",
        "/elsewhere",
        "/uix",
        "/ui/../../x",
        "/ui/%2e%2E/x",
        "/ui/.\t./x",
    ],
)
async def test_the_login_leads_nowhere_else(dsn: str, target: str) -> None:
    async with visiting(dsn, None) as visitor:
        answer = await sign_in(visitor.client, make_key(dsn, "k", "operate"), next=target)
        assert answer.headers["location"] == "/ui"


async def test_a_key_that_may_not_look_and_what_is_no_key_do_not_come_in(dsn: str) -> None:
    async with visiting(dsn, None) as visitor:
        weak = make_key(dsn, "weak", "publish:*", "read:*", "consume:*")
        for given, status in ((weak, 403), ("pgmb_key_wrong", 401), ("", 401), ("<b>x</b>" * 500, 401)):
            answer = await sign_in(visitor.client, given)
            assert answer.status_code == status
            assert "set-cookie" not in answer.headers
        assert (await visitor.get("/ui")).status_code == 303


async def test_guessing_is_slowed_down(dsn: str) -> None:
    async with visiting(dsn, None) as visitor:
        answers = [await sign_in(visitor.client, "pgmb_key_guess") for _ in range(15)]
        assert [answer.status_code for answer in answers][:10] == [401] * 10
        assert answers[-1].status_code == 429
        assert int(answers[-1].headers["retry-after"]) > 0


async def test_another_sites_login_form_is_refused(dsn: str) -> None:
    async with visiting(dsn, None) as visitor:
        key = make_key(dsn, "k", "operate")
        for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "https://evil.example"}):
            answer = await visitor.client.post("/ui/login", data={"key": key}, headers=headers)
            assert answer.status_code == 403
