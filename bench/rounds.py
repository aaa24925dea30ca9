"""Rounds: every contender in each, the order rotated, so that what disturbs the machine disturbs all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.crew import Shift
from bench.outcome import Reading


def interleave(contenders: Sequence[str], rounds: int, measure: Callable[[str], Reading]) -> list[Reading]:
    """A B C, B C A, C A B ..."""
    readings = []
    for number in range(rounds):
        turn = number % len(contenders)
        readings += [measure(name) for name in (*contenders[turn:], *contenders[:turn])]
    return readings


def reading(contender: str, shift: Shift, *, backend_only: bool = False) -> Reading:
    extra = {
        key: shift.total(key)
        for key in shift.results[0]
        if key not in ("messages", "client_cpu", "backend_cpu")
        and isinstance(shift.results[0][key], int | float)
    }
    return Reading(
        contender,
        int(shift.total("messages")),
        shift.wall,
        shift.backend_cpu if backend_only else shift.server_cpu,
        shift.total("client_cpu"),
        extra,
    )
