"""A filter that raises stops its own queue, in full view, and nobody else's."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import psycopg
import pytest

import pgmb
from faults.queue import filters
from faults.queue.filters import Round, judge
from harness.states import paused_queues
from harness.waiting import until
from tests.app.stage import working

CONDITION, FILTER = filters.KINDS


@pytest.mark.slow
def test_the_others_get_every_event_and_the_one_that_failed_loses_none(dsn: str) -> None:
    result = filters.run(dsn, queues=25, rounds=4, events=12, consumers=2, seed=7)
    assert result.holds, str(result)
    assert result.held_back >= 4


@pytest.mark.parametrize("kind", filters.KINDS, ids=["condition", "filter"])
def test_it_stops_before_the_event_at_which_it_raised_and_says_why(
    dsn: str, db: psycopg.Connection[Any], kind: filters.Kind
) -> None:
    with pgmb.connect(dsn) as broker:
        broker.create_queue("q", ["a"], **kind.raising)
        good = {"value": "1", "at": "2020-01-01T00:00:00+00:00"}
        broker.publish_many("a", [{**good, "n": number} for number in range(3)])
        first = broker.receive("q")
        assert [event.payload["n"] for event in first] == [0, 1, 2]
        first.ack()
        broker.publish("a", {"value": "poison", "at": "2020-01-01", "n": 3})
        broker.publish("a", {**good, "n": 4})
        assert not broker.receive("q")
        assert not broker.receive("q")
        shown = subprocess.run(
            [sys.executable, "-m", "pgmb", "queues", "show", "q", "--dsn", dsn],
            capture_output=True,
            text=True,
            check=True,
        )
        assert kind.said in " ".join(shown.stdout.split())
        (status,) = broker.queue_status()
        assert status.paused_at is not None
        broker.bind("q", ["a"], **kind.mended)
        assert not broker.receive("q")
        broker.resume("q")
        assert [event.payload["n"] for event in broker.receive("q")] == [3, 4]
        assert paused_queues(db) == {}


def test_resumed_unmended_it_stops_again(dsn: str) -> None:
    with pgmb.connect(dsn) as broker:
        broker.create_queue("q", ["a"], **CONDITION.raising)
        broker.publish("a", {"value": "poison"})
        for _ in range(2):
            assert not broker.receive("q")
            assert [one.paused_reason is not None for one in broker.queue_status()] == [True]
            broker.resume("q")
        broker.bind("q", ["a"], **CONDITION.mended)
        assert len(broker.receive("q")) == 1


def test_what_it_had_leased_before_can_be_settled_and_comes_again(dsn: str) -> None:
    with pgmb.connect(dsn) as broker:
        broker.create_queue("q", ["a"], **CONDITION.raising)
        broker.publish_many("a", [{"value": "1"}, {"value": "2"}])
        first = broker.receive("q", max=1)
        second = broker.receive("q", max=1)
        broker.publish("a", {"value": "poison"})
        assert not broker.receive("q")
        assert first.ack() == 1
        assert second.retry(after=0) == 1
        broker.bind("q", ["a"], **CONDITION.mended)
        broker.resume("q")
        got: list[str] = []
        while len(got) < 2:
            lease = broker.receive("q")
            got += [event.payload["value"] for event in lease]
            lease.ack()
        assert sorted(got) == ["2", "poison"]


def test_one_that_takes_too_long_stops_too(dsn: str) -> None:
    with pgmb.connect(dsn, max_size=1) as broker, psycopg.connect(dsn, autocommit=True) as conn:
        long = " + ".join(["factorial((e.payload ->> 'n')::bigint)"] * 50)
        broker.create_queue("q", ["a"], condition=f"{long} > 0")
        broker.publish("a", {"n": 3})
        assert len(broker.receive("q")) == 1
        broker.publish("a", {"n": 32_000})
        conn.execute("set statement_timeout = '1s'")
        assert not broker.receive("q", conn=conn)
        assert [one.paused_reason for one in broker.queue_status()] == [
            "condition failed: took longer than 1s"
        ]
        broker.bind("q", ["a"], no_filter=True)
        broker.resume("q")
        assert [event.payload for event in broker.receive("q")] == [{"n": 32_000}]


def test_the_reason_quotes_nothing_of_the_event(dsn: str) -> None:
    """An erasure of the event would leave it there."""
    with pgmb.connect(dsn, max_size=1) as broker:
        broker.create_queue("q", ["a"], condition="(e.payload ->> 'n')::int > 0")
        broker.group("g").subscribe(["a"], condition="(e.payload ->> 'n')::int > 0")
        broker.publish("a", {"n": """anna@example.com says "hello" and 'bye' to anna"""})
        assert not broker.receive("q")
        assert not broker.group("g").receive()
        reason = 'invalid input syntax for type integer: "…" (22P02)'
        assert f"condition failed: {reason}" in {one.paused_reason for one in broker.queue_status()}
        with broker.own_connection() as conn:
            assert conn.execute("select paused_reason from pgmb.subscription").fetchall() == [(reason,)]


async def test_an_app_goes_on_with_its_other_queues(dsn: str) -> None:
    app, seen = pgmb.App(dsn), list[Any]()
    app.queue("failing", **CONDITION.raising)
    app.on("a", queue="failing")(lambda payload: seen.append("failing"))
    app.on("a", queue="fine")(lambda payload: seen.append(payload["value"]))
    async with working(app) as broker:
        for value in ("poison", "1", "2"):
            await broker.publish("a", {"value": value})
        await until(lambda: len(seen) == 3)

        async def standing() -> bool:
            reasons = {one.queue: one.paused_reason for one in await broker.queue_status()}
            return reasons["fine"] is None and (reasons["failing"] or "").startswith(CONDITION.said)

        await until(standing)
        seen.clear()
        await broker.bind("failing", ["a"], **CONDITION.mended)
        await broker.resume("failing")
        await until(lambda: seen == ["failing"] * 3)


def a_round(**changed: Any) -> Round:
    right = {
        "numbers": [0, 1, 2],
        "poison": 1,
        "victim": "q",
        "said": "filter failed",
        "paused": {"q": "filter failed: why"},
        "before": [0],
        "after": [1, 2],
        "others": {"a": [0, 1, 2], "b": [0, 1, 2]},
    }
    return Round(**{**right, **changed})


def test_the_judge_says_yes_to_what_is_right() -> None:
    assert judge(a_round()) == []


@pytest.mark.parametrize(
    "changed",
    [
        {"others": {"a": [0, 2]}},
        {"others": {"a": [0, 2, 1]}},
        {"others": {"a": [0, 1, 1, 2]}},
        {"paused": {}},
        {"paused": {"q": "filter failed", "a": "too"}},
        {"paused": {"q": "somebody paused it"}},
        {"before": [0, 1], "after": [2]},
        {"after": [1]},
        {"after": [1, 2, 2]},
        {"before": []},
    ],
)
def test_the_judge_says_no(changed: dict[str, Any]) -> None:
    assert judge(a_round(**changed))
