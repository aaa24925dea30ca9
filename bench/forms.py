"""How much is measured: `tiny` proves that it runs, `brief` is the scorecard's, then `quick` and `full`."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Form:
    name: str
    rounds: int
    publish: int
    """Events a round, over all clients; the slow contenders get less where only the rate counts."""
    copy: int
    consume: int
    seconds: float
    """The length of a timed round."""
    pinned_seconds: float
    pinned_window: float
    backlog: int
    delayed: int
    leases: int
    claims: int
    """Claims a round in the backlog row."""
    streams: int
    fan_out: int
    """Events a queue a round."""
    contrast: bool = False
    """Whether SKIP LOCKED is shown under a pinned xmin too."""


_TINY = Form(
    name="tiny",
    rounds=2,
    publish=2_000,
    copy=2_000,
    consume=4_000,
    seconds=0.3,
    pinned_seconds=1.0,
    pinned_window=0.4,
    backlog=3_000,
    delayed=1_000,
    leases=50,
    claims=20,
    streams=3,
    fan_out=1_000,
)
_BRIEF = Form(
    name="brief",
    rounds=9,
    publish=20_000,
    copy=30_000,
    consume=20_000,
    seconds=0.4,
    pinned_seconds=24.0,
    pinned_window=6.0,
    backlog=300_000,
    delayed=100_000,
    leases=5_000,
    claims=150,
    streams=200,
    fan_out=15_000,
)
_QUICK = replace(
    _BRIEF,
    name="quick",
    rounds=15,
    publish=40_000,
    copy=50_000,
    consume=30_000,
    seconds=0.7,
    pinned_seconds=60.0,
    pinned_window=10.0,
    backlog=1_000_000,
    delayed=200_000,
    leases=20_000,
    claims=200,
    fan_out=20_000,
)
_FULL = replace(
    _QUICK,
    name="full",
    rounds=15,
    publish=100_000,
    copy=1_000_000,
    consume=200_000,
    seconds=3.0,
    pinned_seconds=600.0,
    pinned_window=60.0,
    backlog=10_000_000,
    delayed=1_000_000,
    leases=100_000,
    claims=1_000,
    fan_out=60_000,
    contrast=True,
)

FORMS = {form.name: form for form in (_TINY, _BRIEF, _QUICK, _FULL)}
