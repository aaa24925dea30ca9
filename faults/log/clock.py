"""A server's clock that is wrong for a while: ahead or back by an hour or a year, under traffic.

Consumers of every kind of queue retry, release, extend, and die with their lease. Endpoints, schedules,
delayed events and deduplication keys are in use. When the clock is right again, all must go on within
a minute, and no event may be missing.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Final
from uuid import UUID

import psycopg

from harness.answers import slow
from harness.clock import Clock
from harness.dispatchers import LOOPBACK
from harness.receiver import ReceiverProcess

GOES_ON_WITHIN: Final = 60.0
"""Seconds after the clock is right again."""
_LEASE: Final = "3 s"
_KEYS: Final = 4
_TIMES: Final = "times in the future"
_RPS: Final = 25
"""Requests a second that the endpoint with a rate gets: fewer than there are events."""

QUEUES: Final = {
    "plain": "",
    "ordered": ", ordered => true",
    "limited": ", max_in_flight => 20",
    "rps": ", rps => 100",
    "fair": ", fair_by => 'key'",
    "prioritised": ", lanes => '{t.a, t.b}'",
    "ttl": ", ttl => '3 years'",
    "capped": ", max_length => 100000",
    "filtered": ", filter => '$.payload.n >= 0'",
}
ENDPOINTS: Final = {"hook": "", "paced": f", rps => {_RPS}", "ordered": ", ordered => true"}
_IN_LOG: Final = "in the log, and event_fate does not find it"
"""An event that was delayed: its id tells nothing of its place."""
_WAITS: Final = ("delayed", "waiting", "leased", "retrying", _IN_LOG)
_FATE: Final = f"""
select case when fate ->> 'found' = 'unknown' and exists (select from pgmb.log_main l where l.id = one)
    then '{_IN_LOG}' else coalesce(own ->> 'state', nullif(fate ->> 'found', 'log'), 'not taken') end,
  round(extract(epoch from coalesce(own ->> 'until', fate ->> 'due_at')::timestamptz - now()) / 60),
  own ->> 'reason'
from cast(%s as uuid) one
cross join lateral (select pgmb.event_fate(one) fate) found
left join lateral (
  select c from json_array_elements(fate -> 'consumers') c
  where c ->> 'kind' = %s and c ->> 'name' = %s) of (own) on true
""".encode()
"""Where an event stands at a consumer, and in how many minutes it is due."""
STEPS: Final = {
    "a year ahead": timedelta(days=365),
    "an hour ahead": timedelta(hours=1),
    "an hour back": timedelta(hours=-1),
    "a year back": timedelta(days=-365),
}


@dataclass(slots=True)
class Result:
    steps: list[str]
    stood: list[str] = field(default_factory=list)
    """What had not gone on a minute after a step."""
    missing: Counter[str] = field(default_factory=Counter)
    """Events that a queue or an endpoint did not get, by what the database says of them."""
    repeated_due_times: int = 0
    slowest: float = 0.0
    events: int = 0
    ahead: int = 0
    """Rows with times of the future that were left."""
    errors: Counter[str] = field(default_factory=Counter)
    """Of consumers' statements: they connected again."""
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        return not self.stood and not self.missing and not self.repeated_due_times and not self.ahead

    def __str__(self) -> str:
        return (
            f"clock {', '.join(self.steps)}: {self.events} events | {'holds' if self.holds else 'VIOLATED'}:"
            f" {self.missing.total()} missing, {len(self.stood)} stood still,"
            f" {self.repeated_due_times} due times repeated,"
            f" {self.ahead} times in the future left; all went on within {self.slowest:.1f} s,"
            f" {self.errors.total()} statements failed"
            f" | {self.seconds:.1f} s"
            + "".join(f"\n  stood still: {what}" for what in self.stood)
            + "".join(f"\n  missing: {count} of {where}" for where, count in self.missing.items())
            + "".join(f"\n  failed: {count} times {error}" for error, count in self.errors.items())
        )


def run(dsn: str, clock: Clock, *, steps: list[str], wrong_for: float, seed: int) -> Result:
    began = time.monotonic()
    result = Result(steps)
    with (
        psycopg.connect(dsn, autocommit=True) as admin,
        ReceiverProcess(("webhook-id",), {"ok": partial(slow, seconds=0.0)}) as receiver,
    ):
        _prepare(admin, receiver.url)
        traffic = _Traffic(dsn, seed)
        with _services(dsn), traffic:
            # A scheduler that starts with a wrong clock has no other to compare it with.
            deadline = time.monotonic() + GOES_ON_WITHIN
            while len(traffic.ticks) < 2 and time.monotonic() < deadline:
                time.sleep(0.1)
            for step in steps:
                _step(admin, clock, traffic, receiver, result, step, wrong_for)
            traffic.stop_publishing()
            result.errors = traffic.errors
            result.missing = _became(admin, traffic, _drain(traffic, receiver))
        result.repeated_due_times = _repeated(admin)
        result.ahead = _ahead(admin)
    result.events = len(traffic.sent)
    result.seconds = time.monotonic() - began
    return result


def _prepare(admin: psycopg.Connection[Any], url: str) -> None:
    for name, options in QUEUES.items():
        admin.execute(
            f"select pgmb.create_queue('{name}', '{{t.#}}', backoff_base => '100 ms'{options})".encode()
        )
    for name, options in ENDPOINTS.items():
        admin.execute(
            f"select pgmb.create_endpoint(%s, %s, '{{t.#}}'{options})".encode(), [name, f"{url}/ok/{name}"]
        )
    admin.execute("select pgmb.create_queue('ticks', '{tick.#}')")
    for missed in ("last", "all"):
        admin.execute(
            "select pgmb.create_schedule(%s, '* * * * * *', %s, '1', now() + interval '1 s', missed => %s)",
            [missed, f"tick.{missed}", missed],
        )


@contextmanager
def _services(dsn: str) -> Generator[None]:
    """Ticker, janitor, scheduler and dispatcher, as `pgmb serve` runs them."""
    from pgmb import aconnect
    from pgmb.services import Dispatcher, Janitor, Scheduler, Ticker, serve

    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def work() -> None:
        async with await aconnect(dsn) as broker:
            await serve(broker, [Ticker(), Janitor(), Scheduler(), Dispatcher(LOOPBACK)], stop)

    def run_loop() -> None:
        loop.run_until_complete(work())

    thread = threading.Thread(target=run_loop)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30.0)
        loop.close()


class _Traffic:
    """Publishes events, and consumes every queue."""

    def __init__(self, dsn: str, seed: int) -> None:
        self._dsn = dsn
        self._chance = random.Random(seed)
        self._publishing = threading.Event()
        self._working = threading.Event()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self.sent: dict[int, UUID] = {}
        self.delayed: set[int] = set()
        self.done: dict[str, set[int]] = {name: set() for name in QUEUES}
        self.unsure: dict[str, set[int]] = {name: set() for name in QUEUES}
        """What consumers acknowledged and got no answer."""
        self.ticks: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.newest = 0

    def __enter__(self) -> _Traffic:
        self._publishing.set()
        self._working.set()
        self._threads = [threading.Thread(target=self._publish)]
        self._threads += [threading.Thread(target=self._consume, args=[name]) for name in (*QUEUES, "ticks")]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._publishing.clear()
        self._working.clear()
        for thread in self._threads:
            thread.join(30.0)

    def stop_publishing(self) -> None:
        self._publishing.clear()
        self._threads[0].join(30.0)

    def _publish(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            while self._publishing.is_set():
                for delay in (None, None, "1 s"):
                    self.newest += 1
                    number = self.newest
                    row = connection.execute(
                        "select pgmb.publish(%s, %s, key => %s, delay => %s::interval)",
                        [f"t.{'ab'[number % 2]}", f'{{"n": {number}}}', f"k{number % _KEYS}", delay],
                    ).fetchone()
                    assert row is not None
                    self.sent[number] = row[0]
                    if delay:
                        self.delayed.add(number)
                time.sleep(0.1)

    def _consume(self, queue: str) -> None:
        chance = random.Random(self._chance.random())
        while self._working.is_set():
            try:
                # Queues with a filter want a limit: one that never fires (harness.clock).
                options = "-c statement_timeout=1h"
                with psycopg.connect(self._dsn, autocommit=True, options=options) as connection:
                    self._work(connection, queue, chance)
            except psycopg.Error as error:
                self.errors[f"{queue}: {str(error).partition(chr(10))[0]}"] += 1
                time.sleep(0.1)

    def _work(self, connection: psycopg.Connection[Any], queue: str, chance: random.Random) -> None:
        receive = f"select lease, payload, topic from pgmb.receive(%s, 20, '{_LEASE}')".encode()
        while self._working.is_set():
            rows = connection.execute(receive, [queue]).fetchall()
            if not rows:
                time.sleep(0.05)
                continue
            lease = rows[0][0]
            fate = chance.random()
            if queue == "ticks":
                connection.execute("select pgmb.ack(%s)", [lease])
                self.ticks.update(topic for _, _, topic in rows)
            elif fate < 0.05:
                # A consumer that dies.
                continue
            elif fate < 0.15:
                connection.execute("select pgmb.retry(%s, after => '1 s')", [lease])
            elif fate < 0.2:
                connection.execute("select pgmb.release(%s)", [lease])
            elif fate < 0.25:
                # One that lives longer, and dies.
                connection.execute("select pgmb.extend(%s, '4 s')", [lease])
            else:
                numbers = {payload["n"] for _, payload, _ in rows}
                self.unsure[queue] |= numbers
                connection.execute("select pgmb.ack(%s)", [lease])
                self.unsure[queue] -= numbers
                with self._lock:
                    self.done[queue] |= numbers


def _step(
    admin: psycopg.Connection[Any],
    clock: Clock,
    traffic: _Traffic,
    receiver: ReceiverProcess,
    result: Result,
    step: str,
    wrong_for: float,
) -> None:
    """Lets the clock be wrong for a while, and waits until everything goes on."""
    claim = "select pgmb.claim_key('main', %s, gen_random_uuid(), '5 s')"
    trip = "select pgmb.trip_endpoint(e.id, 'tried', '2 s', '2 s') from pgmb.endpoint e where e.name = 'hook'"
    clock.set(STEPS[step])
    with psycopg.connect(admin.info.dsn, autocommit=True) as other:
        other.execute(claim, [step])
    admin.execute(trip)
    time.sleep(wrong_for)
    admin.execute(trip)
    clock.set(timedelta())
    began = time.monotonic()
    number = traffic.newest
    at = receiver_counts(receiver)
    ticks = traffic.ticks.copy()
    waiting = {*(f"queue {name}" for name in QUEUES), *(f"endpoint {name}" for name in ENDPOINTS)}
    waiting |= {f"schedule {missed}" for missed in ("last", "all")} | {"key", "delayed", _TIMES}
    looked = time.monotonic()
    while waiting and time.monotonic() < began + GOES_ON_WITHIN:
        time.sleep(0.1)
        for name in QUEUES:
            fresh = [one for one in traffic.done[name].copy() if one > number]
            if len(fresh) >= 5 and {one % _KEYS for one in fresh} == set(range(_KEYS)):
                waiting.discard(f"queue {name}")
        later = {one for one in traffic.delayed.copy() if one > number}
        if later & traffic.done["plain"].copy():
            waiting.discard("delayed")
        if time.monotonic() > looked + 1.0:
            looked = time.monotonic()
            counts = receiver_counts(receiver)
            waiting -= {f"endpoint {name}" for name in ENDPOINTS if counts[name] > at[name] + 5}
            key = admin.execute(claim, [step]).fetchone()
            if key == (None,):
                waiting.discard("key")
            if not _ahead(admin):
                waiting.discard(_TIMES)
        waiting -= {
            f"schedule {missed}"
            for missed in ("last", "all")
            if traffic.ticks[f"tick.{missed}"] > ticks[f"tick.{missed}"] + 2
        }
    result.slowest = max(result.slowest, time.monotonic() - began)
    result.stood += [f"{what} after {step}" for what in sorted(waiting)]


def receiver_counts(receiver: ReceiverProcess) -> Counter[str]:
    """How many requests each endpoint got."""
    return Counter(request.path.rpartition("/")[2] for request in receiver.requests())


def _drain(traffic: _Traffic, receiver: ReceiverProcess) -> dict[str, set[UUID]]:
    """Waits until every queue and endpoint had every event. What one with a rate has to catch up on takes
    its time. Returns what they did not get."""
    missing = _missing(traffic, receiver)
    behind = len(missing.get("endpoint paced", ())) / _RPS
    deadline = time.monotonic() + GOES_ON_WITHIN + behind
    while missing and time.monotonic() < deadline:
        time.sleep(0.5)
        missing = _missing(traffic, receiver)
    return missing


def _missing(traffic: _Traffic, receiver: ReceiverProcess) -> dict[str, set[UUID]]:
    got = {
        f"queue {name}": {traffic.sent[number] for number in done.copy() if number in traffic.sent}
        for name, done in traffic.done.items()
    } | {f"endpoint {name}": set[UUID]() for name in ENDPOINTS}
    for request in receiver.requests():
        got[f"endpoint {request.path.rpartition('/')[2]}"].add(UUID(request.headers["webhook-id"]))
    wanted = set(traffic.sent.values())
    return {name: wanted - ids for name, ids in got.items() if wanted - ids}


def _became(admin: psycopg.Connection[Any], traffic: _Traffic, missing: dict[str, set[UUID]]) -> Counter[str]:
    """What the database says of events that are missing. It lost those that it does not keep waiting."""
    became: Counter[str] = Counter()
    for where, ids in missing.items():
        kind, _, name = where.partition(" ")
        unsure = {traffic.sent[number] for number in traffic.unsure[name]} if kind == "queue" else set()
        for one in ids:
            row = admin.execute(_FATE, [one, kind, name]).fetchone()
            state, due, reason = row or ("unknown", None, None)
            if state == "done" and one in unsure:
                continue
            became[
                f"{where}: {state if state in _WAITS else f'LOST, {state}'}"
                + (f", due in {due} minutes" if due is not None else "")
                + (f", {reason}" if reason else "")
            ] += 1
    return became


def _ahead(admin: psycopg.Connection[Any]) -> int:
    """How many rows have times of the future."""
    rows = admin.execute("select coalesce(sum(t.rows), 0) from pgmb.times_ahead() t").fetchone()
    return int(rows[0]) if rows else 0


def _repeated(admin: psycopg.Connection[Any]) -> int:
    rows = admin.execute(
        "select count(*) - count(distinct (topic, headers ->> 'due_at')) from pgmb.log_main"
        " where topic like 'tick.%'"
    ).fetchone()
    return int(rows[0]) if rows else 0
