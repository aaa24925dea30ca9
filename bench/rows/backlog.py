"""backlog: what a claim costs on a queue with a huge backlog, delays and leases, and on an empty one."""

from __future__ import annotations

from bench import loops
from bench.crew import Job
from bench.forms import Form
from bench.ground import Ground, Site
from bench.outcome import Check, Outcome, Reading
from bench.payload import TOPIC, payload
from bench.rounds import interleave, reading

_BATCH = 10


def run(ground: Ground, form: Form) -> Outcome:
    outcome = Outcome(
        "backlog",
        f"receive({_BATCH}) + ack, backend CPU, with {form.backlog:,} waiting, {form.delayed:,} delayed and "
        f"{form.leases:,} in lease, against an empty queue",
    )
    sites = {"empty": ground.site("pgmb"), "huge": ground.site("pgmb")}
    try:
        _burden(sites["huge"], form)

        def measure(name: str) -> Reading:
            site = sites[name]
            if name == "empty":
                site.fill((form.claims + loops.WARM_BATCHES) * _BATCH)
            job = Job(site.dsn, "pgmb", loops.claim, {"claims": form.claims, "size": _BATCH})
            return reading(name, site.work(job), backend_only=True)

        outcome.readings = interleave(list(sites), max(5, form.rounds), measure)
    finally:
        for site in sites.values():
            site.close()
    outcome.notes = [
        f"{name}: {1e6 / outcome.middle(name, 'per_cpu'):.0f} us and "
        f"{outcome.middle(name, 'buffers'):.0f} buffers a claim"
        for name in sites
    ]
    outcome.checks = [
        Check("backlog, claim cost vs empty", outcome.ratio("empty", "huge"), 1.2, at_least=False),
        Check("backlog, buffers vs empty", outcome.ratio("huge", "empty", "buffers"), 1.2, at_least=False),
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
