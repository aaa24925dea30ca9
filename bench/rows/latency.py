"""latency: publish to receive at 500 events a second, an open loop; every consumer polls each 2 ms."""

from __future__ import annotations

from statistics import quantiles

from bench import pacing
from bench.crew import Job, Shift
from bench.forms import Form
from bench.ground import Ground, Site
from bench.outcome import Outcome, Reading
from bench.rounds import contest

_RATE, _PUBLISHERS, _POLL = 500, 4, 0.002


def run(ground: Ground, form: Form) -> Outcome:
    outcome = Outcome("latency", f"{_RATE}/s in an open loop, polled every {_POLL * 1000:g} ms")
    seconds = form.seconds * 2

    def jobs(name: str, site: Site) -> list[Job]:
        polling = {"interval": _POLL, "seconds": seconds + 0.3, "size": 100}
        return [
            *(
                Job(site.dsn, name, pacing.publish_at, _publishing(number, seconds))
                for number in range(_PUBLISHERS)
            ),
            Job(site.dsn, name, pacing.poll, polling),
        ]

    with ground.sites("pgmb", "bare", "pgmq") as sites:
        outcome.readings = contest(sites, max(3, form.rounds // 2), jobs, _reading)
    outcome.notes = [
        f"{name}: p50 {outcome.middle(name, 'p50'):.1f} ms, p99 {outcome.middle(name, 'p99'):.1f} ms"
        for name in outcome.contenders()
    ]
    outcome.checks = [
        outcome.compare("latency p50 vs bare", "pgmb", "bare", 1.3, "p50", at_least=False),
        outcome.compare("latency p99 vs bare", "pgmb", "bare", 1.5, "p99", at_least=False),
        outcome.compare("latency p50 vs PGMQ", "pgmb", "pgmq", 1, "p50", at_least=False),
        outcome.compare("latency p99 vs PGMQ", "pgmb", "pgmq", 1, "p99", at_least=False),
    ]
    return outcome


def _publishing(number: int, seconds: float) -> dict[str, float]:
    return {"rate": _RATE / _PUBLISHERS, "seconds": seconds, "offset": number / _RATE}


def _reading(name: str, shift: Shift) -> Reading:
    waits = shift.results[-1]["waits"]
    cuts = quantiles(waits, n=100)
    percentiles = {"p50": cuts[49], "p99": cuts[98]}
    return Reading(name, len(waits), shift.wall, shift.server_cpu, shift.total("client_cpu"), percentiles)
