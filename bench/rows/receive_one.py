"""receive-one: one event at a time, settled by a call of its own that waits for the disk."""

from __future__ import annotations

from dataclasses import replace

from bench import loops
from bench.crew import Job
from bench.forms import Form
from bench.ground import Ground, Site
from bench.outcome import Outcome
from bench.rounds import contest

# More than any contender takes in a second here.
_MOST_PER_SECOND = 8_000
_CONTENDERS = ("pgmb", "pgmq", "pgmq, async read")
CHECKS = [
    f"receive(1) + ack vs PGMQ, {clients}{figure}"
    for clients in ("1 client", "8 clients")
    for figure in ("", ", messages a second")
]


def run(ground: Ground, form: Form) -> Outcome:
    outcome = Outcome("receive-one", "receive(1) then ack, by 1 client and by 8")
    for clients in (1, 8):

        def jobs(name: str, site: Site, clients: int = clients) -> list[Job]:
            site.fill(int(_MOST_PER_SECOND * form.seconds * form.rounds) + 1000)
            site.settle()
            arguments = {"seconds": form.seconds, "size": 1}
            return [Job(site.dsn, name, loops.receive_and_settle_for, arguments)] * clients

        with ground.sites(*_CONTENDERS) as sites:
            readings = contest(sites, form.rounds, jobs)
        names = {name: f"{name}, {clients}" for name in _CONTENDERS}
        outcome.readings += [replace(reading, contender=names[reading.contender]) for reading in readings]
        by_cpu, by_second = CHECKS[:2] if clients == 1 else CHECKS[2:]
        outcome.checks += [
            outcome.compare(by_cpu, names["pgmb"], names["pgmq"], 2),
            outcome.compare(by_second, names["pgmb"], names["pgmq"], 1.3, "per_second"),
        ]
    return outcome
