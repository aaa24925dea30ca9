"""Dispatchers that are killed, stopped and restarted before endpoints of every kind, as the server sees it.

Three dispatchers post to twenty endpoints: plain, failing, refusing, slow, limited, ordered, with batches,
throttling, down for a while, and a worker. Meanwhile one dispatcher after another is killed, stopped for a
while or restarted, and the database is restarted. Every committed event reaches each endpoint that wants it,
in its order; limits are never exceeded; what recovers is active again within the time of its probe.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

from faults.crew import Crew
from harness.answers import slow
from harness.dispatchers import wait_settled
from harness.postgres import Server
from harness.receiver import Answer, Exchange, ReceiverProcess, Request

ROOT = Path(__file__).parents[2]
DISPATCHERS = 3
RPS = 10
IN_FLIGHT = 3
PAUSE = 1.5
"""Seconds from one fault to the next."""
LONG_STOP = 13.0
"""Seconds, so that the others take a stopped dispatcher's share."""
RECOVERED_WITHIN = 45.0
"""Seconds: a probe after 10 or 20, and once more if its dispatcher dies with it."""
HEALED_WITHIN = 120.0
_KEYS = 5
_RATE = 12
_WINDOW = 5.0
_DOWN_FOR = 8.0
_RETRIES = ["100 ms"] * 100
_STATEMENT = """
select pgmb.create_endpoint(%s, %s, '{t}', ordered => %s, batch => %s, rps => %s, max_in_flight => %s,
  timeout => '3 s', retry_after => %s::interval[])"""


@dataclass(frozen=True, slots=True)
class Kind:
    """Endpoints that behave alike."""

    number: int
    ordered: bool = False
    batch: int = 1
    rps: int | None = None
    max_in_flight: int = 8


KINDS = {
    "well": Kind(3),
    "failing": Kind(2),
    "refusing": Kind(2),
    "slow": Kind(2, max_in_flight=IN_FLIGHT),
    "paced": Kind(2, rps=RPS),
    "keys": Kind(2, ordered=True),
    "failing-keys": Kind(2, ordered=True),
    "batches": Kind(2, batch=5),
    "throttling": Kind(1),
    "down": Kind(1),
}
"""And a worker: twenty endpoints in all."""


def first_time(exchange: Exchange, status: int, headers: tuple[str, ...] = (), *, seen: set[str]) -> None:
    """This status to one event in four when it comes for the first time, otherwise 204."""
    request = exchange.request
    event = f"{request.path} {request.headers['webhook-id']}"
    if event[-1] in "048c" and event not in seen:
        seen.add(event)
        exchange.answer(status, *headers)
    else:
        exchange.answer()


class Down:
    """500 for so many seconds from the first request on, then 204."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: float | None = None

    def __call__(self, exchange: Exchange) -> int:
        if self._until is None:
            self._until = time.monotonic() + self._seconds
        return 500 if time.monotonic() < self._until else 204


def answers() -> dict[str, Answer]:
    return {
        "failing": partial(first_time, status=500, seen=set()),
        "failing-keys": partial(first_time, status=500, seen=set()),
        "refusing": partial(first_time, status=422, seen=set()),
        "throttling": partial(first_time, status=429, headers=("Retry-After: 1",), seen=set()),
        "slow": partial(slow, seconds=0.3),
        "down": Down(_DOWN_FOR),
    }


@dataclass(frozen=True, slots=True)
class Result:
    faults: dict[str, int]
    endpoints: int
    events: int
    posts: int
    lost: int
    """Events that an endpoint was not seen to accept."""
    disordered: int
    """Events of a key that an endpoint accepted before an earlier one."""
    repeated: int
    """Posts of events that were accepted before: after kills they must be."""
    in_flight: int
    """The most requests at a time of the endpoints that may have few."""
    rate: float
    """The most requests a second of those that may have few, over some seconds."""
    recovered_after: float | None
    """Seconds from the end of its trouble to the first request that the endpoint accepted."""
    states: dict[str, int]
    """Of the endpoints in the end."""
    dead: int
    healed_after: float
    seconds: float

    @property
    def holds(self) -> bool:
        return (
            not (self.lost or self.disordered or self.dead)
            and 0 < self.in_flight <= IN_FLIGHT
            and 0 < self.rate <= RPS * (1 + 1.5 / _WINDOW) + 1 / _WINDOW
            and self.recovered_after is not None
            and self.recovered_after <= RECOVERED_WITHIN
            and self.states == {"active": self.endpoints}
            and len(self.faults) >= 3
        )

    def __str__(self) -> str:
        faults = ", ".join(f"{times} {what}" for what, times in sorted(self.faults.items()))
        recovered = "never" if self.recovered_after is None else f"after {self.recovered_after:.1f} s"
        return (
            f"storm {'holds' if self.holds else 'VIOLATED'}: {faults} | {self.endpoints} endpoints, "
            f"{self.events} events, {self.posts} posts: {self.lost} lost, {self.disordered} out of order, "
            f"{self.repeated} repeated, {self.dead} dead | "
            f"at most {self.in_flight} in flight of {IN_FLIGHT}, "
            f"{self.rate:.1f} a second of {RPS} | recovered {recovered}, in the end {self.states} | "
            f"healed after {self.healed_after:.1f} s | {self.seconds:.1f} s"
        )


class Fleet:
    """Processes that run `pgmb dispatcher`, with a fault every now and then."""

    def __init__(self, dsn: str, server: Server | None, chance: random.Random) -> None:
        self._dsn = dsn
        self._server = server
        self._chance = chance
        self._stopped_until: dict[subprocess.Popen[bytes], float] = {}
        self._running = [self._start() for _ in range(DISPATCHERS)]
        self.faults: dict[str, int] = defaultdict(int)
        # Each at least once, in every run.
        self._first = ["killed", "stopped for long", "restarted", "stopped"]

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "pgmb", "dispatcher", "--allow", "127.0.0.0/8"],
            cwd=ROOT,
            env={**os.environ, "PGMB_DSN": self._dsn},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def fault(self) -> None:
        self.go_on()
        kinds = ["killed", "stopped", "stopped for long", "restarted"] + ["database"] * (
            self._server is not None
        )
        kind = self._first.pop(0) if self._first else self._chance.choice(kinds)
        if kind == "database":
            assert self._server is not None
            self._server.restart("immediate")
        else:
            free = [process for process in self._running if process not in self._stopped_until]
            if len(free) < 2:
                return
            self._hit(kind, self._chance.choice(free))
        self.faults[kind] += 1

    def _hit(self, kind: str, process: subprocess.Popen[bytes]) -> None:
        if kind.startswith("stopped"):
            process.send_signal(signal.SIGSTOP)
            span = LONG_STOP if kind == "stopped for long" else self._chance.uniform(0.2, 6)
            self._stopped_until[process] = time.monotonic() + span
            return
        process.send_signal(signal.SIGKILL if kind == "killed" else signal.SIGTERM)
        self._running.remove(process)
        if kind == "restarted":
            process.wait(60)
        else:
            process.wait(10)
        self._running.append(self._start())

    def go_on(self, *, all_of_them: bool = False) -> None:
        """Let stopped processes continue when it is time."""
        for process, until in list(self._stopped_until.items()):
            if all_of_them or time.monotonic() >= until:
                process.send_signal(signal.SIGCONT)
                del self._stopped_until[process]

    def end(self) -> None:
        for process in self._running:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in self._running:
            if process.wait(60) != 0:
                raise RuntimeError(f"a dispatcher ended with {process.returncode}")

    def abandon(self) -> None:
        for process in self._running:
            process.kill()
            process.wait(10)


def run(dsn: str, *, seconds: float, seed: int, server: Server | None = None) -> Result:
    began = time.monotonic()
    chance = random.Random(seed)
    with ReceiverProcess(("webhook-id",), answers()) as receiver:
        ordered = _prepare(dsn, receiver.url)
        fleet = Fleet(dsn, server, chance)
        try:
            crew, stop = Crew(), threading.Event()
            publishing = crew.start("publisher", lambda: _publish(dsn, stop, chance))
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                crew.check()
                time.sleep(PAUSE)
                fleet.fault()
            stop.set()
            crew.join(publishing)
            fleet.go_on(all_of_them=True)
            with psycopg.connect(dsn, autocommit=True) as admin:
                healed = wait_settled(admin, HEALED_WITHIN)
                events = _events(admin)
                states: dict[str, int] = dict(
                    admin.execute("select state, count(*) from pgmb.endpoints group by 1").fetchall()
                )
                ((dead,),) = admin.execute("select count(*) from pgmb.dead").fetchall()
            fleet.end()
        finally:
            fleet.abandon()
        posts, answered = receiver.requests(), receiver.answered()
        most = receiver.most_under_way()
    accepted = _accepted(posts, answered)
    endpoints = sum(kind.number for kind in KINDS.values()) + 1
    names = [f"/{name}/{n}" for name, kind in KINDS.items() for n in range(kind.number)] + ["/worker/0"]
    return Result(
        dict(fleet.faults),
        endpoints,
        len(events),
        len(posts),
        sum(len(events.keys() - accepted[name].keys()) for name in names),
        sum(_disordered(accepted[name], events) for name in ordered),
        sum(len(numbers) - 1 for name in names for numbers in accepted[name].values()),
        max(most[f"/slow/{n}"] for n in range(KINDS["slow"].number)),
        max(_rate(request.at for request in posts if request.path == f"/paced/{n}") for n in range(2)),
        _recovered_after(posts, answered),
        states,
        dead,
        healed,
        time.monotonic() - began,
    )


def _prepare(dsn: str, url: str) -> list[str]:
    """Returns the paths of the endpoints that keep an order."""
    ordered: list[str] = []
    with psycopg.connect(dsn, autocommit=True) as admin:
        for name, kind in KINDS.items():
            for n in range(kind.number):
                settings = (kind.ordered, kind.batch, kind.rps, kind.max_in_flight, _RETRIES)
                admin.execute(_STATEMENT, (f"{name}-{n}", f"{url}/{name}/{n}", *settings))
                if kind.ordered:
                    ordered.append(f"/{name}/{n}")
        admin.execute(
            "select pgmb.create('work', 't', 3, pgmb.worker('worker', %s, null))", [f"{url}/worker/0"]
        )
    return ordered


def _publish(dsn: str, stop: threading.Event, chance: random.Random) -> None:
    """Events at an even pace, in small transactions, through restarts of the database."""
    number = 0
    while not stop.is_set():
        try:
            with psycopg.connect(dsn, autocommit=True, connect_timeout=5) as connection:
                while not stop.wait(1 / _RATE):
                    number += 1
                    key = f"k{chance.randrange(_KEYS)}"
                    connection.execute("select pgmb.publish('t', to_json(%s::int), key => %s)", [number, key])
        except psycopg.OperationalError:
            time.sleep(0.1)


def _events(admin: psycopg.Connection[Any]) -> dict[int, tuple[str, int]]:
    """Key and place in the log of all that was committed, by number."""
    rows = admin.execute(
        "select payload::text::int, key, seq from pgmb.log_main where topic = 't'"
    ).fetchall()
    return {number: (key, seq) for number, key, seq in rows}


def _accepted(posts: list[Request], answered: dict[int, int]) -> dict[str, dict[int, list[int]]]:
    """The requests by which each path accepted each event, in the order of arrival."""
    found: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for place, request in enumerate(posts):
        if answered.get(place) == 204:
            body = json.loads(request.body)
            for number in body if isinstance(body, list) else [body]:
                found[request.path][number].append(place)
    return found


def _disordered(accepted: dict[int, list[int]], events: dict[int, tuple[str, int]]) -> int:
    by_key: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for number, places in accepted.items():
        if number in events:
            key, seq = events[number]
            by_key[key].append((places[0], seq))
    wrong = 0
    for came in by_key.values():
        latest = 0
        for _, seq in sorted(came):
            wrong += seq < latest
            latest = max(latest, seq)
    return wrong


def _rate(times: Iterable[float]) -> float:
    """The most requests a second in any window."""
    came = sorted(times)
    first, most = 0, 0
    for last, at in enumerate(came):
        while came[first] <= at - _WINDOW:
            first += 1
        most = max(most, last - first + 1)
    return most / _WINDOW


def _recovered_after(posts: list[Request], answered: dict[int, int]) -> float | None:
    down = [
        (request.at, answered.get(place)) for place, request in enumerate(posts) if request.path == "/down/0"
    ]
    accepted = [at for at, status in down if status == 204]
    return max(0.0, accepted[0] - (down[0][0] + _DOWN_FOR)) if accepted else None
