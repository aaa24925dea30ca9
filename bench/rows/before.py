"""before: publish, and receive + ack, beside the same calls of an earlier revision, on one server.

As an ordinary role that was granted both, as applications should run.
"""

from __future__ import annotations

from psycopg.conninfo import make_conninfo

from bench import loops
from bench.crew import Job
from bench.forms import Form
from bench.ground import Ground, Site
from bench.outcome import Outcome
from bench.revision import before
from bench.rounds import backends_only, contest

CHECKS = ["publish vs before", "receive + ack vs before"]
_PUBLISHED, _BATCH = 200, 20
_RECEIVED, _LEASE = 4000, 20
_ROUNDS = 5
"""Times the form's rounds: three per cent is less than what a neighbour on the machine takes of one round."""
_GOAL = 0.97
_ROLE = "pgmb_bench"


def run(ground: Ground, form: Form) -> Outcome:
    outcome = Outcome(
        "before", f"publish {_BATCH} a call, receive {_LEASE} and ack in two calls, against {before()}"
    )
    rounds = form.rounds if form.name == "tiny" else form.rounds * _ROUNDS

    def publishing(name: str, site: Site) -> list[Job]:
        return [Job(_as_an_ordinary_role(site), name, loops.publish, {"batches": _PUBLISHED, "size": _BATCH})]

    def receiving(name: str, site: Site) -> list[Job]:
        site.fill((_RECEIVED + _LEASE) * rounds + loops.WARM_BATCHES * _LEASE)
        site.settle()
        return [Job(_as_an_ordinary_role(site), name, loops.consume, {"events": _RECEIVED, "size": _LEASE})]

    for check, (now, then), jobs in zip(
        CHECKS,
        (("pgmb", "pgmb, before"), ("pgmb, ack apart", "pgmb, ack apart, before")),
        (publishing, receiving),
        strict=True,
    ):
        with ground.sites(now, then) as sites:
            part = Outcome("", "", readings=contest(sites, rounds, jobs, backends_only))
        outcome.readings += part.readings
        outcome.checks.append(part.compare(check, now, then, _GOAL))
    return outcome


def _as_an_ordinary_role(site: Site) -> str:
    """A connection string whose sessions have the rights of an application."""
    if site.connection.execute("select to_regrole(%s)", [_ROLE]).fetchone() == (None,):
        site.connection.execute(f"create role {_ROLE}")
        site.connection.execute(f"grant pgmb_publisher, pgmb_consumer to {_ROLE}")
    return make_conninfo(site.dsn, options=f"-c role={_ROLE}")
