"""Endpoints that misbehave beside some that do not: those get everything, in time, and once.

The bad ones refuse, dribble, never end, are silent, reset, talk nonsense, redirect to a canary, or are urls
of that canary, in many spellings, at an address that dispatchers may not reach.
"""

from __future__ import annotations

import http.client
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from statistics import quantiles
from typing import Any

import psycopg

from harness import answers
from harness.dispatchers import Dispatchers
from harness.receiver import Answer, ReceiverProcess
from harness.states import deliveries, leases_in_flight

WELL = 8
ALLOWED = "127.0.0.2"
ARRIVED_WITHIN = 60.0
_RATE = 50
_TIMEOUT = "2 s"
_CANARY = (
    "127.0.0.1",
    "localhost",
    "127.1",
    "2130706433",
    "0x7f000001",
    "017700000001",
    "[::ffff:127.0.0.1]",
)


@dataclass(frozen=True, slots=True)
class Result:
    endpoints: Counter[str]
    """How many are well, misbehave, and point to the canary."""
    deliveries: int
    missed: int
    repeated: int
    """Of those that are well."""
    delay: float
    """Theirs, the 99th percentile in seconds."""
    hits: int
    """On the canary."""
    untried: list[str]
    """Answers that were not met: then nothing is shown."""
    unaccounted: list[str]
    """Bad endpoints of whose events some are neither delivered, nor wait, nor are dead letters."""
    canary_works: bool
    seconds: float

    @property
    def holds(self) -> bool:
        return (
            not (self.missed or self.repeated or self.hits or self.untried or self.unaccounted)
            and self.canary_works
        )

    def __str__(self) -> str:
        kinds = ", ".join(f"{number} {kind}" for kind, number in self.endpoints.items())
        return (
            f"chaos {'holds' if self.holds else 'VIOLATED'}: {self.deliveries} deliveries to endpoints "
            f"({kinds}) | {self.missed} missed, {self.repeated} repeated by those that are well, "
            f"99 % of them within {self.delay * 1000:.0f} ms | {self.hits} hits on the canary | "
            f"untried {self.untried or 'none'}, unaccounted {self.unaccounted or 'none'} | "
            f"{self.seconds:.1f} s"
        )


def bad_answers(canary: str) -> dict[str, Answer]:
    return {
        "refusing": partial(answers.answering, status=500),
        "unavailable": partial(answers.answering, status=503, headers=("Retry-After: 1",)),
        "redirecting": partial(answers.redirecting, to=canary),
        "resetting": answers.resetting,
        "silent": answers.silent,
        "babbling": answers.babbling,
        "dribbling": answers.dribbling,
        "endless": answers.endless,
    }


def run(dsn: str, *, deliveries: int, dispatchers: int) -> Result:
    began = time.monotonic()
    with ReceiverProcess(()) as canary:
        bad = bad_answers(f"{canary.url}/redirected")
        with (
            ReceiverProcess(("ce-time", "webhook-id"), bad, ALLOWED) as receiver,
            psycopg.connect(dsn, autocommit=True) as admin,
        ):
            endpoints = Counter(_prepare(admin, receiver.url, canary.port, bad))
            events = -(-deliveries // endpoints.total())
            with Dispatchers(dsn, dispatchers, [f"{ALLOWED}/32"]):
                _publish(admin, events)
                _arrive(admin, receiver, events)
            requests = receiver.requests()
            unaccounted = _unaccounted(admin, events)
        hits = canary.count()
        works = _is_counted(canary)
    of_the_well = [request for request in requests if request.path.startswith("/well/")]
    delays = [
        request.at - datetime.fromisoformat(request.headers["ce-time"]).timestamp() for request in of_the_well
    ]
    distinct = len({(request.path, request.headers["webhook-id"]) for request in of_the_well})
    return Result(
        endpoints,
        events * endpoints.total(),
        events * WELL - distinct,
        len(of_the_well) - distinct,
        quantiles(delays, n=100)[98],
        hits,
        sorted(bad.keys() - {request.path.split("/")[1] for request in requests}),
        unaccounted,
        works,
        time.monotonic() - began,
    )


def _prepare(admin: psycopg.Connection[Any], url: str, port: int, bad: dict[str, Answer]) -> Iterator[str]:
    """Yields what kind each endpoint is of."""
    for number in range(WELL):
        _create(admin, f"well-{number}", f"{url}/well/{number}")
        yield "well"
    for name in bad:
        _create(admin, name, f"{url}/{name}/e")
        yield "misbehaving"
    for number, host in enumerate(_CANARY):
        try:
            _create(admin, f"canary-{number}", f"http://{host}:{port}/direct")
        except psycopg.Error as error:
            if error.sqlstate != "MB005":
                raise
            continue
        yield "pointing at the canary"


def _create(admin: psycopg.Connection[Any], name: str, url: str) -> None:
    admin.execute(
        "select pgmb.create_endpoint(%s, %s, '{chaos}', timeout => %s, retry_after => '{1 s,1 s}')",
        [name, url, _TIMEOUT],
    )


def _publish(admin: psycopg.Connection[Any], events: int) -> None:
    start = time.monotonic()
    for number in range(events):
        time.sleep(max(0.0, start + number / _RATE - time.monotonic()))
        admin.execute("select pgmb.publish('chaos', to_json(%s::integer))", [number])


def _arrive(admin: psycopg.Connection[Any], receiver: ReceiverProcess, events: int) -> None:
    """Until those that are well have got everything and no event waits to be taken, or it takes too long."""
    deadline = time.monotonic() + ARRIVED_WITHIN
    while time.monotonic() < deadline:
        came = sum(request.path.startswith("/well/") for request in receiver.requests())
        if came >= events * WELL and not leases_in_flight(admin):
            return
        time.sleep(0.2)


def _unaccounted(admin: psycopg.Connection[Any], events: int) -> list[str]:
    """After the dispatchers have given back what they held."""
    waiting = Counter(event.endpoint for event in deliveries(admin))
    rows = admin.execute(
        "select e.name, e.id, a.delivered + (select count(*) from pgmb.dead d where d.endpoint = e.id)"
        " from pgmb.endpoint e join pgmb.endpoint_activity a on a.endpoint = e.id order by 1"
    )
    return [name for name, endpoint, ended in rows if ended + waiting[endpoint] != events]


def _is_counted(canary: ReceiverProcess) -> bool:
    """A canary that nobody could hit would prove nothing."""
    before = canary.count()
    connection = http.client.HTTPConnection("127.0.0.1", canary.port, timeout=10)
    connection.request("POST", "/", b"{}", {"Content-Length": "2"})
    connection.getresponse().read()
    connection.close()
    return canary.count() == before + 1
