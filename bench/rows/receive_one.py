"""receive-one: 8 clients, one event at a time, settled by a call of its own that waits for the disk."""

from __future__ import annotations

from bench import loops
from bench.crew import Job
from bench.forms import Form
from bench.ground import Ground
from bench.outcome import Check, Outcome, Reading
from bench.rounds import interleave, reading

_CLIENTS = 8
# More than any contender takes in a second here.
_MOST_PER_SECOND = 12_000


def run(ground: Ground, form: Form) -> Outcome:
    outcome = Outcome("receive-one", f"{_CLIENTS} clients, receive(1) then ack")
    with ground.sites("pgmb", "pgmq", "pgmq, async read") as sites:
        for site in sites.values():
            site.fill(int(_MOST_PER_SECOND * form.seconds * form.rounds) + 1000)

        def measure(name: str) -> Reading:
            site = sites[name]
            job = Job(site.dsn, name, loops.receive_and_settle_for, {"seconds": form.seconds, "size": 1})
            return reading(name, site.work(*[job] * _CLIENTS))

        outcome.readings = interleave(list(sites), form.rounds, measure)
    outcome.checks = [
        Check("receive(1) + ack vs PGMQ", outcome.ratio("pgmb", "pgmq", "per_second"), 1.2),
    ]
    return outcome
