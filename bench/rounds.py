"""Rounds: every contender in each, the order rotated, so that what disturbs the machine disturbs all.

Many short rounds by workers that stay, rather than few long ones: neighbours come and go within seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

from bench.crew import Crew, Job, Shift
from bench.ground import Site
from bench.outcome import Reading

_NOT_EXTRA = ("messages", "client_cpu", "backend_cpu")


def interleave(contenders: Sequence[str], rounds: int, measure: Callable[[str], Reading]) -> list[Reading]:
    """A B C, B C A, C A B ..."""
    readings = []
    for number in range(rounds):
        turn = number % len(contenders)
        readings += [measure(name) for name in (*contenders[turn:], *contenders[:turn])]
    return readings


def contest(
    sites: Mapping[str, Site],
    rounds: int,
    jobs: Callable[[str, Site], Sequence[Job]],
    read: Callable[[str, Shift], Reading] | None = None,
    turn: Callable[[str], contextlib.AbstractContextManager[None]] = lambda _: contextlib.nullcontext(),
) -> list[Reading]:
    """Interleaved rounds of a crew for each site. `turn` surrounds a contender's part of a round."""
    with contextlib.ExitStack() as stack:
        crews: dict[str, Crew] = {}
        for name, site in sites.items():
            site.settle()
            crews[name] = site.crew(*jobs(name, site))
            stack.callback(crews[name].close)

        def measure(name: str) -> Reading:
            with turn(name):
                return (read or whole_server)(name, crews[name].work())

        return interleave(list(sites), rounds, measure)


def whole_server(contender: str, shift: Shift) -> Reading:
    """A reading that charges all of the server's processes."""
    return _reading(contender, shift, shift.server_cpu)


def backends_only(contender: str, shift: Shift) -> Reading:
    """A reading that charges the workers' own backends, whatever else the server does."""
    return _reading(contender, shift, shift.backend_cpu)


def _reading(contender: str, shift: Shift, server_cpu: float) -> Reading:
    extra = {
        key: shift.total(key)
        for key, value in shift.results[0].items()
        if key not in _NOT_EXTRA and isinstance(value, int | float)
    }
    return Reading(
        contender,
        int(shift.total("messages")),
        shift.wall,
        server_cpu,
        shift.total("client_cpu"),
        extra,
    )
