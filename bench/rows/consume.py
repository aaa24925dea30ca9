"""consume: a backlog received and settled by 1 client, batches of 500."""

from __future__ import annotations

from bench import loops
from bench.crew import Job
from bench.forms import Form
from bench.ground import Ground
from bench.outcome import Check, Outcome, Reading
from bench.rounds import interleave, reading

_BATCH = 500
# PGMQ is several times slower: a smaller backlog keeps its rounds as long as the others'.
_SHARE = {"pgmq": 4, "skip locked": 2}


def run(ground: Ground, form: Form) -> Outcome:
    outcome = Outcome("consume", f"1 client, batches of {_BATCH}, settled with the next receive")
    with ground.sites("pgmb", "pgmb, ack apart", "pgmb, ids by SQL", "bare", "skip locked", "pgmq") as sites:
        events = {name: form.consume // _SHARE.get(name, 1) for name in sites}
        for name, site in sites.items():
            site.fill((events[name] + loops.WARM_BATCHES * _BATCH) * form.rounds)

        def measure(name: str) -> Reading:
            site = sites[name]
            arguments = {"events": events[name], "size": _BATCH}
            return reading(name, site.work(Job(site.dsn, name, loops.consume, arguments)))

        outcome.readings = interleave(list(sites), form.rounds, measure)
    outcome.checks = [
        Check("consume vs bare", outcome.ratio("pgmb", "bare"), 0.8),
        Check("consume vs PGMQ", outcome.ratio("pgmb", "pgmq"), 5),
    ]
    return outcome
