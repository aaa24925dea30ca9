"""steady: 1 publisher and 1 consumer at once, both as fast as they can, batches of 500."""

from __future__ import annotations

from bench import loops
from bench.crew import Job
from bench.forms import Form
from bench.ground import Ground
from bench.outcome import Check, Outcome, Reading
from bench.rounds import interleave, reading

_BATCH = 500
# From the table in docs/explanation/performance.md: consumed per server-CPU second.
_BARE_THEN, _PGQUE_THEN = 100, 44
_PGQUE = (
    "PgQue: not obtainable here (PyPI's pgque is another project, npm has none): not measured. Indirectly, "
    f"by bare/PgQue = {_BARE_THEN}/{_PGQUE_THEN} measured elsewhere: {{:.1f}}x, goal >= 1.5x"
)


def run(ground: Ground, form: Form) -> Outcome:
    outcome = Outcome("steady", f"1 publisher, 1 consumer, batches of {_BATCH}; consumed")
    with ground.sites("pgmb", "bare", "skip locked", "pgmq") as sites:

        def measure(name: str) -> Reading:
            site = sites[name]
            arguments = {"seconds": form.seconds * 2, "size": _BATCH}
            jobs = [
                Job(site.dsn, name, loops.publish_for, arguments),
                Job(site.dsn, name, loops.consume_for, arguments),
            ]
            return reading(name, site.work(*jobs))

        outcome.readings = interleave(list(sites), form.rounds, measure)
    outcome.checks = [
        Check("steady vs bare", outcome.ratio("pgmb", "bare"), 0.85),
        Check("steady vs PGMQ", outcome.ratio("pgmb", "pgmq"), 3),
    ]
    indirect = outcome.ratio("pgmb", "bare") * _BARE_THEN / _PGQUE_THEN
    outcome.notes = [_PGQUE.format(indirect)]
    return outcome
