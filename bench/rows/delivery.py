"""delivery: dispatchers to a fast endpoint against a bare aiohttp loop that posts the same bodies there.

A worker has a queue of its own; webhooks share one. Timed is from the first request to the last, as the
server sees them; time on processors until all is settled too. The server does nothing but answer 204.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from bench import cpu
from bench.crew import Crew, Job
from bench.delivery import bare
from bench.forms import Form
from bench.ground import Ground, Site
from bench.outcome import Check, Outcome, Reading
from bench.payload import payload
from bench.rounds import interleave
from harness.dispatchers import Dispatchers, wait_settled
from harness.receiver import ReceiverProcess

_AT_ONCE = 32
_BARE, _BARE_TWO = "bare aiohttp", "bare aiohttp, 2"
_WORKER, _WEBHOOK, _WEBHOOK_TWO = "worker", "webhook", "webhook, 2"
_ONE, _TWO = (_BARE, _WORKER, _WEBHOOK), (_BARE_TWO, _WEBHOOK_TWO)
_SCALE = "delivery, 2 processes vs 1"

CHECKS = ["delivery vs bare aiohttp", "delivery, shared, vs bare aiohttp", _SCALE]


class _Sum(NamedTuple):
    """Seconds on processors, and of processors that had nothing to do."""

    posting: float
    postgres: float
    receiver: float
    idle: float


def run(ground: Ground, form: Form) -> Outcome:
    # Less than a second or two would be all beginning.
    seconds = {"tiny": 0.3, "brief": 1.5}.get(form.name, 4.0)
    rounds = {"tiny": 1, "brief": 5}.get(form.name, 9)
    # Those that are not alone take their part after seconds only.
    names = _ONE if form.name == "tiny" else (*_ONE, *_TWO)
    outcome = Outcome("delivery", f"events over HTTP, {_AT_ONCE} at a time, for about {seconds:g} s")
    with contextlib.ExitStack() as stack:
        receiver = stack.enter_context(ReceiverProcess())
        turns = _turns(stack, ground, receiver, seconds, 1)
        if _WEBHOOK_TWO in names:
            turns |= _turns(stack, ground, receiver, seconds, 2)
        for name in names:
            turns[name]()  # the first only warms up
        outcome.readings = interleave(names, rounds, lambda name: turns[name]())
    outcome.checks = [
        outcome.compare(CHECKS[0], _WORKER, _BARE, 0.7, "per_second"),
        outcome.compare(CHECKS[1], _WEBHOOK, _BARE, 0.7, "per_second"),
    ]
    if _WEBHOOK_TWO in names:
        outcome.checks.append(_scaling(outcome))
    shares = (f"{name} {outcome.ratio(name, _BARE, 'per_client_cpu'):.2f}x" for name in (_WORKER, _WEBHOOK))
    outcome.notes.append(
        f"events a second of the posting process's own time, vs bare aiohttp: {', '.join(shares)}"
    )
    outcome.notes += [_cost(outcome, name) for name in names]
    return outcome


def _turns(
    stack: contextlib.ExitStack, ground: Ground, receiver: ReceiverProcess, seconds: float, processes: int
) -> dict[str, Callable[[], Reading]]:
    """What is measured with so many processes, in a database of its own."""
    site = ground.site("pgmb")
    stack.callback(site.close)
    _prepare(site, receiver.url)
    dispatchers = stack.enter_context(Dispatchers(site.dsn, processes))
    arguments = {"url": receiver.url + "/bare", "seconds": seconds, "at_once": _AT_ONCE // processes}
    loops = site.crew(*[Job(site.dsn, "pgmb", bare.post_for, arguments)] * processes)
    stack.callback(loops.close)
    posted = 0

    def posting(name: str) -> Callable[[], Reading]:
        def post() -> Reading:
            nonlocal posted
            reading = _post(name, receiver, loops)
            posted = reading.messages
            return reading

        return post

    def delivering(name: str, topic: str) -> Callable[[], Reading]:
        # About as many as it takes as long for.
        return lambda: _deliver(name, topic, site, receiver, dispatchers, int(0.75 * posted))

    if processes == 1:
        return {
            _BARE: posting(_BARE),
            _WORKER: delivering(_WORKER, "worker"),
            _WEBHOOK: delivering(_WEBHOOK, "webhook"),
        }
    return {_BARE_TWO: posting(_BARE_TWO), _WEBHOOK_TWO: delivering(_WEBHOOK_TWO, "webhook")}


def _prepare(site: Site, url: str) -> None:
    site.connection.execute("select pgmb.drop_queue('bench')")
    site.connection.execute(
        "select pgmb.create('own', 'worker', 5, pgmb.worker('own', %s, null)),"
        " pgmb.create_endpoint('shared', %s, '{webhook}', max_in_flight => %s)",
        [url + "/own", url + "/shared", _AT_ONCE],
    )
    site.connection.execute("select pgmb.alter_endpoint('own', max_in_flight => %s)", [_AT_ONCE])


def _post(name: str, receiver: ReceiverProcess, crew: Crew) -> Reading:
    receiver.clear()
    before, idle = cpu.of_process(receiver.pid), cpu.idle()
    shift = crew.work()
    served, idle = cpu.of_process(receiver.pid) - before, cpu.idle() - idle
    used = _Sum(shift.total("client_cpu"), shift.server_cpu, served, idle)
    return _reading(name, int(shift.total("messages")), receiver.seconds(), used)


def _deliver(
    name: str, topic: str, site: Site, receiver: ReceiverProcess, dispatchers: Dispatchers, events: int
) -> Reading:
    receiver.clear()
    site.connection.execute(
        "insert into pgmb.log_main (topic, payload)"
        " select %s, overlay(%s placing lpad(n::text, 9, '0') from 33)::json from generate_series(1, %s) n",
        [topic, payload(0).decode(), events],
    )
    before = _used(site, receiver, dispatchers.pids)
    receiver.wait_for(events)
    wait_settled(site.connection)
    after = _used(site, receiver, dispatchers.pids)
    used = _Sum(*(late - early for late, early in zip(after, before, strict=True)))
    if (came := receiver.count()) != events:
        raise AssertionError(f"{name}: {came} requests for {events} events")
    return _reading(name, events, receiver.seconds(), used)


def _used(site: Site, receiver: ReceiverProcess, posting: Sequence[int]) -> _Sum:
    return _Sum(
        sum(cpu.of_process(pid) for pid in posting),
        cpu.of_server(site.server.postmaster_pid),
        cpu.of_process(receiver.pid),
        cpu.idle(),
    )


def _reading(name: str, events: int, wall: float, used: _Sum) -> Reading:
    extra = {f"{what}_us": seconds / events * 1e6 for what, seconds in used._asdict().items()}
    extra["per_client_cpu"] = events / used.posting
    return Reading(name, events, wall, used.postgres + used.receiver, used.posting, extra)


def _scaling(outcome: Outcome) -> Check:
    """Two processes gain what one of them, its server and PostgreSQL leave of the machine, if not 1.2x."""
    spent = {what: outcome.middle(_WEBHOOK, f"{what}_us") for what in _Sum._fields}
    left = sum(spent.values()) / (sum(spent.values()) - spent["idle"])
    outcome.notes.append(
        f"one process, the endpoint's server and PostgreSQL leave room for {left:.2f}x on this machine; "
        f"two bare loops gain {outcome.ratio(_BARE_TWO, _BARE, 'per_second'):.2f}x"
    )
    check = outcome.compare(_SCALE, _WEBHOOK_TWO, _WEBHOOK, 1.2, "per_second")
    return replace(check, goal=round(min(check.goal, 0.85 * left), 2))


def _cost(outcome: Outcome, name: str) -> str:
    parts = ", ".join(f"{what} {outcome.middle(name, f'{what}_us'):.0f}" for what in _Sum._fields)
    rate = outcome.middle(name, "per_second")
    return f"{name}: {rate:,.0f} events a second; us of a processor for each: {parts}"
