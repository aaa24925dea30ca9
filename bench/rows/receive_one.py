"""receive-one: 8 clients, one event at a time, settled by a call of its own that waits for the disk."""

from __future__ import annotations

from bench import loops
from bench.crew import Job
from bench.forms import Form
from bench.ground import Ground, Site
from bench.outcome import Outcome
from bench.rounds import contest

_CLIENTS = 8
# More than any contender takes in a second here.
_MOST_PER_SECOND = 8_000


def run(ground: Ground, form: Form) -> Outcome:
    outcome = Outcome("receive-one", f"{_CLIENTS} clients, receive(1) then ack")

    def jobs(name: str, site: Site) -> list[Job]:
        site.fill(int(_MOST_PER_SECOND * form.seconds * form.rounds) + 1000)
        site.settle()
        arguments = {"seconds": form.seconds, "size": 1}
        return [Job(site.dsn, name, loops.receive_and_settle_for, arguments)] * _CLIENTS

    with ground.sites("pgmb", "pgmq", "pgmq, async read") as sites:
        outcome.readings = contest(sites, form.rounds, jobs)
    outcome.checks = [
        outcome.compare("receive(1) + ack vs PGMQ", "pgmb", "pgmq", 2),
    ]
    outcome.notes = [f"by messages a second: {outcome.ratio('pgmb', 'pgmq', 'per_second'):.2f}x of PGMQ"]
    return outcome
