"""A site in the browser of a signed-in user tries to act in the user's name, or to lead the user away."""

from __future__ import annotations

import pytest

from tests.adversary.serving import Served

pytestmark = [pytest.mark.once, pytest.mark.asyncio(loop_scope="module")]

SENT: dict[str, dict[str, str]] = {
    "another origin": {"Origin": "https://evil.example"},
    "an opaque origin": {"Origin": "null"},
    "an origin that begins alike": {"Origin": "http://pgmb.test.evil.example"},
    "another site": {"Sec-Fetch-Site": "cross-site"},
    "a sibling domain": {"Sec-Fetch-Site": "same-site", "Origin": "http://evil.pgmb.test"},
    "a browser that says nothing": {},
    "a referrer": {"Referer": "https://evil.example/"},
    "a simple request": {"Content-Type": "text/plain"},
}
FORMS = {
    "pause a queue": ("/ui/queue", {"name": "mine", "action": "pause"}),
    "purge a queue": ("/ui/queue", {"name": "mine", "action": "purge"}),
    "drop dead letters": ("/ui/dead", {"queue": "mine", "action": "drop-matching"}),
    "disable an endpoint": ("/ui/endpoint", {"name": "e", "action": "disable"}),
    "sign out": ("/ui/logout", {}),
    "a token that is none": ("/ui/queue", {"name": "mine", "action": "pause", "csrf": "none"}),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sent", SENT)
async def test_a_form_of_another_site_changes_nothing(served: Served, sent: str, form: str) -> None:
    await served.sign_in("operate")
    path, fields = FORMS[form]
    answer = await served.client.post(path, data=fields, headers=SENT[sent])
    assert answer.status_code in (403, 415), answer.text[:200]
    assert (await served.client.get("/ui/queues")).status_code == 200, "the session was ended"


@pytest.mark.parametrize("method", ["POST", "DELETE", "PATCH"])
@pytest.mark.parametrize("sent", SENT)
async def test_a_request_of_another_site_changes_nothing(served: Served, sent: str, method: str) -> None:
    await served.sign_in("operate")
    path = {"POST": "/v1/queues", "DELETE": "/v1/queues/mine", "PATCH": "/v1/endpoints/e"}[method]
    answer = await served.client.request(method, path, content=b'{"name": "q"}', headers=SENT[sent])
    assert answer.status_code == 403, answer.text[:200]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "pgmb.test@evil.example"])
@pytest.mark.parametrize(
    "path", ["/", "/ui", "/ui/queues", "/ui/queues/", "/v1/queues/", "/livez/", "/ui//evil.example"]
)
async def test_no_redirect_names_the_host_of_the_request(served: Served, path: str, host: str) -> None:
    answer = await served.ask("GET", path, headers={"Host": host, "Accept": "text/html"})
    target = answer.headers.get("location", "/")
    assert target.startswith("/")
    assert not target.startswith("//")


@pytest.mark.parametrize(
    "wanted",
    [
        "//evil.example",
        "///evil.example",
        "https://evil.example",
        "https:evil.example",
        "/\\evil.example",
        "\\\\evil.example",
        "javascript:alert(1)",
        "data:text/html,<script>alert(1)</script>",
        "/ui/\r\nX: y",
        "/ui\t//evil.example",
        " //evil.example",
        "/ui@evil.example",
        "/uievil",
        "/v1/queues",
    ],
    ids=ascii,
)
async def test_login_leads_to_pages_of_its_own_alone(served: Served, wanted: str) -> None:
    target = (await served.login("operate", next=wanted)).headers["location"]
    assert target == "/ui" or target.startswith(("/ui/", "/ui?")), target
    assert "\n" not in target
