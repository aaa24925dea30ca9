"""latency: publish to receive at 500 events a second, an open loop; every consumer polls each 2 ms."""

from __future__ import annotations

from statistics import quantiles

from bench import pacing
from bench.crew import Job
from bench.forms import Form
from bench.ground import Ground
from bench.outcome import Check, Outcome, Reading
from bench.rounds import interleave

_RATE, _PUBLISHERS, _POLL = 500, 4, 0.002


def run(ground: Ground, form: Form) -> Outcome:
    outcome = Outcome("latency", f"{_RATE}/s in an open loop, polled every {_POLL * 1000:g} ms")
    seconds = form.seconds * 2
    with ground.sites("pgmb", "bare", "pgmq") as sites:

        def measure(name: str) -> Reading:
            site = sites[name]
            jobs = [
                Job(site.dsn, name, pacing.publish_at, _publishing(number, seconds))
                for number in range(_PUBLISHERS)
            ]
            polling = {"interval": _POLL, "seconds": seconds + 0.3, "size": 100}
            shift = site.work(*jobs, Job(site.dsn, name, pacing.poll, polling))
            waits = shift.results[-1]["waits"]
            cuts = quantiles(waits, n=100)
            return Reading(
                name,
                len(waits),
                shift.wall,
                shift.server_cpu,
                shift.total("client_cpu"),
                {"p50": cuts[49], "p99": cuts[98]},
            )

        outcome.readings = interleave(list(sites), form.rounds, measure)
    outcome.notes = [
        f"{name}: p50 {outcome.middle(name, 'p50'):.1f} ms, p99 {outcome.middle(name, 'p99'):.1f} ms"
        for name in outcome.contenders()
    ]
    outcome.checks = [
        Check("latency p50 vs bare", outcome.ratio("pgmb", "bare", "p50"), 1.3, at_least=False),
        Check("latency p99 vs bare", outcome.ratio("pgmb", "bare", "p99"), 1.5, at_least=False),
        Check("latency p50 vs PGMQ", outcome.ratio("pgmb", "pgmq", "p50"), 1, at_least=False),
        Check("latency p99 vs PGMQ", outcome.ratio("pgmb", "pgmq", "p99"), 1, at_least=False),
    ]
    return outcome


def _publishing(number: int, seconds: float) -> dict[str, float]:
    return {"rate": _RATE / _PUBLISHERS, "seconds": seconds, "offset": number / _RATE}
