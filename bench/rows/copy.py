"""copy: COPY of many events by 1 client."""

from __future__ import annotations

from bench import loops
from bench.crew import Job
from bench.forms import Form
from bench.ground import Ground, Site
from bench.outcome import Outcome
from bench.rounds import contest


def run(ground: Ground, form: Form) -> Outcome:
    outcome = Outcome("copy", f"COPY of {form.copy:,} events, 1 client")

    def jobs(name: str, site: Site) -> list[Job]:
        return [Job(site.dsn, name, loops.copy, {"events": form.copy})]

    with ground.sites("pgmb", "bare", "bare, no index") as sites:
        outcome.readings = contest(sites, form.rounds, jobs)
    outcome.checks = [outcome.compare("COPY vs bare", "pgmb", "bare", 0.85)]
    return outcome
