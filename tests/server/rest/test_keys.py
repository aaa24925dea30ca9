"""Keys over REST: made, listed and taken back; a key hands out no more than it has."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from tests.conftest import Connect
from tests.server.rest.api import opened


async def test_a_key_is_shown_once_used_and_taken_back(dsn: str) -> None:
    async with opened(dsn) as api:
        asked = {"name": "shop", "scopes": ["publish:main", "read:*"]}
        made = await api.done("POST", "/v1/keys", json=asked)
        assert made["key"].startswith("pgmb_key_")
        assert await api.refused("POST", "/v1/keys", json=asked) == (409, "conflict")
        event = {"topic": "a", "payload": 1}
        assert await api.done("POST", "/v1/streams/main/events", json=event, key=made["key"])
        listed = await api.ask("GET", "/v1/keys")
        assert made["key"] not in listed.text
        found = {one["name"]: one for one in listed.json()["keys"]}
        assert found["shop"]["scopes"] == asked["scopes"]
        assert (await api.ask("DELETE", "/v1/keys/shop")).status_code == 204
        assert await api.refused("DELETE", "/v1/keys/shop") == (404, "not_found")
    with psycopg.connect(dsn) as connection:
        entries = connection.execute(
            "select action, subject, detail::text from pgmb.audit order by id"
        ).fetchall()
        assert [entry[:2] for entry in entries] == [("create_api_key", "shop"), ("drop_api_key", "shop")]
        assert made["key"] not in str(entries)


async def test_a_key_does_not_outlive_the_one_that_made_it(dsn: str) -> None:
    ends = datetime.now(UTC) + timedelta(hours=1)
    async with opened(dsn) as api:
        asked = {"name": "brief", "scopes": ["operate"], "expires_at": ends.isoformat()}
        brief = (await api.done("POST", "/v1/keys", json=asked))["key"]
        for expires_at, status in ((None, 403), (ends + timedelta(seconds=1), 403), (ends, 200)):
            given = {
                "name": "child",
                "scopes": ["inspect"],
                "expires_at": expires_at and expires_at.isoformat(),
            }
            answer = await api.ask("POST", "/v1/keys", json=given, key=brief)
            assert answer.status_code == status


async def test_a_key_that_was_dropped_or_has_expired_changes_nothing_more(dsn: str) -> None:
    """The server remembers a key for seconds."""
    ends = datetime.now(UTC) + timedelta(hours=1)
    async with opened(dsn) as api:
        for name, lapse in (
            ("dropped", "delete from pgmb.api_key where name = 'dropped'"),
            ("expired", "update pgmb.api_key set expires_at = now() - interval '1 s' where name = 'expired'"),
        ):
            asked = {"name": name, "scopes": ["operate"], "expires_at": ends.isoformat()}
            key = (await api.done("POST", "/v1/keys", json=asked))["key"]
            await api.done("GET", "/v1/keys", key=key)
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute(lapse)
            for path, body in (
                ("/v1/keys", {"name": f"heir of {name}", "scopes": ["operate"]}),
                ("/v1/queues", {"name": f"queue of {name}"}),
                ("/v1/tickets", {"scopes": ["inspect"]}),
            ):
                answer = await api.ask("POST", path, json=body, key=key)
                assert answer.status_code == 401, (path, answer.text)
        listed = (await api.done("GET", "/v1/keys"))["keys"]
        assert not [one for one in listed if one["name"].startswith("heir")]


def test_dropping_a_key_waits_for_the_change_that_it_makes(dsn: str, connect: Connect) -> None:
    one, other = connect(autocommit=True), connect(autocommit=False)
    one.execute("select pgmb.create_api_key('k', sha256('k'), '{operate}')")
    ((key,),) = one.execute("select id from pgmb.api_keys").fetchall()
    assert other.execute("select * from pgmb.hold_api_key(%s)", [key]).fetchall() == [(None,)]
    one.execute("set lock_timeout = '100ms'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        one.execute("select pgmb.drop_api_key('k')")
    # What its use notes does not wait.
    assert one.execute("select id from pgmb.find_api_key(sha256('k'))").fetchall() == [(key,)]
    other.commit()
    assert one.execute("select pgmb.drop_api_key('k')").fetchall() == [(True,)]
    assert other.execute("select * from pgmb.hold_api_key(%s)", [key]).fetchall() == []


async def test_scopes_that_are_none_are_refused(dsn: str) -> None:
    async with opened(dsn) as api:
        for scopes in (
            [],
            ["all"],
            ["publish"],
            ["publish:"],
            ["operate:x"],
            ["read:a\nb"],
            ["read:\0"],
            [1],
        ):
            asked = {"name": "x", "scopes": scopes}
            assert (await api.refused("POST", "/v1/keys", json=asked))[0] == 422, scopes
            assert (await api.refused("POST", "/v1/tickets", json={"scopes": scopes}))[0] == 422, scopes


async def test_a_ticket_allows_no_more_than_its_key(dsn: str) -> None:
    async with opened(dsn) as api:
        key = api.make_key("reader", "read:main")
        given = await api.done("POST", "/v1/tickets", json={"scopes": ["read:main"]}, key=key)
        assert given["ticket"].startswith("pgmb_ticket_")
        for scopes in (["read:other"], ["read:*"], ["inspect"], ["read:main", "publish:main"]):
            refused = await api.refused("POST", "/v1/tickets", json={"scopes": scopes}, key=key)
            assert refused == (403, "forbidden")
        for lasts in (0, -1, 61, "60"):
            asked = {"scopes": ["read:main"], "lasts": lasts}
            assert (await api.refused("POST", "/v1/tickets", json=asked, key=key))[0] == 422
        # No operation of REST takes a ticket: a header can be sent there.
        path = f"/v1/streams/main/position?ticket={given['ticket']}"
        assert await api.refused("GET", path, key=None) == (401, "unauthorised")
