"""Limits of endpoints under several dispatchers: so many requests a second, never more at a time than that.

All by what the server saw: one endpoint with a limit, many with a lower one each, and one that takes its time
and may have few requests under way.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg

from harness.answers import slow
from harness.dispatchers import Dispatchers
from harness.receiver import ReceiverProcess, Request

RATE = 50
MANY_RATE = 5
IN_FLIGHT = 7
LATITUDE = 0.06
SETTLING_IN = 2.0
"""Seconds until all dispatchers are at work and what the limit allowed before is gone."""
_ANSWERED_AFTER = 0.03


@dataclass(frozen=True, slots=True)
class Result:
    dispatchers: int
    measured: float
    rate: float
    many: list[float]
    """Requests a second of each of the many."""
    in_flight: int
    narrow: int
    """Requests that the endpoint with few at a time got."""
    repeated: int
    seconds: float

    @property
    def holds(self) -> bool:
        return (
            all(_near(rate, MANY_RATE) for rate in self.many)
            and _near(self.rate, RATE)
            and self.in_flight == IN_FLIGHT
            and not self.repeated
        )

    def __str__(self) -> str:
        mean = sum(self.many) / len(self.many)
        return (
            f"delivery limits {'hold' if self.holds else 'VIOLATED'}: {self.rate:.1f} a second "
            f"over {self.measured:.0f} s with rps={RATE} and {self.dispatchers} dispatchers | "
            f"{len(self.many)} at {min(self.many):.2f}-{max(self.many):.2f} a second, on average {mean:.2f}, "
            f"with rps={MANY_RATE} each | at most {self.in_flight} in flight of {self.narrow} requests "
            f"with max_in_flight={IN_FLIGHT} | {self.repeated} repeated | {self.seconds:.1f} s"
        )


def run(
    dsn: str, *, dispatchers: int, many: int, measured: float, settling_in: float = SETTLING_IN
) -> Result:
    began = time.monotonic()
    with (
        psycopg.connect(dsn, autocommit=True) as admin,
        ReceiverProcess(("webhook-id",), {"slow": partial(slow, seconds=_ANSWERED_AFTER)}) as receiver,
    ):
        _prepare(admin, receiver.url, many)
        lasts = settling_in + measured + 1
        with Dispatchers(dsn, dispatchers):
            _publish(admin, "paced", int(RATE * (lasts + 10)))
            _publish(admin, "narrow", int(IN_FLIGHT / _ANSWERED_AFTER * lasts))
            first = _watch(receiver, "/paced", lasts)
            in_flight = receiver.most_under_way()["/slow/narrow"]
            _publish(admin, "many", int(MANY_RATE * (lasts + 10)))
            second = _watch(receiver, "/many", lasts)
        everything = receiver.requests()
    (rate,) = _rates(first, "/paced", settling_in, measured)
    return Result(
        dispatchers,
        measured,
        rate,
        _rates(second, "/many", settling_in, measured),
        in_flight,
        sum(request.path == "/slow/narrow" for request in everything),
        len(everything) - len({(request.path, request.headers["webhook-id"]) for request in everything}),
        time.monotonic() - began,
    )


def _near(rate: float, limit: float) -> bool:
    return (1 - LATITUDE) * limit <= rate <= (1 + LATITUDE) * limit


def _prepare(admin: psycopg.Connection[Any], url: str, many: int) -> None:
    with admin.transaction():
        admin.execute(
            "select pgmb.create_endpoint('paced', %s, '{paced}', rps => %s),"
            " pgmb.create_endpoint('narrow', %s, '{narrow}', max_in_flight => %s)",
            [f"{url}/paced", RATE, f"{url}/slow/narrow", IN_FLIGHT],
        )
        admin.execute(
            "select count(pgmb.create_endpoint('many' || n, %s || '/many/' || n, '{many}', rps => %s))"
            " from generate_series(1, %s) n",
            [url, MANY_RATE, many],
        )


def _publish(admin: psycopg.Connection[Any], topic: str, events: int) -> None:
    admin.execute(
        "insert into pgmb.log_main (topic, payload) select %s, to_json(n) from generate_series(1, %s) n",
        [topic, events],
    )


def _watch(receiver: ReceiverProcess, path: str, seconds: float) -> list[Request]:
    """All requests, so many seconds after the first at a path that begins so."""
    deadline = time.monotonic() + 120
    while not any(request.path.startswith(path) for request in receiver.requests()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no request to {path} came within 120 s")
        time.sleep(0.05)
    time.sleep(seconds)
    return receiver.requests()


def _rates(requests: Iterable[Request], path: str, settling_in: float, measured: float) -> list[float]:
    """Requests a second of each path that begins so, once they have settled in."""
    times: dict[str, list[float]] = defaultdict(list)
    for request in requests:
        if request.path.startswith(path):
            times[request.path].append(request.at)
    since = min(min(came) for came in times.values()) + settling_in
    return [sum(since <= at < since + measured for at in came) / measured for came in times.values()]
