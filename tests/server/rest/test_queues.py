"""Queues over REST: made, changed, moved and dropped, each change in the audit."""

from __future__ import annotations

from typing import Any

import psycopg

from tests.server.rest.api import opened


def audit(dsn: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn) as connection:
        return connection.execute("select actor, action, subject from pgmb.audit order by id").fetchall()


async def test_a_queue_is_made_seen_changed_and_dropped(dsn: str) -> None:
    async with opened(dsn) as api:
        asked = {"name": "q", "patterns": ["a.#"], "lease_for": "PT1M", "equals": {"payload": {"x": 1}}}
        assert await api.done("POST", "/v1/queues", json=asked) == {"created": True}
        assert await api.done("POST", "/v1/queues", json=asked) == {"created": False}
        assert await api.refused("POST", "/v1/queues", json={"name": "q"}) == (409, "conflict")
        (listed,) = (await api.done("GET", "/v1/queues"))["queues"]
        assert (listed["queue"], listed["patterns"]) == ("q", ["a.#"])
        await api.done("PATCH", "/v1/queues/q", json={"max_attempts": 3, "rps": 5})
        await api.done("POST", "/v1/queues/q/bind", json={"patterns": ["b"]})
        await api.done("POST", "/v1/queues/q/pause", json={"reason": "night"})
        shown = await api.done("GET", "/v1/queues/q")
        assert shown["status"]["patterns"] == ["b"]
        assert shown["status"]["paused_reason"] == "night"
        assert (shown["settings"]["max_attempts"], shown["settings"]["lease_for"]) == (3, "PT1M")
        await api.done("POST", "/v1/queues/q/resume")
        assert (await api.done("GET", "/v1/queues/q"))["status"]["paused_at"] is None
        assert await api.done("DELETE", "/v1/queues/q") == {"dropped": True}
        assert await api.done("DELETE", "/v1/queues/q") == {"dropped": False}
        assert await api.refused("GET", "/v1/queues/q") == (404, "not_found")
    done = ["create_queue", "alter_queue", "bind", "pause", "resume", "drop_queue"]
    assert audit(dsn) == [("key:operator", action, "q") for action in done]


async def test_what_a_queue_delivers_next_is_seen_by_scope(dsn: str) -> None:
    async with opened(dsn) as api:
        await api.done("POST", "/v1/queues", json={"name": "q", "patterns": ["a.#"]})
        for n in range(3):
            await api.publish(n)
        for scope in ("operate", "inspect", "consume:q"):
            found = await api.done(
                "GET", "/v1/queues/q/next", params={"max": 2}, key=api.make_key(scope, scope)
            )
            assert [one["payload"] for one in found["events"]] == ["0", "1"]
            assert found["more"]
        other = api.make_key("other", "consume:other", "read:main")
        assert (await api.refused("GET", "/v1/queues/q/next", key=other))[0] == 403
        assert await api.refused("GET", "/v1/queues/gone/next") == (404, "not_found")
        for wrong in ({"max": 0}, {"max": 201}, {"look": 0}):
            assert (await api.refused("GET", "/v1/queues/q/next", params=wrong))[0] == 422
        assert len((await api.receive("q"))["events"]) == 3


async def test_a_queue_is_moved_and_purged(dsn: str) -> None:
    async with opened(dsn) as api:
        await api.publish(1)
        await api.done("POST", "/v1/queues", json={"name": "q", "starting": "earliest"})
        between = (await api.done("GET", "/v1/streams/main/position"))["position"]
        await api.publish(2)
        await api.done("POST", "/v1/queues/q/purge")
        assert (await api.receive())["events"] == []
        for to, expected in (
            ("earliest", [1, 2]),
            (between, [2]),
            ("latest", []),
            ("2000-01-01T00:00:00Z", [1, 2]),
        ):
            await api.done("POST", "/v1/queues/q/seek", json={"to": to})
            assert [event["payload"] for event in (await api.receive())["events"]] == expected


async def test_a_change_and_its_record_are_made_together(dsn: str) -> None:
    async with opened(dsn) as api:
        assert await api.refused("POST", "/v1/queues/none/pause") == (404, "not_found")
        await api.done("POST", "/v1/queues", json={"name": "q"})
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("alter table pgmb.audit add check (action <> 'pause')")
        assert (await api.ask("POST", "/v1/queues/q/pause")).status_code == 422
        assert (await api.done("GET", "/v1/queues/q"))["status"]["paused_at"] is None
    assert audit(dsn) == [("key:operator", "create_queue", "q")]


async def test_a_position_that_does_not_apply_is_gone(dsn: str) -> None:
    async with opened(dsn) as api:
        await api.done("POST", "/v1/queues", json={"name": "q"})
        position = (await api.done("GET", "/v1/streams/main/position"))["position"]
        elsewhere = position.replace("(", "(99")
        assert await api.refused("POST", "/v1/queues/q/seek", json={"to": elsewhere}) == (
            410,
            "cluster_changed",
        )
        for wrong in ("(1,2)", "", "soon", '(1,5,7,9,"1:1:",0,0)x', "9999-99-99T00:00:00Z"):
            assert (await api.refused("POST", "/v1/queues/q/seek", json={"to": wrong}))[0] == 422, wrong


async def test_settings_that_cannot_be_are_refused(dsn: str) -> None:
    async with opened(dsn) as api:
        await api.done("POST", "/v1/queues", json={"name": "q"})
        assert await api.refused("PATCH", "/v1/queues/q", json={}) == (422, "invalid_argument")
        for wrong in (
            {"max_attempts": 0},
            {"max_attempts": 2**31},
            {"lease_for": 0},
            {"lease_for": "P1Y"},
            {"backoff_jitter": 2},
            {"when_full": "explode"},
            {"patterns": ["a"]},
            {"rps": "1"},
        ):
            assert (await api.refused("PATCH", "/v1/queues/q", json=wrong))[0] == 422, wrong
        for odd in (
            {},
            {"name": ""},
            {"name": " x"},
            {"name": "x\n"},
            {"name": "x" * 101},
            {"name": "n", "patterns": []},
            {"name": "n", "patterns": ["a..b#"]},
            {"name": "n", "filter": "$ no path"},
            {"name": "n", "equals": {"payload": {"a": "\0"}}},
            {"name": "n", "lanes": ["a"], "ordered": True},
            {"name": "n", "shards": 3},
            {"name": "n", "condition": "true"},
        ):
            status, _ = await api.refused("POST", "/v1/queues", json=odd)
            assert status == 422, odd
        missing = {"name": "n", "stream": "none"}
        assert await api.refused("POST", "/v1/queues", json=missing) == (404, "not_found")
        assert [one["queue"] for one in (await api.done("GET", "/v1/queues"))["queues"]] == ["q"]


async def test_a_key_sees_the_queues_that_it_may_consume(dsn: str) -> None:
    async with opened(dsn) as api:
        for name in ("a", "b", "c"):
            await api.done("POST", "/v1/queues", json={"name": name})
        for scopes, seen in (
            (("consume:a",), ["a"]),
            (("consume:a", "consume:c"), ["a", "c"]),
            (("consume:*",), ["a", "b", "c"]),
            (("inspect",), ["a", "b", "c"]),
            (("consume:none",), []),
        ):
            key = api.make_key("-".join(scopes), *scopes)
            listed = await api.done("GET", "/v1/queues", key=key)
            assert sorted(one["queue"] for one in listed["queues"]) == seen
