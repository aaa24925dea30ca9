"""fan-out: 10 queues on one stream: what publishing costs, and what each queue's consumer costs."""

from __future__ import annotations

from bench import loops
from bench.contender import Contender
from bench.contenders.broker import QUEUE, Pgmb
from bench.crew import Job, Work
from bench.forms import Form
from bench.ground import Ground, Site
from bench.outcome import Check, Outcome, Reading
from bench.rounds import interleave, reading
from bench.wire import Client

_QUEUES, _BATCH = 10, 500


def run(ground: Ground, form: Form) -> Outcome:
    outcome = Outcome("fan-out", f"{_QUEUES} queues on one stream; consumers by their backends' CPU")
    none, lone, many = (ground.site("pgmb") for _ in range(3))
    sites = {"publish, no queue": none, "publish, 10 queues": many, "lone queue": lone, "each of 10": many}
    none.connection.execute("select pgmb.drop_queue(%s)", [QUEUE])
    names = [QUEUE, *(f"{QUEUE}{number}" for number in range(1, _QUEUES))]
    for name in names[1:]:
        many.connection.execute("select pgmb.create_queue(%s)", [name])
    events = form.fan_out // _BATCH * _BATCH

    def measure(name: str) -> Reading:
        site = sites[name]
        if name.startswith("publish"):
            job = Job(site.dsn, "pgmb", loops.publish, {"batches": events // _BATCH, "size": _BATCH})
            return reading(name, site.work(job))
        readers = [QUEUE] if site is lone else names
        _refill(site, readers, events)
        jobs = [
            Job(site.dsn, "pgmb", _consume, {"queue": queue, "events": events, "size": _BATCH})
            for queue in readers
        ]
        return reading(name, site.work(*jobs), backend_only=True)

    try:
        outcome.readings = interleave(list(sites), max(5, form.rounds), measure)
    finally:
        for site in (none, lone, many):
            site.close()
    outcome.checks = [
        Check(
            "fan-out, publish cost vs no queue",
            outcome.ratio("publish, no queue", "publish, 10 queues"),
            1.05,
            at_least=False,
        ),
        Check("fan-out, each queue vs a lone one", outcome.ratio("each of 10", "lone queue"), 0.8),
    ]
    return outcome


def _refill(site: Site, queues: list[str], events: int) -> None:
    """Every queue finds exactly the same backlog, whatever was published before."""
    for queue in queues:
        site.connection.execute("select pgmb.purge(%s)", [queue])
    site.fill(events + loops.WARM_BATCHES * _BATCH)


def _consume(client: Client, contender: Contender, *, queue: str, events: int, size: int) -> Work:
    return loops.consume(client, Pgmb(queue), events=events, size=size)
