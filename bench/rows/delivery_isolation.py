"""delivery-isolation: what endpoints that are dead or slow cost the others, in delay from publish to request.

Two databases with as many endpoints, each with a filter of its own, and one dispatcher each: in one all are
well, in the other one in ten is dead (nobody listens) and one in ten takes seconds to answer. Both get events
at the same pace, far below what a dispatcher can do. Compared is the delay of those that are well in both.

In both databases another endpoint gets every event and fails one in four at first. In the second one a slow
endpoint gets every event too, so that its deliveries pile up beside those failures. Compared is how long the
retries take.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from statistics import quantiles

from bench import cpu
from bench.contender import Contender
from bench.crew import Crew, Job, Work
from bench.forms import Form
from bench.ground import Ground, Site
from bench.outcome import Outcome, Reading
from bench.rounds import interleave
from bench.wire import Client
from harness.answers import failing_once, slow
from harness.dispatchers import Dispatchers
from harness.ports import free_port
from harness.receiver import Answer, ReceiverProcess

_WELL, _ILL = "all well", "1 in 5 bad"
_TOPIC = b"delivery"
_ARRIVED_WITHIN = 30.0

CHECKS = ["delivery, p99 beside bad endpoints", "delivery, retries beside a slow endpoint"]
_RETRY_AFTER = "200 ms"


def run(ground: Ground, form: Form) -> Outcome:
    endpoints, rate, wait = (50, 100, 0.5) if form.name == "tiny" else (1_000, 200, 5.0)
    seconds = {"tiny": 0.5, "brief": 4.0}.get(form.name, 10.0)
    rounds = {"tiny": 1, "brief": 3}.get(form.name, 9)
    outcome = Outcome(
        "delivery-isolation", f"{endpoints:,} endpoints, {rate} events a second; a tenth dead, a tenth slow"
    )
    with contextlib.ExitStack() as stack:
        answers: dict[str, Answer] = {"slow": partial(slow, seconds=wait), "failing": failing_once}
        receiver = stack.enter_context(ReceiverProcess(("ce-time", "webhook-id"), answers))
        crews: dict[str, Crew] = {}
        dispatchers: dict[str, Dispatchers] = {}
        for name in (_WELL, _ILL):
            site = ground.site("pgmb")
            stack.callback(site.close)
            _prepare(site, receiver.url, endpoints, ill=name == _ILL)
            dispatchers[name] = stack.enter_context(Dispatchers(site.dsn))
            job = {"endpoints": endpoints, "rate": rate, "seconds": seconds}
            crews[name] = site.crew(Job(site.dsn, "pgmb", _publish, job))
            stack.callback(crews[name].close)

        def measure(name: str) -> Reading:
            return _measure(name, crews[name], dispatchers[name], receiver)

        for name in (_WELL, _ILL):
            measure(name)  # the first only warms up
        outcome.readings = interleave((_WELL, _ILL), rounds, measure)
    outcome.checks = [
        outcome.compare(CHECKS[0], _ILL, _WELL, 2, "p99", at_least=False),
        outcome.compare(CHECKS[1], _ILL, _WELL, 2, "retried", at_least=False),
    ]
    outcome.notes = [
        f"{name}: p50 {outcome.middle(name, 'p50'):.1f} ms, p99 {outcome.middle(name, 'p99'):.1f} ms, "
        f"retries after {_RETRY_AFTER} p90 {outcome.middle(name, 'retried'):.0f} ms"
        for name in (_WELL, _ILL)
    ]
    return outcome


def _is_well(number: int) -> bool:
    return number % 10 not in (3, 7)


def _prepare(site: Site, url: str, endpoints: int, *, ill: bool) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    with site.connection.transaction():
        for number in range(endpoints):
            at = f"{url}/well/{number}"
            if ill and number % 10 == 3:
                at = f"{dead}/{number}"
            elif ill and number % 10 == 7:
                at = f"{url}/slow/{number}"
            site.connection.execute(
                "select pgmb.create_endpoint(%s, %s, '{delivery}', equals => %s)",
                [f"e{number}", at, json.dumps({"payload": {"n": number}})],
            )
        for name in ("failing", *(["slow"] if ill else [])):
            site.connection.execute(
                "select pgmb.create_endpoint(%s, %s, '{delivery}', retry_after => %s::interval[])",
                [name, f"{url}/{name}/all", [_RETRY_AFTER, "1 h"]],
            )


def _publish(client: Client, contender: Contender, *, endpoints: int, rate: int, seconds: float) -> Work:
    """One event a transaction at an even pace, each for one endpoint; all get as many."""
    publish = client.prepare("select pgmb.publish($1, $2)", "text", "json")
    chance = random.Random(1)
    whom = _in_turn(endpoints, chance)

    def measured() -> dict[str, float]:
        start, wells, number = time.monotonic(), 0, 0
        for number in range(int(rate * seconds)):
            ahead = start + number / rate - time.monotonic()
            if ahead > 0:
                time.sleep(ahead)
            to = next(whom)
            wells += _is_well(to)
            publish(_TOPIC, b'{"n":%d}' % to)
        return {"messages": wells}

    return measured


def _in_turn(endpoints: int, chance: random.Random) -> Iterator[int]:
    while True:
        yield from chance.sample(range(endpoints), endpoints)


def _measure(name: str, crew: Crew, dispatchers: Dispatchers, receiver: ReceiverProcess) -> Reading:
    receiver.clear()
    used = sum(cpu.of_process(pid) for pid in dispatchers.pids)
    shift = crew.work()
    delays = _delays(receiver, int(shift.total("messages")))
    used = sum(cpu.of_process(pid) for pid in dispatchers.pids) - used
    cuts = quantiles(delays, n=100)
    figures = {"p50": cuts[49], "p99": cuts[98], "retried": _retried(receiver)}
    return Reading(name, len(delays), shift.wall, shift.server_cpu, used, figures)


def _retried(receiver: ReceiverProcess) -> float:
    """Milliseconds from a failure to its retry, the 90th percentile. Retries that never came take longest."""
    time.sleep(2.0)
    came: dict[str, list[float]] = {}
    for request in receiver.requests():
        if request.path == "/failing/all":
            came.setdefault(request.headers["webhook-id"], []).append(request.at)
    ended = time.time()
    # As `failing_once` decides.
    late = [((at[1:] or [ended])[0] - at[0]) * 1000 for id, at in came.items() if id[-1] in "048c"]
    return quantiles(late, n=10)[8]


def _delays(receiver: ReceiverProcess, expected: int) -> list[float]:
    """Of those that are well in both databases, in milliseconds. What is late is waited for."""
    deadline = time.monotonic() + _ARRIVED_WITHIN
    while True:
        found = [
            (request.at - datetime.fromisoformat(request.headers["ce-time"]).timestamp()) * 1000
            for request in receiver.requests()
            if request.path.startswith("/well/") and _is_well(int(request.path.rsplit("/", 1)[1]))
        ]
        if len(found) >= expected or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    if len(found) != expected:
        raise AssertionError(f"{len(found)} requests for {expected} events of those that are well")
    return found
