"""All kinds of queue at once, under cancels, terminations, rotation, maintenance and pauses.

Beside effects and order, it judges limits, rates and shares from what the consumers recorded.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

import psycopg

from faults.correctness import application
from faults.correctness.application import Publisher
from faults.correctness.cancels import interrupted, kill
from faults.correctness.consumer import Consumer, Held
from faults.correctness.run import Result, Run
from faults.correctness.sharing import beyond_rate, most_in_flight, unequal_shares
from faults.correctness.verdict import History

_LEASE = 2.0
_IN_FLIGHT = 9
_RATE = 60.0
_WINDOW = 2.0
_KINDS: Mapping[str, str] = {
    "plain": "",
    "ordered": "ordered => true",
    "fair": "fair_by => 'key'",
    "lanes": "lanes => '{urgent}'",
    "narrow": f"max_in_flight => {_IN_FLIGHT}",
    "narrow-ordered": f"ordered => true, max_in_flight => {_IN_FLIGHT}",
    "narrow-fair": f"fair_by => 'key', max_in_flight => {_IN_FLIGHT}, ttl => '1 hour'",
    "paced": f"rps => {_RATE}",
    "brief": "ttl => '1 second'",
}
_LIMITED = ("narrow", "narrow-ordered", "narrow-fair", "paced", "brief")
"""Their receives may return nothing although events wait."""
_NARROW = ("narrow", "narrow-ordered", "narrow-fair")
_TIDE = 800
"""Events of the fair queue's backlog: its tenants always have more waiting than a window of shares."""
_AGED = """
with made as (select gen_random_uuid() id, n from generate_series(1, 400) n), noted as (
  insert into app.ledger (event, queue, key, number) select id, 'narrow-fair', 'aged', n from made
)
insert into pgmb.log_main (id, topic, key, payload, published_at)
select id, 'narrow-fair', 'aged', to_json(n), clock_timestamp() - n / 25 % 2 * interval '1 day'
from made order by n
"""
"""Of these events, every other 25 have expired."""
_KNOWN = {
    "narrow-fair": "leases of a fair queue beyond max_in_flight",
    "fair": "windows of a fair queue with unequal shares",
}
"""What the present queue core does wrong. It is counted, and does not fail the run."""


def run(dsn: str, *, seconds: float, seed: int) -> Result:
    run = Run(dsn, seed=seed, options=f"lease_for => '{_LEASE} s'", kinds=_KINDS)
    for kind in _LIMITED:
        run.histories[kind].always_answers = False
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(_AGED)
    # More than the run needs: publishers end with it.
    run.publish(1, 1 << 30, size=5, pause=0.1)
    for kind in _KINDS:
        for number in range(2):
            name = f"worker {kind} {number}"
            run.start(name, partial(_work, run, kind, name))
    done = [0, 0]
    run.start("killer", partial(kill, run, run.published, done))
    run.start("tide", partial(_tide, run))
    run.start("janitor", partial(_maintain, run))
    pauses: list[tuple[str, float, float]] = []
    run.start("pauses", partial(_pause, run, pauses))
    run.wait(seconds)
    run.stop_publishing()
    run.end(patience=20.0)
    for history in run.histories.values():
        _forget_paused(history, pauses)
    problems, known, judged = _judged(run)
    listed = ", ".join(f"{count} {what}" for what, count in known.items()) or "none"
    hit = sum(interrupted(history) for history in run.histories.values())
    return run.result(
        "soak",
        f"{done[0]} cancels, {done[1]} terminations, {hit} deliveries interrupted,"
        f" {judged} windows of shares, known: {listed}",
        landed=hit > 0 and judged > 0,
        problems=problems,
    )


def _judged(run: Run) -> tuple[list[str], dict[str, int], int]:
    """Violations, counts of those that are known, and how many windows of shares were judged."""
    problems: list[str] = []
    known: dict[str, int] = {}
    with psycopg.connect(run.dsn, autocommit=True) as connection:
        published = {one.event: one for one in application.published(connection, run.publishers)}
        generations = {kind: application.generations(connection, kind) for kind in _KINDS}

    def found(kind: str, count: int, what: str) -> None:
        if count > 0 and kind in _KNOWN:
            known[_KNOWN[kind]] = count
        elif count > 0:
            problems.append(f"queue {kind}: {what}")

    for kind in _NARROW:
        most = most_in_flight(run.histories[kind].deliveries, generations[kind])
        found(kind, most - _IN_FLIGHT, f"{most} events in flight of {_IN_FLIGHT}")
    beyond = beyond_rate(run.histories["paced"].deliveries, _RATE, _WINDOW)
    found("paced", beyond, f"{beyond} events beyond {_RATE:.0f} a second within {_WINDOW:.0f} s")
    of_fair = {event: one for event, one in published.items() if one.queue == "fair"}
    unequal, judged = unequal_shares(run.histories["fair"].deliveries, of_fair)
    found("fair", unequal, f"unequal shares in {unequal} windows of {judged}")
    return problems, known, judged


def _work(run: Run, kind: str, name: str, chance: random.Random) -> None:
    held: Held | None = None
    history = run.histories[kind]
    with Consumer(run.dsn, kind, name, history, _LEASE) as consumer:
        while not run.drained.is_set():
            if held is None:
                held = consumer.receive(20 if kind == "fair" else chance.choice((1, 3, 20)))
            if held is None:
                time.sleep(0.01)
                continue
            time.sleep(chance.uniform(0.0, 0.03))
            match chance.choices(("whole", "parts", "chained", "retry", "release"), (6, 3, 3, 1, 1))[0]:
                case "whole":
                    consumer.ack(held)
                case "parts":
                    cut = (len(held.events) + 1) // 2
                    if consumer.ack(held, held.events[:cut]) and held.events[cut:]:
                        consumer.ack(held, held.events[cut:])
                case "chained":
                    held = consumer.receive(5, after=held)
                    continue
                case verb:
                    consumer.give_back(verb, held)
            held = None


def _tide(run: Run, chance: random.Random) -> None:
    """Keeps a backlog of four tenants in the fair queue."""
    tenants = Publisher(1000, 4, "fair")
    run.publishers.append(tenants)
    with psycopg.connect(run.dsn, autocommit=True, application_name="tide") as connection:
        while True:
            depth = connection.execute("select pgmb.queue_depth('fair')").fetchone()
            if depth is not None and depth[0] < _TIDE:
                tenants.committed(tenants.publish(connection, _TIDE))
            if run.published.wait(chance.uniform(0.5, 1.0)):
                return


def _maintain(run: Run, chance: random.Random) -> None:
    with psycopg.connect(run.dsn, autocommit=True, application_name="janitor") as connection:
        while not run.stop.wait(chance.uniform(0.2, 0.6)):
            with suppress(psycopg.errors.LockNotAvailable):
                connection.execute("select pgmb.rotate()")
            connection.execute("select pgmb.maintain()")


def _pause(run: Run, pauses: list[tuple[str, float, float]], chance: random.Random) -> None:
    """Pauses one queue after another, and notes when."""
    with psycopg.connect(run.dsn, autocommit=True, application_name="operator") as connection:
        while not run.stop.wait(chance.uniform(0.3, 1.0)):
            kind, began = chance.choice(list(_KINDS)), time.time()
            connection.execute("select pgmb.pause(%s)", [kind])
            run.stop.wait(chance.uniform(0.0, 0.3))
            connection.execute("select pgmb.resume(%s)", [kind])
            pauses.append((kind, began, time.time()))


def _forget_paused(history: History, pauses: Sequence[tuple[str, float, float]]) -> None:
    """A receive from a paused queue rightly returns nothing."""
    paused = [(began, ended) for kind, began, ended in pauses if kind == history.queue]
    history.empty = [
        ask for ask in history.empty if all(ask.ended < began or ask.began > ended for began, ended in paused)
    ]
