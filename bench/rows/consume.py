"""consume: a backlog received and settled by 1 client, batches of 500."""

from __future__ import annotations

from bench import loops
from bench.crew import Job
from bench.forms import Form
from bench.ground import Ground, Site
from bench.outcome import Outcome
from bench.rounds import contest

_BATCH = 500
# PGMQ is several times slower: a smaller backlog keeps its rounds as long as the others'.
_SHARE = {"pgmq": 4, "skip locked": 2}


def run(ground: Ground, form: Form) -> Outcome:
    outcome = Outcome("consume", f"1 client, batches of {_BATCH}, settled with the next receive")

    def events(name: str) -> int:
        return form.consume // _SHARE.get(name, 1)

    def jobs(name: str, site: Site) -> list[Job]:
        site.fill((events(name) + _BATCH) * form.rounds + loops.WARM_BATCHES * _BATCH)
        site.settle()
        return [Job(site.dsn, name, loops.consume, {"events": events(name), "size": _BATCH})]

    with ground.sites("pgmb", "pgmb, ack apart", "pgmb, ids by SQL", "bare", "skip locked", "pgmq") as sites:
        outcome.readings = contest(sites, form.rounds, jobs)
    outcome.checks = [
        outcome.compare("consume vs bare", "pgmb", "bare", 0.8),
        outcome.compare("consume vs PGMQ", "pgmb", "pgmq", 5),
    ]
    return outcome
