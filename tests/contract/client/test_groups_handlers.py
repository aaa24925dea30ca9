"""Reliable handlers of a group: sets of events, retried as they were, in time, and then dead letters."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import psycopg
import pytest

import pgmb
from harness.states import queue_settings, times_bound
from harness.waiting import until, until_true
from pgmb.errors import InvalidArgument
from tests.app.stage import Workers, settled, working

QUEUE = "my-node/log-data"


def by_topic(events: list[pgmb.Event]) -> list[list[pgmb.Event]]:
    topics: dict[str, list[pgmb.Event]] = defaultdict(list)
    for event in events:
        topics[event.topic].append(event)
    return list(topics.values())


async def published(broker: pgmb.AsyncBroker, *topics: str) -> None:
    await broker.publish_many([pgmb.NewEvent(topic, number) for number, topic in enumerate(topics)])


async def test_a_handler_gets_sets_of_what_it_asked_for(dsn: str) -> None:
    app, seen = pgmb.App(dsn), list[list[tuple[str, Any]]]()

    @app.group("my-node").handler(
        "log-data",
        condition="s.params @> jsonb_build_object('topics', ARRAY[e.topic])",
        params={"topics": ["msg-created", "msg-updated"]},
    )
    async def log(events: list[pgmb.Event]) -> None:
        seen.append([(event.topic, event.payload) for event in events])

    async with working(app) as broker:
        await published(broker, "msg-created", "other", "msg-updated")
        await until(lambda: sum(map(len, seen)) == 2)
        await until(lambda: settled(broker, QUEUE))
    assert [one for batch in seen for one in batch] == [("msg-created", 0), ("msg-updated", 2)]


async def test_the_argument_is_what_the_annotation_says(dsn: str) -> None:
    app, seen = pgmb.App(dsn), dict[str, Any]()
    group = app.group("g")

    @group.handler("plain")
    def plain(events):
        seen["plain"] = events

    @group.handler("payloads")
    def payloads(numbers: list[int]) -> None:
        seen["payloads"] = numbers

    @group.handler("deliveries")
    async def deliveries(events: list[pgmb.Delivery[int]]) -> None:
        seen["deliveries"] = events

    async with working(app) as broker:
        await broker.publish("a", 7)
        await until(lambda: len(seen) == 3)
    assert isinstance(seen["plain"][0], pgmb.Event)
    assert seen["payloads"] == [7]
    assert seen["deliveries"][0].queue == "g/deliveries"


async def test_a_set_is_retried_exactly_by_the_list_of_delays_and_then_dead(dsn: str) -> None:
    app = pgmb.App(dsn)
    calls: list[tuple[float, int, list[int]]] = []
    attempts: dict[int, int] = {}

    @app.group("my-node").handler("log-data", ["a"], retry_after=[0.4, 0.1], max=4)
    async def fail(events: list[pgmb.Event]) -> None:
        calls.append((asyncio.get_running_loop().time(), events[0].attempt, [one.payload for one in events]))
        attempts.update((one.payload, one.attempt) for one in events)
        if events[0].payload < 8:
            raise ValueError("no good")

    async with working(app) as broker:
        await broker.publish_many("a", range(10))
        await until(lambda: settled(broker, QUEUE))
        dead = await broker.dead_letters(QUEUE)
    sets = [numbers for _, attempt, numbers in calls if attempt == 1]
    assert sorted(number for numbers in sets for number in numbers) == list(range(10))
    assert max(map(len, sets)) <= 4
    for numbers in sets:
        times = [at for at, _, again in calls if again == numbers]
        if numbers[0] < 8:
            assert len(times) == 3, "exactly this set, three times"
            assert times[1] - times[0] >= 0.4
            assert times[2] - times[1] >= 0.1
    failed = [number for numbers in sets if numbers[0] < 8 for number in numbers]
    assert sorted(letter.event.payload for letter in dead) == sorted(failed)
    assert {(letter.error, letter.attempt) for letter in dead} == {("ValueError: no good", 3)}
    assert len(calls) == sum(3 if numbers[0] < 8 else 1 for numbers in sets)


async def test_any_handler_may_have_a_list_of_delays(dsn: str) -> None:
    app, calls = pgmb.App(dsn), list[int]()
    app.queue("second", retry=[0])

    @app.on("a", queue="first", retry=[0, 0])
    async def first(event: pgmb.Delivery[int]) -> None:
        calls.append(event.attempt)
        raise ValueError("no")

    @app.on("a", queue="second")
    async def second(event: pgmb.Delivery[int]) -> None:
        raise ValueError("no")

    async with working(app) as broker:
        await broker.publish("a", 1)

        async def dead() -> bool:
            return all([await broker.dead_letters(queue) for queue in ("first", "second")])

        await until(dead)
        attempts = [(await broker.dead_letters(queue))[0].attempt for queue in ("first", "second")]
    assert attempts == [3, 2]
    assert calls == [1, 2, 3]


async def test_no_delays_are_no_retries(dsn: str) -> None:
    app, calls = pgmb.App(dsn), list[int]()

    @app.group("my-node").handler("log-data", retry_after=[])
    def fail(events: list[pgmb.Event]) -> None:
        calls.append(len(events))
        raise ValueError("no")

    async with working(app) as broker:
        await broker.publish("a", 1)
        await until(lambda: bool(calls))
        await until(lambda: settled(broker, QUEUE))
        assert len(await broker.dead_letters(QUEUE)) == len(calls) == 1


async def test_parts_are_settled_and_retried_each_by_itself(dsn: str) -> None:
    app, calls = pgmb.App(dsn), list[tuple[str, list[int]]]()

    @app.group("my-node").handler("log-data", retry_after=[0.05, 0.05], split_by=by_topic)
    async def some(events: list[pgmb.Event]) -> None:
        (topic,) = {event.topic for event in events}
        calls.append((topic, [event.payload for event in events]))
        # The same error in all of them: they are told apart even so.
        if topic != "c" and events[0].attempt < 3:
            raise ValueError("again")

    async with await pgmb.aconnect(dsn) as broker:
        await broker.create_queue(QUEUE)
        await published(broker, *"abcabcaab")
    async with working(app) as broker:
        await until(lambda: len(calls) >= 7)
        await until(lambda: settled(broker, QUEUE))
        assert await broker.dead_letters(QUEUE) == []
    assert sorted(calls) == [("a", [0, 3, 6, 7])] * 3 + [("b", [1, 4, 8])] * 3 + [("c", [2, 5])]


@pytest.mark.parametrize("broken", ["raises", "loses", "repeats"])
async def test_a_split_that_is_none_fails_the_set(dsn: str, broken: str) -> None:
    app, calls = pgmb.App(dsn), list[Any]()

    def split(events: list[pgmb.Event]) -> list[list[pgmb.Event]]:
        if broken == "raises":
            raise KeyError("topic")
        return [events[1:]] if broken == "loses" else [events, events[:1]]

    app.group("my-node").handler("log-data", retry_after=[0], split_by=split)(calls.append)
    async with working(app) as broker:
        await published(broker, "a", "b")
        await until(lambda: settled(broker, QUEUE))
        dead = await broker.dead_letters(QUEUE)
    assert [letter.event.payload for letter in dead] == [0, 1]
    assert all("split_by" in (letter.error or "") or broken == "raises" for letter in dead)
    assert calls == []


async def test_single_events_may_be_told_apart_from_their_set(dsn: str) -> None:
    app, calls = pgmb.App(dsn), list[list[int]]()

    @app.group("my-node").handler("log-data", retry_after=[0, 0])
    async def some(events: list[pgmb.Delivery[int]]) -> None:
        calls.append([event.payload for event in events])
        for event in events:
            if event.payload == 1:
                event.reject("never")
        if events[0].attempt == 1:
            raise ValueError("the rest again")

    async with await pgmb.aconnect(dsn) as broker:
        await broker.create_queue(QUEUE)
        await broker.publish_many("a", range(3))
    async with working(app) as broker:
        await until(lambda: len(calls) == 2)
        await until(lambda: settled(broker, QUEUE))
        assert [(one.event.payload, one.error) for one in await broker.dead_letters(QUEUE)] == [(1, "never")]
    assert calls == [[0, 1, 2], [0, 2]]


async def test_handled_by_hand_too(dsn: str) -> None:
    app, calls = pgmb.App(dsn), list[list[int]]()

    @app.group("my-node").handler("log-data", ["a", "b"], retry_after=[0], split_by=by_topic)
    def some(events: list[pgmb.Event]) -> None:
        calls.append([event.payload for event in events])
        raise ValueError("no")

    broker = await app.abroker()
    await published(broker, *"abab")
    for _ in range(3):
        await app.ahandle(QUEUE, 100)
    assert sorted(calls) == [[0, 2], [0, 2], [1, 3], [1, 3]]
    assert len(await broker.dead_letters(QUEUE)) == 4
    await app.aclose()


def a_group(dsn: str, **asked: Any) -> pgmb.App:
    app = pgmb.App(dsn)
    app.group("my-node").handler("log-data", **asked)(lambda events: None)
    return app


def test_what_is_asked_for_may_change_with_the_next_start(dsn: str, db: psycopg.Connection[Any]) -> None:
    def bound(**asked: Any) -> Any:
        a_group(dsn, **asked).handle(QUEUE)
        found = queue_settings(db, QUEUE)
        values = [found[name] for name in ("filter", "params", "max_attempts")]
        return found["condition"] is not None, *values, times_bound(db, QUEUE)

    condition: dict[str, Any] = {"condition": "e.topic = s.params ->> 'topic'", "params": {"topic": "a"}}
    assert bound(**condition, retry_after=[60, 300]) == (True, None, {"topic": "a"}, 3, 1)
    assert bound(**condition, retry_after=[60]) == (True, None, {"topic": "a"}, 2, 1)
    db.execute("select pgmb.publish('a', '1'), pgmb.publish('b', '2')")
    asked = {**condition, "params": {"topic": "b"}}
    assert bound(**asked) == (True, None, {"topic": "b"}, 2, 2)
    db.execute("set statement_timeout = '1min'")
    assert db.execute("select pgmb.queue_depth(%s)", [QUEUE]).fetchone() == (0,)
    assert bound(filter="$.payload > 1") == (False, "$.payload > 1", None, 2, 3)
    assert bound()[:3] == (False, None, None), "what is not asked for is taken away"


def test_what_cannot_be_right_is_refused(dsn: str) -> None:
    group = pgmb.App(dsn).group("g")
    refused: list[dict[str, Any]] = [
        {"patterns": "a.*"},
        {"max": 0},
        {"concurrency": 0},
        {"timeout": 0},
        {"retry_after": [-1]},
        {"retry_after": ["soon"]},
        {"retry_after": "soon"},
    ]
    for wrong in refused:
        with pytest.raises(InvalidArgument):
            group.handler("h", **wrong)(lambda events: None)
    group.handler("twice")(lambda events: None)
    with pytest.raises(InvalidArgument):
        group.handler("twice")(lambda events: None)


async def test_a_group_may_run_alone(dsn: str) -> None:
    app, seen = pgmb.App(dsn), list[int]()
    one, other = app.group("one"), app.group("other")
    one.handler("h")(lambda events: seen.extend(event.payload for event in events))
    other.handler("h")(lambda events: seen.append(-1))
    stop = asyncio.Event()
    task = asyncio.create_task(one.work(stop))
    async with await pgmb.aconnect(dsn) as broker:

        async def there() -> bool:
            return any(status.queue == "one/h" for status in await broker.queue_status())

        await until(there)
        await broker.publish("a", 1)
        await until(lambda: bool(seen))
        stop.set()
        await task
        assert seen == [1]
        assert [status.queue for status in await broker.queue_status()] == ["one/h"]


SHOP = """
    import os, sys, time, pgmb

    app = pgmb.App(DSN)

    def note(*words):
        with open("seen.txt", "a") as file:
            file.write(" ".join(map(str, words)) + "\\n")

    @app.group("my-node").handler("log-data", retry_after=[0, 0, 0], max=20, lease_for=4)
    def log(events: list[pgmb.Event]) -> None:
        note(os.getpid(), events[0].attempt, *(event.payload for event in events))
        if os.path.exists("hang"):
            time.sleep(60)
        time.sleep(0.05)
"""


def test_two_processes_share_a_handler(dsn: str, tmp_path: Path) -> None:
    workers = Workers(tmp_path, dsn, SHOP)
    with pgmb.connect(dsn) as broker:
        broker.create_queue(QUEUE)
        broker.publish_many("a", range(600))
        with workers.running() as first, workers.running() as second:
            until_true(lambda: broker.queue_depth(QUEUE) == 0 and not broker.queue_status()[0].leases)
            assert first.poll() is None
            assert second.poll() is None
    lines = [line.split() for line in workers.lines()]
    assert sorted(int(number) for line in lines for number in line[2:]) == list(range(600)), "each once"
    assert len({line[0] for line in lines}) == 2, workers.logged()


def test_a_process_killed_in_the_middle_of_a_set(dsn: str, tmp_path: Path) -> None:
    workers = Workers(tmp_path, dsn, SHOP)
    (tmp_path / "hang").touch()
    with pgmb.connect(dsn) as broker:
        broker.create_queue(QUEUE)
        broker.publish_many("a", range(10))
        with workers.running() as process:
            until_true(lambda: bool(workers.lines()))
            process.send_signal(signal.SIGKILL)
            process.wait()
        (tmp_path / "hang").unlink()
        with workers.running():
            until_true(lambda: len(workers.lines()) >= 2)
            until_true(lambda: broker.queue_depth(QUEUE) == 0 and not broker.queue_status()[0].leases)
    first, second = (line.split() for line in workers.lines())
    assert (first[1], second[1]) == ("1", "2")
    assert first[2:] == second[2:] == [str(number) for number in range(10)]


async def test_a_worker_that_stops_finishes_its_set(dsn: str) -> None:
    app = pgmb.App(dsn)
    begun, go_on = threading.Event(), threading.Event()

    @app.group("my-node").handler("log-data", max=5, retry_after=[0])
    def slow(events: list[pgmb.Event]) -> None:
        begun.set()
        go_on.wait(30)

    async with await pgmb.aconnect(dsn) as broker:
        await broker.create_queue(QUEUE)
        await broker.publish_many("a", range(8))
        stop = asyncio.Event()
        task = asyncio.create_task(app.work(stop))
        await until(begun.is_set)
        stop.set()
        go_on.set()
        await task
        assert await broker.queue_depth(QUEUE) in (0, 3)
        lease = await broker.receive(QUEUE)
        assert {event.attempt for event in lease} <= {1}, "what was not begun was not tried"
