"""publish: 2 clients, batches of 500."""

from __future__ import annotations

from bench import loops
from bench.crew import Job
from bench.forms import Form
from bench.ground import Ground, Site
from bench.outcome import Outcome
from bench.rounds import contest

_CLIENTS, _BATCH = 2, 500


def run(ground: Ground, form: Form) -> Outcome:
    outcome = Outcome("publish", f"{_CLIENTS} clients, batches of {_BATCH}")
    arguments = {"batches": max(1, form.publish // _CLIENTS // _BATCH), "size": _BATCH}

    def jobs(name: str, site: Site) -> list[Job]:
        return [Job(site.dsn, name, loops.publish, arguments)] * _CLIENTS

    with ground.sites("pgmb", "bare", "skip locked", "pgmq") as sites:
        outcome.readings = contest(sites, form.rounds, jobs)
    outcome.checks = [
        outcome.compare("publish vs bare", "pgmb", "bare", 0.9),
        outcome.compare("publish vs PGMQ", "pgmb", "pgmq", 1.4),
    ]
    return outcome
