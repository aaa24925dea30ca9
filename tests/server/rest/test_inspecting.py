"""What became of an event over REST, as far as a key may know it; and the workers."""

from __future__ import annotations

import psycopg

from tests.server.rest.api import opened


async def test_the_fate_of_an_event_by_scope(dsn: str) -> None:
    async with opened(dsn) as api:
        for name in ("mine", "theirs"):
            await api.done("POST", "/v1/queues", json={"name": name, "patterns": ["a.#"]})
        (event,) = await api.publish(1)
        (foreign,) = await api.publish(2, topic="x")
        got = await api.receive("mine", max=1)
        retry = {"error": "no", "after": 3600}
        await api.done("POST", f"/v1/queues/mine/leases/{got['lease']}/retry", json=retry)
        found = await api.done("GET", f"/v1/events/{event}")
        assert (found["found"], found["topic"], found["payload"]) == ("log", "a.b", "1")
        states = {one["name"]: one["state"] for one in found["consumers"]}
        assert states == {"mine": "retrying", "theirs": "waiting"}
        assert [one["error"] for one in found["consumers"][0]["errors"]] == ["no"]
        consumer = api.make_key("consumer", "consume:mine")
        found = await api.done("GET", f"/v1/events/{event}", key=consumer)
        assert [one["name"] for one in found["consumers"]] == ["mine"]
        reader = api.make_key("reader", "read:main")
        assert (await api.done("GET", f"/v1/events/{event}", key=reader))["consumers"] == []
        missing = (404, "not_found")
        assert await api.refused("GET", f"/v1/events/{foreign}", key=consumer) == missing
        other = api.make_key("other", "read:other", "consume:other")
        assert await api.refused("GET", f"/v1/events/{event}", key=other) == missing
        nowhere = "/v1/events/01900000-0000-4000-8000-000000000001"
        assert await api.refused("GET", nowhere) == missing
        assert await api.refused("GET", nowhere, params={"around": "2026-01-31T10:00:00Z"}) == missing
        assert (await api.refused("GET", "/v1/events/x"))[0] in (404, 422)
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("select pgmb.worker_heartbeat(gen_random_uuid(), 'host7', 4711, '{mine}')")
        (worker,) = (await api.done("GET", "/v1/workers"))["workers"]
        assert (worker["host"], worker["pid"], worker["alive"]) == ("host7", 4711, True)
        assert (await api.refused("GET", "/v1/workers", key=consumer))[0] == 403
