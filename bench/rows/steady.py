"""steady: 1 publisher and 1 consumer at once, both as fast as they can, batches of 500."""

from __future__ import annotations

from bench import loops
from bench.crew import Job
from bench.forms import Form
from bench.ground import Ground, Site
from bench.outcome import Outcome
from bench.rounds import contest

_BATCH = 500
# From the table in docs/explanation/performance.md: consumed per server-CPU second.
_BARE_THEN, _PGQUE_THEN = 100, 44
_PGQUE = (
    "PgQue: not obtainable here (PyPI's pgque is another project, npm has none): not measured. Indirectly, "
    f"by bare/PgQue = {_BARE_THEN}/{_PGQUE_THEN} measured elsewhere: {{:.1f}}x, goal >= 1.5x"
)


def run(ground: Ground, form: Form) -> Outcome:
    outcome = Outcome("steady", f"1 publisher, 1 consumer, batches of {_BATCH}; consumed")
    arguments = {"seconds": 2.5 * form.seconds, "size": _BATCH}

    def jobs(name: str, site: Site) -> list[Job]:
        return [Job(site.dsn, name, loop, arguments) for loop in (loops.publish_for, loops.consume_for)]

    with ground.sites("pgmb", "bare", "skip locked", "pgmq") as sites:
        outcome.readings = contest(sites, max(2, form.rounds // 2), jobs)
    outcome.checks = [
        outcome.compare("steady vs bare", "pgmb", "bare", 0.8),
        outcome.compare("steady vs PGMQ", "pgmb", "pgmq", 3.5),
    ]
    indirect = outcome.ratio("pgmb", "bare") * _BARE_THEN / _PGQUE_THEN
    outcome.notes = [_PGQUE.format(indirect)]
    return outcome
