"""compat: a backlog read and removed by PGMQ's own functions, over our log and over its tables."""

from __future__ import annotations

from bench import loops
from bench.crew import Job
from bench.forms import Form
from bench.ground import Ground, Site
from bench.outcome import Outcome, Reading
from bench.rounds import contest

_BATCH = 500
# PGMQ is slower by so much: a smaller backlog keeps its rounds as long.
_SHARE = {"pgmq": 4, "pgmq, archive": 4, "compat": 2, "compat, archive": 4}
# A message on its own costs so much more than one of a batch.
_SINGLE = 40


def run(ground: Ground, form: Form) -> Outcome:
    outcome = Outcome(
        "compat", f"1 client, pgmq.read of {_BATCH}, then pgmq.delete or archive of their numbers"
    )
    outcome.readings = _contest(ground, form, _BATCH, _SHARE)
    outcome.checks = [
        outcome.compare("compat consume vs PGMQ", "compat", "pgmq", 2),
        outcome.compare("compat archive vs PGMQ", "compat, archive", "pgmq, archive", 1.3),
    ]
    return outcome


def run_one(ground: Ground, form: Form) -> Outcome:
    outcome = Outcome("compat-one", "1 client, pgmq.read of 1, then pgmq.delete or archive of its number")
    outcome.readings = _contest(ground, form, 1, dict.fromkeys(_SHARE, _SINGLE))
    outcome.checks = [
        outcome.compare("compat read(1) + delete(1) vs PGMQ", "compat", "pgmq", 1),
        outcome.compare("compat read(1) + archive(1) vs PGMQ", "compat, archive", "pgmq, archive", 1),
    ]
    return outcome


def _contest(ground: Ground, form: Form, size: int, share: dict[str, int]) -> list[Reading]:
    def events(name: str) -> int:
        return max(form.consume // share[name], size)

    def jobs(name: str, site: Site) -> list[Job]:
        site.fill((events(name) + size) * form.rounds + loops.WARM_BATCHES * size)
        site.settle()
        return [Job(site.dsn, name, loops.consume, {"events": events(name), "size": size})]

    with ground.sites(*share) as sites:
        return contest(sites, form.rounds, jobs)
