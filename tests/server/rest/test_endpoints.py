"""Endpoints over REST: registered, changed, sent to again; secrets are shown once."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from pgmb.webhooks.secrets import generate_key
from tests.server.rest.api import opened

URL = "https://hooks.example.com/x"


@pytest.fixture
def sealing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGMB_SECRET_KEY", generate_key())


@pytest.mark.usefixtures("sealing")
async def test_a_secret_is_shown_once_and_nowhere_else(dsn: str) -> None:
    async with opened(dsn) as api:
        asked = {"name": "e", "url": URL, "headers": {"Authorization": "Basic canary"}}
        made = await api.done("POST", "/v1/endpoints", json=asked)
        assert made["secret"].startswith("whsec_")
        assert (await api.done("POST", "/v1/endpoints", json=asked))["secret"] is None
        rotated = await api.done("POST", "/v1/endpoints/e/rotate_secret", json={"overlap": "PT1H"})
        assert rotated["secret"] not in (None, made["secret"])
        given = {"name": "given", "url": URL, "secret": made["secret"]}
        assert (await api.done("POST", "/v1/endpoints", json=given))["secret"] == made["secret"]
        seen = (await api.ask("GET", "/v1/endpoints")).text + (await api.ask("GET", "/v1/endpoints/e")).text
    with psycopg.connect(dsn) as connection:
        seen += str(connection.execute("select action, subject, detail from pgmb.audit").fetchall())
    for secret in (made["secret"], rotated["secret"], "canary"):
        assert secret not in seen


async def test_an_endpoint_is_changed_paused_and_dropped(dsn: str) -> None:
    async with opened(dsn) as api:
        asked = {"name": "e", "url": URL, "patterns": ["a"], "secret": None}
        made = await api.done("POST", "/v1/endpoints", json=asked)
        assert made == {"id": made["id"], "secret": None, "public_key": None}
        change = {"timeout": 5, "rps": 10, "retry_after": [1, "PT1M"], "gzip_above": -1}
        await api.done("PATCH", "/v1/endpoints/e", json=change)
        await api.done("POST", "/v1/endpoints/e/bind", json={"patterns": ["b.#"]})
        shown = await api.done("GET", "/v1/endpoints/e")
        assert (shown["timeout"], shown["rps"], shown["retry_after"]) == ("PT5S", 10, ["PT1S", "PT60S"])
        assert shown["patterns"] == ["b.#"]
        for how, state in (("pause", "paused"), ("disable", "disabled"), ("resume", "active")):
            assert await api.done("POST", f"/v1/endpoints/e/{how}") == {"changed": True}
            assert (await api.done("GET", "/v1/endpoints/e"))["state"] == state
        assert await api.done("DELETE", "/v1/endpoints/e") == {"dropped": True}
        assert await api.refused("GET", "/v1/endpoints/e") == (404, "not_found")
        assert await api.refused("PATCH", "/v1/endpoints/e", json=change) == (404, "not_found")
    with psycopg.connect(dsn) as connection:
        rows = connection.execute("select action from pgmb.audit order by id").fetchall()
    actions = ["create", "alter", "bind", "pause", "disable", "resume", "drop"]
    assert [row[0] for row in rows] == [f"{action}_endpoint" for action in actions]


async def test_what_was_published_is_sent_again(dsn: str) -> None:
    async with opened(dsn) as api:
        await api.done("POST", "/v1/endpoints", json={"name": "e", "url": URL, "secret": None})
        ids = await api.publish(1, 2, 3)
        unknown = "0190a1b2-0000-7000-8000-000000000001"
        sent = await api.done("POST", "/v1/endpoints/e/resend", json={"ids": [ids[0], unknown]})
        assert sent == {"count": 1}
        asked = {"since": "2020-01-01T00:00:00Z", "max": 2, "topic": "a.*"}
        assert await api.done("POST", "/v1/endpoints/e/replay", json=asked) == {"count": 2}
        assert await api.done("POST", "/v1/endpoints/e/redrive") == {"count": 0}
        assert await api.done("GET", "/v1/endpoints/e/attempts") == {"attempts": []}
        for path in ("resend", "replay", "redrive"):
            body: dict[str, Any] = {"ids": ids} if path == "resend" else {}
            assert (await api.refused("POST", f"/v1/endpoints/none/{path}", json=body))[0] == 404
        assert (await api.refused("GET", "/v1/endpoints/none/attempts"))[0] == 404


async def test_settings_that_cannot_be_are_refused(dsn: str) -> None:
    async with opened(dsn) as api:
        for wrong in (
            {"url": "ftp://x"},
            {"url": "no url"},
            {"url": "https://user\0@x"},
            {"headers": {"content-length": "1"}},
            {"headers": {"a": 1}},
            {"headers": {"x\r\ny": "1"}},
            {"batch": 0},
            {"batch": 10**6},
            {"timeout": -1},
            {"timeout": 0},
            {"body": "xml"},
            {"retry_after": ["P1Y"]},
            {"retry_after": ["-PT1S"]},
            {"secret": "whsec_!"},
            {"secret": "generate"},
            {"metadata": {"a": "\0"}},
            {"condition": "true"},
        ):
            asked = {"name": "e", "url": URL, **wrong}
            assert (await api.refused("POST", "/v1/endpoints", json=asked))[0] == 422, wrong
        assert (await api.done("GET", "/v1/endpoints")) == {"endpoints": []}
