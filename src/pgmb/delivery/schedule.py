"""When a failed delivery is tried again. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence

MINUTE, HOUR = 60.0, 3600.0

DEFAULT_SCHEDULE = (
    0.0,
    5.0,
    5 * MINUTE,
    30 * MINUTE,
    2 * HOUR,
    5 * HOUR,
    10 * HOUR,
    14 * HOUR,
    20 * HOUR,
    24 * HOUR,
)
"""The waits of Standard Webhooks: eleven attempts within a little over three days."""

_JITTER = 0.2


def delay_after(schedule: Sequence[float], attempt: int, random: Callable[[], float]) -> float | None:
    """Seconds to wait after the failure of an attempt, the first being 1; None where it is given up.

    `random` gives numbers from 0 up to 1: waits are up to a fifth shorter or longer, so that what failed
    together does not come again together.
    """
    if attempt > len(schedule):
        return None
    return jittered(schedule[attempt - 1], random)


def jittered(delay: float, random: Callable[[], float]) -> float:
    """A fifth less to a fifth more."""
    return delay * (1 - _JITTER + 2 * _JITTER * random())
