"""publish: 2 clients, batches of 500."""

from __future__ import annotations

from bench import loops
from bench.crew import Job
from bench.forms import Form
from bench.ground import Ground
from bench.outcome import Check, Outcome, Reading
from bench.rounds import interleave, reading

_CLIENTS, _BATCH = 2, 500


def run(ground: Ground, form: Form) -> Outcome:
    outcome = Outcome("publish", f"{_CLIENTS} clients, batches of {_BATCH}")
    with ground.sites("pgmb", "bare", "skip locked", "pgmq") as sites:

        def measure(name: str) -> Reading:
            site = sites[name]
            arguments = {"batches": form.publish // _CLIENTS // _BATCH, "size": _BATCH}
            jobs = [Job(site.dsn, name, loops.publish, arguments)] * _CLIENTS
            return reading(name, site.work(*jobs))

        outcome.readings = interleave(list(sites), form.rounds, measure)
    outcome.checks = [
        Check("publish vs bare", outcome.ratio("pgmb", "bare"), 0.9),
        Check("publish vs PGMQ", outcome.ratio("pgmb", "pgmq"), 1.4),
    ]
    return outcome
