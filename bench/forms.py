"""How much is measured: `tiny` proves that it runs, `brief` is the scorecard's, then `quick` and `full`."""

from __future__ import annotations

from dataclasses import dataclass


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


FORMS = {
    form.name: form
    for form in (
        Form("tiny", 1, 2_000, 2_000, 4_000, 0.3, 1.0, 0.4, 3_000, 1_000, 50, 20, 3, 2_000),
        Form("brief", 3, 40_000, 100_000, 60_000, 1.0, 30.0, 6.0, 300_000, 100_000, 5_000, 300, 200, 40_000),
        Form(
            "quick",
            5,
            100_000,
            200_000,
            200_000,
            2.0,
            60.0,
            10.0,
            1_000_000,
            200_000,
            20_000,
            500,
            200,
            60_000,
        ),
        Form(
            "full",
            7,
            400_000,
            1_000_000,
            1_000_000,
            5.0,
            600.0,
            60.0,
            10_000_000,
            1_000_000,
            100_000,
            2_000,
            200,
            200_000,
            contrast=True,
        ),
    )
}
