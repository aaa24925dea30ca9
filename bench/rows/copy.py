"""copy: COPY of many events by 1 client."""

from __future__ import annotations

from bench import loops
from bench.crew import Job
from bench.forms import Form
from bench.ground import Ground
from bench.outcome import Check, Outcome, Reading
from bench.rounds import interleave, reading


def run(ground: Ground, form: Form) -> Outcome:
    outcome = Outcome("copy", f"COPY of {form.copy:,} events, 1 client")
    with ground.sites("pgmb", "bare", "bare, no index") as sites:

        def measure(name: str) -> Reading:
            site = sites[name]
            return reading(name, site.work(Job(site.dsn, name, loops.copy, {"events": form.copy})))

        outcome.readings = interleave(list(sites), form.rounds, measure)
    outcome.checks = [Check("COPY vs bare", outcome.ratio("pgmb", "bare"), 0.85)]
    return outcome
