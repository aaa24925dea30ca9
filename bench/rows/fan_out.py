"""fan-out: 10 queues on one stream: what publishing costs, and what each queue's consumer costs."""

from __future__ import annotations

from bench import loops
from bench.contender import Contender
from bench.contenders.broker import QUEUE, Pgmb
from bench.crew import Job, Shift, Work
from bench.forms import Form
from bench.ground import Ground, Site
from bench.outcome import Outcome, Reading
from bench.rounds import backends_only, contest, whole_server
from bench.wire import Client

_QUEUES, _BATCH = 10, 500
_PUBLISHING = ("publish, no queue", "publish, 10 queues")
_LONE, _EACH = "lone queue", "each of 10"


def run(ground: Ground, form: Form) -> Outcome:
    outcome = Outcome("fan-out", f"{_QUEUES} queues on one stream; consumers by their backends' CPU")
    events = max(1, form.fan_out // _BATCH) * _BATCH
    names = [QUEUE, *(f"{QUEUE}{number}" for number in range(1, _QUEUES))]

    def jobs(name: str, site: Site) -> list[Job]:
        if name in _PUBLISHING:
            return [Job(site.dsn, "pgmb", loops.publish, {"batches": events // _BATCH, "size": _BATCH})]
        site.fill((events + _BATCH) * form.rounds + loops.WARM_BATCHES * _BATCH)
        site.settle()
        readers = names if name == _EACH else [QUEUE]
        arguments = {"events": events, "size": _BATCH}
        return [Job(site.dsn, "pgmb", _consume, {"queue": queue, **arguments}) for queue in readers]

    def read(name: str, shift: Shift) -> Reading:
        return (whole_server if name in _PUBLISHING else backends_only)(name, shift)

    sites = {name: ground.site("pgmb") for name in (*_PUBLISHING, _LONE, _EACH)}
    try:
        sites[_PUBLISHING[0]].connection.execute("select pgmb.drop_queue(%s)", [QUEUE])
        for site in (sites[_PUBLISHING[1]], sites[_EACH]):
            for queue in names[1:]:
                site.connection.execute("select pgmb.create_queue(%s)", [queue])
        outcome.readings = contest(sites, form.rounds, jobs, read)
    finally:
        for site in sites.values():
            site.close()
    outcome.checks = [
        outcome.compare("fan-out, publish cost vs no queue", *_PUBLISHING, 1.05, at_least=False),
        outcome.compare("fan-out, each queue vs a lone one", _EACH, _LONE, 0.8),
    ]
    return outcome


def _consume(client: Client, contender: Contender, *, queue: str, events: int, size: int) -> Work:
    return loops.consume(client, Pgmb(queue), events=events, size=size)
