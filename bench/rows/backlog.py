"""backlog: what a claim costs on a queue with a huge backlog, delays and leases, and on an empty one."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from bench import loops
from bench.crew import Job
from bench.forms import Form
from bench.ground import Ground, Site
from bench.outcome import Outcome
from bench.payload import TOPIC, payload
from bench.rounds import backends_only, contest

_BATCH = 10


def run(ground: Ground, form: Form) -> Outcome:
    outcome = Outcome(
        "backlog",
        f"receive({_BATCH}) + ack, backend CPU, with {form.backlog:,} waiting, {form.delayed:,} delayed and "
        f"{form.leases:,} in lease, against an empty queue",
    )
    job = {"claims": form.claims, "size": _BATCH}

    @contextlib.contextmanager
    def turn(name: str) -> Generator[None]:
        if name == "empty":
            sites[name].fill(form.claims * _BATCH)
        yield

    sites = {"empty": ground.site("pgmb"), "huge": ground.site("pgmb")}
    try:
        _burden(sites["huge"], form)
        sites["empty"].fill(loops.WARM_BATCHES * _BATCH)
        outcome.readings = contest(
            sites,
            form.rounds,
            lambda _, site: [Job(site.dsn, "pgmb", loops.claim, job)],
            backends_only,
            turn,
        )
    finally:
        for site in sites.values():
            site.close()
    outcome.notes = [
        f"{name}: {1e6 / outcome.middle(name, 'per_cpu'):.0f} us and "
        f"{outcome.middle(name, 'buffers'):.0f} buffers a claim"
        for name in sites
    ]
    outcome.checks = [
        outcome.compare("backlog, claim cost vs empty", "empty", "huge", 1.2, at_least=False),
        outcome.compare("backlog, buffers vs empty", "huge", "empty", 1.2, "buffers", at_least=False),
    ]
    return outcome


def _burden(site: Site, form: Form) -> None:
    site.fill(form.backlog)
    site.connection.execute(
        f"""
        do $$
        begin
          for lease in 1 .. {form.leases} loop
            perform pgmb.receive('bench', 1, lease_for => '1 day', durable => false);
            commit;
          end loop;
        end $$"""
    )
    site.connection.execute(
        f"select count(pgmb.publish('{TOPIC}', %s::json, delay => '1 day')) "
        f"from generate_series(1, {form.delayed})",
        [payload(0).decode()],
    )
