"""consume: a backlog received and settled by 1 client, in batches of 500; consume-20: of 20."""

from __future__ import annotations

from collections.abc import Sequence

from bench import loops
from bench.crew import Job
from bench.forms import Form
from bench.ground import Ground, Site
from bench.outcome import Outcome, Reading
from bench.rounds import contest

# PGMQ is several times slower: a smaller backlog keeps its rounds as long as the others'.
_SHARE = {"pgmq": 4, "skip locked": 2}


def run(ground: Ground, form: Form) -> Outcome:
    outcome = Outcome("consume", "1 client, batches of 500, settled with the next receive")
    contenders = ("pgmb", "pgmb, SQL", "pgmb, ack apart", "pgmb, ids by SQL", "bare", "skip locked", "pgmq")
    outcome.readings = _consume(ground, form, 500, form.consume, contenders)
    outcome.checks = [
        outcome.compare("consume vs bare", "pgmb", "bare", 0.85),
        outcome.compare("consume vs PGMQ", "pgmb", "pgmq", 5),
    ]
    return outcome


def run_20(ground: Ground, form: Form) -> Outcome:
    outcome = Outcome("consume-20", "1 client, batches of 20, settled with the next receive")
    # As many calls cost more CPU a message: a quarter of the events is enough.
    contenders = ("pgmb", "pgmb, SQL", "bare", "pgmq")
    outcome.readings = _consume(ground, form, 20, form.consume // 4, contenders)
    outcome.checks = [
        outcome.compare("consume, batches of 20, vs bare", "pgmb", "bare", 0.35),
        outcome.compare("consume, batches of 20, vs PGMQ", "pgmb", "pgmq", 4),
    ]
    return outcome


def _consume(
    ground: Ground, form: Form, batch: int, all_events: int, contenders: Sequence[str]
) -> list[Reading]:
    def events(name: str) -> int:
        return all_events // _SHARE.get(name, 1)

    def jobs(name: str, site: Site) -> list[Job]:
        site.fill((events(name) + batch) * form.rounds + loops.WARM_BATCHES * batch)
        site.settle()
        return [Job(site.dsn, name, loops.consume, {"events": events(name), "size": batch})]

    with ground.sites(*contenders) as sites:
        return contest(sites, form.rounds, jobs)
