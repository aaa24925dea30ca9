"""Converting a queue: it becomes ordered, fair, prioritised or plain, and keeps what waits in it.

Promises: no event is lost, none that was settled comes again, dead letters stay, and events of one key come
in order where the queue is ordered from then on.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import psycopg
import pytest

import pgmb
from harness.sessions import Sessions
from pgmb.errors import Conflict, InvalidArgument, LeaseLost, QueueHeld, QueueNotFound

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ordered": {"ordered": True, "shards": 1},
    "sharded": {"ordered": True},
    "lanes": {"lanes": ["urgent", "soon"]},
    "fair": {"fair_by": "key"},
}
KEYS = ["a", "b", "c", None]
TOPICS = ["urgent", "soon", "other"]


@pytest.fixture
def broker(dsn: str) -> pgmb.Broker:
    return pgmb.connect(dsn, max_size=8)


def publish(broker: pgmb.Broker, names: range) -> None:
    for name in names:
        broker.publish(TOPICS[name % 3], name, key=KEYS[name % 4])


def take_all(broker: pgmb.Broker, max: int = 7) -> list[tuple[str | None, int]]:
    """What comes if everything is acked at once, until nothing came for longer than keys stay blocked."""
    taken: list[tuple[str | None, int]] = []
    idle = time.monotonic()
    while time.monotonic() < idle + 0.2:
        lease = broker.receive("q", max)
        if lease:
            taken += [(event.key, event.payload) for event in lease]
            lease.ack()
            idle = time.monotonic()
    return taken


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("plain", "ordered"),
        ("plain", "sharded"),
        ("plain", "lanes"),
        ("plain", "fair"),
        ("ordered", "plain"),
        ("sharded", "plain"),
        ("sharded", "fair"),
        ("lanes", "sharded"),
        ("fair", "sharded"),
    ],
)
def test_what_waits_is_kept_and_what_is_settled_does_not_come_again(
    broker: pgmb.Broker, before: str, after: str
) -> None:
    broker.create_queue("q", max_attempts=10, **FORMS[before])
    publish(broker, range(60))
    settled: set[int] = set()
    failed: set[int] = set()
    dead: set[int] = set()
    with broker.connection() as late, late.transaction():
        late.execute("select pgmb.publish('other', '1000', key => 'a')")
        for _ in range(4):
            lease = broker.receive("q", 8)
            for event in lease:
                kind = event.payload % 5
                if kind == 3:
                    failed.add(event.payload)
                elif kind == 4:
                    dead.add(event.payload)
                    lease.bury(event, "no")
                else:
                    settled.add(event.payload)
                    lease.ack(event)
            if failing := [event for event in lease if event.payload % 5 == 3]:
                lease.retry(failing, after=0)
        publish(broker, range(60, 80))
        broker.convert_queue("q", **FORMS[after])
        publish(broker, range(80, 100))
    taken = take_all(broker)
    assert sorted(name for _, name in taken) == sorted({*range(100), 1000} - settled - dead)
    assert {letter.event.payload for letter in broker.dead_letters("q")} == dead
    settings = next(status for status in broker.queue_status() if status.queue == "q")
    assert (settings.leases, settings.retries) == (0, 0)
    if FORMS[after].get("ordered"):
        for key in KEYS[:3]:
            names = [name for of, name in taken if of == key and name < 1000]
            assert names == sorted(names)
        assert broker.redrive("q") == len(dead)
        assert {name for _, name in take_all(broker)} == dead


def test_a_queue_is_not_converted_while_leases_are_held(broker: pgmb.Broker) -> None:
    broker.create_queue("q")
    publish(broker, range(4))
    held = broker.receive("q", 3)
    held.ack(held.events[0])
    with pytest.raises(QueueHeld, match="leases of queue 'q' hold 2 events"):
        broker.convert_queue("q", ordered=True)
    held.ack(held.events[1:])
    broker.convert_queue("q", ordered=True)
    assert [name for _, name in take_all(broker)] == [3]


def test_expired_leases_do_not_hold_up_a_conversion(broker: pgmb.Broker) -> None:
    broker.create_queue("q")
    publish(broker, range(4))
    broker.receive("q", 3).extend(0.001)
    time.sleep(0.01)
    broker.convert_queue("q", ordered=True)
    assert sorted(name for _, name in take_all(broker)) == [0, 1, 2, 3]


@pytest.mark.parametrize("before", [pytest.param("plain", marks=pytest.mark.short_way), "ordered", "fair"])
def test_a_receive_that_waited_for_a_conversion_takes_nothing_by_the_old_form(
    broker: pgmb.Broker, sessions: Sessions, before: str
) -> None:
    broker.create_queue("q", **FORMS[before])
    publish(broker, range(20))
    admin = sessions["admin"]
    admin.run("begin")
    admin.run(
        "select pgmb.convert_queue('q', lanes => '{urgent}')"
        if before == "ordered"
        else "select pgmb.convert_queue('q', true, 1)"
    )
    waiting = sessions["one"].start("select lease from pgmb.receive('q', 100)").blocked()
    admin.run("commit")
    # A plain queue is asked for its form after the wait: the receive goes on by the new one.
    leases = waiting.result()
    assert len(leases) == (20 if before == "plain" else 0)
    for lease in set(leases):
        admin.run("select pgmb.retry(%s, after => '0 s')", lease)
    assert sorted(name for _, name in take_all(broker)) == list(range(20))


def test_forms_that_exclude_each_other_are_refused(broker: pgmb.Broker) -> None:
    broker.create_queue("q", max_length=10)
    with pytest.raises(InvalidArgument, match="lanes cannot be combined with ordered or max_length"):
        broker.convert_queue("q", lanes=["a"])
    with pytest.raises(InvalidArgument, match="fair_by cannot be combined with ordered"):
        broker.convert_queue("q", ordered=True, fair_by="key")
    broker.create_queue("r")
    broker.create_queue("r/1")
    with pytest.raises(Conflict, match="queue 'r/1' exists"):
        broker.convert_queue("r", ordered=True)
    with pytest.raises(QueueNotFound):
        broker.convert_queue("none")


@pytest.mark.minutes
def test_conversions_under_load_lose_and_repeat_no_effect(broker: pgmb.Broker, dsn: str) -> None:
    """Each effect commits with its ack, so that an event has one exactly."""
    broker.create_queue("q", max_attempts=100, backoff_base=0.01, lease_for=5)
    with broker.connection() as conn:
        conn.execute("create table effect (id bigserial primary key, name int, key text)")
    ending = threading.Event()
    published = 0

    def produce() -> None:
        nonlocal published
        while not ending.is_set():
            publish(broker, range(published, published + 20))
            published += 20
            ending.wait(0.1)

    def consume(number: int) -> None:
        with pgmb.connect(dsn, max_size=2) as own:
            while not (ending.is_set() and own.queue_depth("q") == 0 and not _retries(own)):
                try:
                    lease = own.receive("q", 10)
                    if not lease:
                        time.sleep(0.01)
                        continue
                    failing = [event for event in lease if event.payload % 17 == 3 and event.attempt == 1]
                    if failing:
                        lease.retry(failing)
                    with own.connection() as conn, conn.transaction():
                        done = [event for event in lease if event not in failing]
                        if lease.ack(done, conn=conn) == len(done):
                            conn.cursor().executemany(
                                "insert into effect (name, key) values (%s, %s)",
                                [(event.payload, event.key) for event in done],
                            )
                        else:
                            raise LeaseLost("in part")
                except (LeaseLost, QueueHeld):
                    continue

    threads = [threading.Thread(target=produce)]
    threads += [threading.Thread(target=consume, args=[number]) for number in range(2)]
    for thread in threads:
        thread.start()
    for form in ["ordered", "plain", "fair", "sharded", "lanes", "plain"]:
        time.sleep(0.15)
        broker.pause("q")
        while True:
            try:
                broker.convert_queue("q", **FORMS[form])
                break
            except (QueueHeld, psycopg.errors.LockNotAvailable):
                time.sleep(0.01)
        broker.resume("q")
    ending.set()
    for thread in threads:
        thread.join(60)
    with broker.connection() as conn:
        (told,) = conn.execute("select count(*), count(distinct name) from effect").fetchall()
    assert told == (published, published)
    assert broker.dead_letters("q") == []


def _retries(broker: pgmb.Broker) -> int:
    (status,) = [one for one in broker.queue_status() if one.queue == "q"]
    return status.retries + status.leases


@pytest.mark.parametrize("before", ["sharded", "lanes", "fair"])
@pytest.mark.parametrize("after", ["plain", "ordered"])
def test_events_that_wait_expire_after_a_conversion_as_before(
    broker: pgmb.Broker, before: str, after: str
) -> None:
    broker.create_queue("q", ttl=0.4, max_attempts=3, **FORMS[before])
    publish(broker, range(9))
    # One was delivered before: as a retry it does not expire.
    lease = broker.receive("q", 1)
    (delivered,) = lease
    lease.retry(after=0)
    broker.convert_queue("q", **FORMS[after])
    time.sleep(0.5)
    broker.publish("other", "fresh")
    assert sorted(str(name) for _, name in take_all(broker)) == sorted([str(delivered.payload), "fresh"])
    letters = broker.dead_letters("q")
    assert sorted(letter.event.payload for letter in letters) == sorted({*range(9)} - {delivered.payload})
    assert {(letter.event.attempt, letter.error) for letter in letters} == {
        (0, "expired: older than 00:00:00.4")
    }


def test_converted_events_within_their_time_to_live_are_delivered(
    broker: pgmb.Broker,
) -> None:
    broker.create_queue("q", ttl=60, **FORMS["lanes"])
    publish(broker, range(9))
    broker.convert_queue("q")
    assert sorted(name for _, name in take_all(broker)) == [*range(9)]
    assert broker.dead_letters("q") == []
