"""pinned-xmin: server time a message while old transactions keep vacuum from removing anything."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator
from statistics import median

import psycopg

from bench import pacing
from bench.crew import Job, beside
from bench.forms import Form
from bench.ground import Ground, Site
from bench.outcome import Check, Outcome, Reading

_RATE, _BATCH, _POLL = 4000, 40, 0.01
Sample = tuple[float, int, float]


def run(ground: Ground, form: Form) -> Outcome:
    outcome = Outcome(
        "pinned-xmin",
        f"{_RATE}/s for {form.pinned_seconds:g} s, an idle snapshot and an idle xid held all the while",
    )
    window = f"{form.pinned_window:g} s"
    for name in ("pgmb", "skip locked") if form.contrast else ("pgmb",):
        with ground.sites(name) as sites, _pins(sites[name]):
            outcome.readings.append(_measure(sites[name], name, form))
        outcome.notes.append(
            f"{name}: {outcome.middle(name, 'first'):.1f} us a message in the first {window}, "
            f"{outcome.middle(name, 'last'):.1f} in the last; "
            f"{outcome.middle(name, 'first rate'):.0f} -> {outcome.middle(name, 'last rate'):.0f} a second"
        )
    growth = outcome.middle("pgmb", "last") / outcome.middle("pgmb", "first")
    kept = outcome.middle("pgmb", "last rate") / outcome.middle("pgmb", "first rate")
    outcome.checks = [
        Check("pinned xmin, cost last/first", growth, 1.1, at_least=False),
        Check("pinned xmin, throughput last/first", kept, 0.9),
    ]
    return outcome


def _measure(site: Site, name: str, form: Form) -> Reading:
    seconds = form.pinned_seconds
    jobs = (
        Job(site.dsn, name, pacing.publish_batches_at, {"rate": _RATE, "size": _BATCH, "seconds": seconds}),
        Job(
            site.dsn,
            name,
            pacing.consume_and_sample,
            {
                "interval": _POLL,
                "seconds": seconds,
                "size": 500,
                "postmaster": site.server.postmaster_pid,
            },
        ),
    )
    janitor = beside(Job(site.dsn, name, pacing.maintain)) if name == "pgmb" else contextlib.nullcontext()
    with janitor, contextlib.closing(site.crew(*jobs)) as crew:
        shift = crew.work()
    samples: list[Sample] = shift.results[-1]["samples"]
    begin, end = samples[0][0], samples[-1][0]
    first = [sample for sample in samples if sample[0] <= begin + form.pinned_window + 0.01]
    last = [sample for sample in samples if sample[0] >= end - form.pinned_window - 0.01]
    return Reading(
        name,
        int(shift.total("messages")),
        shift.wall,
        shift.server_cpu,
        shift.total("client_cpu"),
        {"first": _cost(first), "last": _cost(last), "first rate": _rate(first), "last rate": _rate(last)},
    )


def _cost(samples: list[Sample]) -> float:
    """Microseconds a message: the median of the seconds, so that one disturbed second does not tell."""
    return median(
        (after[2] - before[2]) / max(1, after[1] - before[1]) * 1e6
        for before, after in itertools.pairwise(samples)
    )


def _rate(samples: list[Sample]) -> float:
    return (samples[-1][1] - samples[0][1]) / (samples[-1][0] - samples[0][0])


@contextlib.contextmanager
def _pins(site: Site) -> Generator[None]:
    with psycopg.connect(site.dsn) as snapshot, psycopg.connect(site.dsn) as xid:
        snapshot.execute("set transaction isolation level repeatable read")
        snapshot.execute("select 1")
        xid.execute("select pg_current_xact_id()")
        yield
        snapshot.rollback()
        xid.rollback()
