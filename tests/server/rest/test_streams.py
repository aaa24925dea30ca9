"""Streams over REST: made and seen, their positions, and the events between two."""

from __future__ import annotations

import psycopg

from tests.server.rest.api import opened

BETWEEN = "/v1/streams/main/between"


async def test_a_stream_is_made_and_seen(dsn: str) -> None:
    async with opened(dsn) as api:
        asked = {"name": "audit", "keep_for": "P7D", "rotate_events": 1000}
        assert await api.done("POST", "/v1/streams", json=asked) == {"created": True}
        assert await api.done("POST", "/v1/streams", json=asked) == {"created": False}
        listed = await api.done("GET", "/v1/streams")
        assert sorted(one["stream"] for one in listed["streams"]) == ["audit", "main"]
        shown = await api.done("GET", "/v1/streams/audit")
        assert shown["settings"]["keep_for"] == "P7D"
        assert shown["status"]["segments"] == 1
        assert await api.refused("GET", "/v1/streams/none") == (404, "not_found")
        for wrong in ("", ".x", "a b", "x" * 41, "a/b"):
            assert (await api.refused("POST", "/v1/streams", json={"name": wrong}))[0] == 422, wrong
        key = api.make_key("reader", "read:audit")
        listed = await api.done("GET", "/v1/streams", key=key)
        assert [one["stream"] for one in listed["streams"]] == ["audit"]
    with psycopg.connect(dsn) as connection:
        assert connection.execute("select action, subject from pgmb.audit").fetchall() == [
            ("create_stream", "audit")
        ]


async def test_the_events_between_two_positions_are_read_by_pages(dsn: str) -> None:
    async with opened(dsn) as api:
        first = (await api.done("GET", "/v1/streams/main/earliest"))["position"]
        await api.publish(*range(5))
        last = (await api.done("GET", "/v1/streams/main/position"))["position"]
        await api.publish("later")
        query = {"after": first, "upto": last, "max": 3}
        seen: list[int] = []
        while page := (await api.done("GET", BETWEEN, params=query))["events"]:
            seen += [event["payload"] for event in page]
            query["after_seq"] = page[-1]["seq"]
        assert seen == list(range(5))
        old = await api.done("GET", "/v1/streams/main/position", params={"at": "2001-01-01T00:00:00Z"})
        assert old["position"] == first


async def test_what_is_no_position_is_refused(dsn: str) -> None:
    async with opened(dsn) as api:
        good = (await api.done("GET", "/v1/streams/main/position"))["position"]
        for after in (
            "",
            "x",
            "()",
            good[:-1],
            f"{good}\0",
            good.replace("(", "(-"),
            "(" + "9" * 5000 + good[2:],
        ):
            assert (await api.refused("GET", BETWEEN, params={"after": after, "upto": good}))[0] == 422, after
        assert (await api.refused("GET", BETWEEN, params={"after": good}))[0] == 422
        for upto, status in (
            (good.replace("(1,", "(2,"), 410),
            (good.replace("(1,", "(99999999999999,"), 422),
            ('(1,5,7,9,"999999999999:999999999999:",0,0)', 410),
            ('(1,5,7,9,"9:3:1,2",0,0)', 422),
            ('(1,"3:3:",0,0,FFFFFFFF/FFFFFFFF)', 422),
            (",".join([*good.split(",")[:2], "7", *good.split(",")[3:]]), 410),
        ):
            refused = await api.refused("GET", BETWEEN, params={"after": good, "upto": upto})
            assert refused[0] == status, upto
        position = "/v1/streams/main/position"
        for at in ("yesterday", "2026-01-01", "2026-01-01T00:00:00", "1", ""):
            assert (await api.refused("GET", position, params={"at": at}))[0] == 422, at
