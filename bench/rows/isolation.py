"""isolation: what 200 other streams with traffic cost a stream's consumer, by its own backend's time."""

from __future__ import annotations

import time
from collections.abc import Callable

from bench import loops
from bench.contender import Contender
from bench.crew import Job, Work, beside
from bench.forms import Form
from bench.ground import Ground, Site
from bench.outcome import Outcome
from bench.payload import TOPIC, payloads
from bench.rounds import backends_only, contest
from bench.wire import Client, json_array

_BATCH, _OTHERS_BATCH, _OTHERS_PAUSE = 500, 10, 0.01


def run(ground: Ground, form: Form) -> Outcome:
    outcome = Outcome(
        "isolation",
        f"consume, backend CPU, beside {form.streams} other streams with traffic, and in a database alone",
    )
    events = form.fan_out

    def jobs(_: str, site: Site) -> list[Job]:
        site.fill((events + _BATCH) * form.rounds + loops.WARM_BATCHES * _BATCH)
        site.settle()
        return [Job(site.dsn, "pgmb", loops.consume, {"events": events, "size": _BATCH})]

    sites = {"alone": ground.site("pgmb"), "crowded": ground.site("pgmb")}
    try:
        _crowd(sites["crowded"], form.streams)
        # The traffic goes on in both turns: the machine is as busy, only the database differs.
        with beside(Job(sites["crowded"].dsn, "pgmb", _traffic, {"streams": form.streams})):
            outcome.readings = contest(sites, form.rounds, jobs, backends_only)
    finally:
        for site in sites.values():
            site.close()
    outcome.checks = [outcome.compare("isolation, cost vs alone", "alone", "crowded", 1.05, at_least=False)]
    return outcome


def _crowd(site: Site, streams: int) -> None:
    for number in range(streams):
        site.connection.execute("select pgmb.create_stream(%s)", [f"other{number}"])
        site.connection.execute(
            "select pgmb.create_queue(%s, stream => %s)", [f"other{number}", f"other{number}"]
        )


def _traffic(client: Client, contender: Contender, *, streams: int, going: Callable[[], bool]) -> Work:
    """Publishes to the others in turn and consumes there, about a hundred times a second."""
    publish = client.prepare("select pgmb.publish_many($1, $2, stream => $3)", "text", "json[]", "text")
    receive = client.prepare("select lease from pgmb.receive($1)", "text")
    ack = client.prepare("select pgmb.ack($1)", "uuid")
    topic, batch = TOPIC.encode(), json_array(payloads(_OTHERS_BATCH))

    def measured() -> dict[str, float]:
        turn = 0
        while going():
            name = f"other{turn % streams}".encode()
            publish(topic, batch, name)
            got = receive(name)
            if got.ntuples:
                ack(got.get_value(0, 0))
            turn += 1
            time.sleep(_OTHERS_PAUSE)
        return {"published": turn * _OTHERS_BATCH}

    return measured
