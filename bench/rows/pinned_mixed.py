"""pinned-mixed: the cost of every kind of queue while an old snapshot keeps vacuum from removing dead rows.

One process publishes, partly with a delay, and receives from a plain queue, a queue with retries, an ordered
one, one that feeds endpoints and one that matches nothing. It also calls tick and maintain. Each of these has
a database session of its own, whose CPU time is measured. A control session always does the same work, and
the figures are relative to its cost, because the speed of the machine varies.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import psycopg

from bench import cpu
from bench.forms import Form
from bench.ground import Ground, Site
from bench.outcome import Check, Outcome, Reading
from harness.states import queue_names, take_snapshot

_TURNS_PER_SECOND = 25
_EVENTS, _DELAYED, _KEYS, _ENDPOINTS = 40, 10, 200, 5
_AFTER = "1 second"
_GOAL = 1.15
_CONTROL = "control"
KINDS = [
    *("plain", "retries", "ordered", "endpoints", "endpoint retries"),
    *("empty receive", "publish with a delay", "tick", "maintain"),
]
CHECKS = [f"pinned xmin, {kind}, cost last/first" for kind in KINDS]


def run(ground: Ground, form: Form) -> Outcome:
    seconds, window = {"tiny": (3.0, 1.0), "full": (600.0, 60.0)}.get(form.name, (60.0, 15.0))
    outcome = Outcome(
        "pinned-mixed",
        f"{_TURNS_PER_SECOND * (_EVENTS + _DELAYED)} events/s for {seconds:g} s in queues of all kinds,"
        " an idle REPEATABLE READ transaction",
    )
    with contextlib.closing(ground.site("pgmb, new log")) as site, _Load(site) as load:
        # Plans statements, fills caches, and lets claims become old enough for maintain to clear them.
        load.run(min(seconds, 13.0))
        with psycopg.connect(site.dsn) as pin:
            pin.execute("set transaction isolation level repeatable read")
            take_snapshot(pin)
            samples = load.run(seconds)
            pin.rollback()
    begin, end = samples[0].at, samples[-1].at
    first = [sample for sample in samples if sample.at <= begin + window + 0.5]
    last = [sample for sample in samples if sample.at >= end - window - 0.5]
    speed = _cost(last, _CONTROL) / _cost(first, _CONTROL)
    for kind, name in zip(KINDS, CHECKS, strict=True):
        before, after = _cost(first, kind), _cost(last, kind)
        outcome.checks.append(Check(name, after / before / speed, _GOAL, at_least=False))
        done, spent = samples[-1].done[kind], samples[-1].spent[kind] - samples[0].spent[kind]
        outcome.readings.append(Reading(kind, done, end - begin, spent, 0.0))
        outcome.notes.append(
            f"{kind}: {before * 1e6:.0f} us in the first {window:g} s, {after * 1e6:.0f} in the last"
        )
    outcome.notes.append(f"cost of the control session, last/first: {speed:.2f}")
    return outcome


@dataclass(frozen=True)
class _Sample:
    at: float
    done: dict[str, int]
    spent: dict[str, float]


@dataclass
class _Session:
    """A database session. `work` runs in every turn and returns the number of events or calls."""

    connection: psycopg.Connection[Any]
    work: Callable[[psycopg.Connection[Any]], int]
    done: int = field(default=0)

    def turn(self) -> None:
        self.done += self.work(self.connection)

    def spent(self) -> float:
        return cpu.of_process(self.connection.info.backend_pid)


class _Load:
    """All sessions."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._stack = contextlib.ExitStack()
        self._published = 0

    def __enter__(self) -> _Load:
        admin = self._site.connection
        for queue in ("plain", "retries", "ordered", "empty"):
            admin.execute(
                "select pgmb.create_queue(%s, %s, ordered => %s)",
                [queue, ["nothing"] if queue == "empty" else ["#"], queue == "ordered"],
            )
        admin.execute(
            "create table bench_control as select id, md5(id::text) filler from generate_series(1, 200000) id"
        )
        admin.execute("alter table bench_control add primary key (id)")
        admin.execute("vacuum analyze bench_control")
        for number in range(_ENDPOINTS):
            admin.execute(
                "select pgmb.create_endpoint(%s, 'http://localhost/', array['topic'])", [f"endpoint{number}"]
            )
        (self._shared,) = set(queue_names(admin)) - {"plain", "retries", "ordered", "empty"}
        works = [
            *(_plain, _retries, _ordered, self._deliver, _deliver_again),
            *(_empty, _publish_later, _tick, _maintain),
        ]
        self._sessions = {name: self._open(work) for name, work in zip(KINDS, works, strict=True)}
        self._sessions[_CONTROL] = self._open(_control)
        self._publisher = self._open(self._publish)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, seconds: float) -> list[_Sample]:
        begin = now = time.monotonic()
        samples = [self._sample(begin)]
        turn = 0
        while now < begin + seconds:
            time.sleep(max(0.0, begin + turn / _TURNS_PER_SECOND - now))
            self._publisher.turn()
            for name, session in self._sessions.items():
                if name != "maintain" or turn % 5 == 0:
                    session.turn()
            turn += 1
            now = time.monotonic()
            if now >= samples[-1].at + min(1.0, seconds / 10):
                samples.append(self._sample(now))
        return samples

    def _open(self, work: Callable[[psycopg.Connection[Any]], int]) -> _Session:
        connection = self._stack.enter_context(
            psycopg.connect(self._site.dsn, autocommit=True, prepare_threshold=0)
        )
        return _Session(connection, work)

    def _sample(self, at: float) -> _Sample:
        return _Sample(
            at,
            {name: session.done for name, session in self._sessions.items()},
            {name: session.spent() for name, session in self._sessions.items()},
        )

    def _publish(self, connection: psycopg.Connection[Any]) -> int:
        self._published += _EVENTS
        connection.execute(
            "insert into pgmb.log_main (topic, key, payload)"
            " select 'topic', 'key' || n %% %s, '{}' from generate_series(%s::int, %s::int) n",
            [_KEYS, self._published, self._published + _EVENTS - 1],
        )
        return _EVENTS

    def _deliver(self, connection: psycopg.Connection[Any]) -> int:
        """Every fifth event fails at its first endpoint."""
        rows = connection.execute(
            "select lease, seq, endpoints[1] from pgmb.receive_deliveries(%s, 100)", [self._shared]
        ).fetchall()
        if not rows or rows[0][0] is None:
            return 0
        failed = [row for row in rows if row[1] % 5 == 0]
        seqs, endpoints = [row[1] for row in failed], [row[2] for row in failed]
        connection.execute(
            "select pgmb.settle_deliveries(%s, null, %s::bigint[], %s::uuid[],"
            " array_fill(%s::interval, array[%s]), array_fill('no'::text, array[%s]),"
            " array_fill(true, array[%s]), array_fill(false, array[%s]))",
            [rows[0][0], seqs, endpoints, _AFTER, *[len(failed)] * 4],
        )
        return len(rows)


def _cost(samples: list[_Sample], kind: str) -> float:
    """CPU seconds per event or call: the median of the samples, so that a disturbed one does not count."""
    steps = [
        (later.spent[kind] - earlier.spent[kind], later.done[kind] - earlier.done[kind])
        for earlier, later in itertools.pairwise(samples)
    ]
    return median(spent / done for spent, done in steps if done)


def _receive(connection: psycopg.Connection[Any], queue: str, most: int) -> tuple[Any, list[int], bool]:
    rows = connection.execute(
        "select lease, seq, attempt from pgmb.receive(%s, %s, raw => true)", [queue, most]
    ).fetchall()
    return (rows[0][0] if rows else None), [row[1] for row in rows], bool(rows) and rows[0][2] > 1


def _plain(connection: psycopg.Connection[Any]) -> int:
    lease, seqs, _ = _receive(connection, "plain", 100)
    if seqs:
        connection.execute("select pgmb.ack(%s)", [lease])
    return len(seqs)


def _retries(connection: psycopg.Connection[Any]) -> int:
    return _fail_some(connection, "retries", one_in=5, leases=2)


def _ordered(connection: psycopg.Connection[Any]) -> int:
    """The events behind a failed one with the same key wait for it."""
    return _fail_some(connection, "ordered", one_in=20, leases=4)


def _fail_some(connection: psycopg.Connection[Any], queue: str, *, one_in: int, leases: int) -> int:
    """Some events fail once. Retries are leased separately from new events."""
    done = 0
    for _ in range(leases):
        lease, seqs, again = _receive(connection, queue, 100)
        failed = [] if again else [seq for seq in seqs if seq % one_in == 0]
        if failed:
            connection.execute("select pgmb.retry(%s, %s::bigint[], %s)", [lease, failed, _AFTER])
        if seqs:
            connection.execute("select pgmb.ack(%s)", [lease])
        done += len(seqs)
    return done


def _deliver_again(connection: psycopg.Connection[Any]) -> int:
    rows = connection.execute("select lease, delivery from pgmb.claim_deliveries(100)").fetchall()
    if rows:
        deliveries = [row[1] for row in rows]
        connection.execute("select pgmb.settle_claimed(%s, %s::bigint[])", [rows[0][0], deliveries])
    return len(rows)


def _empty(connection: psycopg.Connection[Any]) -> int:
    connection.execute("select pgmb.receive('empty')")
    return 1


def _publish_later(connection: psycopg.Connection[Any]) -> int:
    connection.execute(
        "select pgmb.publish('topic', '{}', delay => %s::interval) from generate_series(1, %s)",
        [_AFTER, _DELAYED],
    )
    return _DELAYED


def _tick(connection: psycopg.Connection[Any]) -> int:
    connection.execute("select pgmb.tick()")
    return 1


def _maintain(connection: psycopg.Connection[Any]) -> int:
    connection.execute("select pgmb.maintain()")
    return 1


def _control(connection: psycopg.Connection[Any]) -> int:
    """Reads 200 rows of a static table by index."""
    connection.execute(
        "select count(c.filler) from generate_series(1, 200) n"
        " join bench_control c on c.id = 1 + (n::bigint * 7919 + %s::bigint * 104729) %% 200000",
        [time.monotonic_ns() % 1000],
    )
    return 1
