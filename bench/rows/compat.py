"""compat: a backlog read and removed by PGMQ's own functions, over our log and over its tables."""

from __future__ import annotations

from bench import loops
from bench.crew import Job
from bench.forms import Form
from bench.ground import Ground, Site
from bench.outcome import Outcome
from bench.rounds import contest

_BATCH = 500
# PGMQ is slower by so much: a smaller backlog keeps its rounds as long.
_SHARE = {"pgmq": 4, "pgmq, archive": 4, "compat": 2, "compat, archive": 4}


def run(ground: Ground, form: Form) -> Outcome:
    outcome = Outcome(
        "compat", f"1 client, pgmq.read of {_BATCH}, then pgmq.delete or archive of their numbers"
    )

    def events(name: str) -> int:
        return form.consume // _SHARE[name]

    def jobs(name: str, site: Site) -> list[Job]:
        site.fill((events(name) + _BATCH) * form.rounds + loops.WARM_BATCHES * _BATCH)
        site.settle()
        return [Job(site.dsn, name, loops.consume, {"events": events(name), "size": _BATCH})]

    with ground.sites(*_SHARE) as sites:
        outcome.readings = contest(sites, form.rounds, jobs)
    outcome.checks = [
        outcome.compare("compat consume vs PGMQ", "compat", "pgmq", 2),
        outcome.compare("compat archive vs PGMQ", "compat, archive", "pgmq, archive", 1),
    ]
    return outcome
