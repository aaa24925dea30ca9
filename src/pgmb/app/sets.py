"""Sets: events that one call handles, and that are tried again as the same set. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from pgmb.types import Event

SplitBy: TypeAlias = Callable[[list[Event]], Iterable[Sequence[Event]]]
"""Parts of a set, to be handled apart; each event in one of them."""


class SplitError(Exception):
    """What `split_by` returned is not a set's events, each in one part."""


def parts(events: Sequence[Event], split_by: SplitBy | None) -> list[list[Event]]:
    """The parts in which a set is handled. Raises what `split_by` raises, and SplitError."""
    if split_by is None:
        return [list(events)]
    found = [list(part) for part in split_by(list(events))]
    given = sorted(event.seq for event in events)
    taken = sorted(event.seq for part in found for event in part)
    if taken != given:
        raise SplitError(
            f"split_by was given {len(given)} events and returned {len(set(given) & set(taken))} of them"
            f" {len(taken)} times; each must be in one part"
        )
    return [part for part in found if part]
