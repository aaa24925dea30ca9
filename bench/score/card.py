"""Fills the scorecard: what is measured comes first and alone on the machine, proofs then side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from bench.ground import Ground
from bench.score.line import Line
from bench.score.part import Measured, Part, Proved

_SIDE_BY_SIDE = 3


def lines(parts: Sequence[Part], *, full: bool, major: int) -> Iterator[Line]:
    """The lines of all parts, as they come."""
    with Ground(major) as ground:
        for part in parts:
            if isinstance(part, Measured):
                yield from part.lines(ground, full)
    proofs = [part for part in parts if isinstance(part, Proved)]
    for proof in proofs:
        if proof.alone:
            yield from proof.lines(full)
    proofs = [proof for proof in proofs if not proof.alone]
    with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:
        for found in pool.map(lambda proof: proof.lines(full), proofs):
            yield from found


def fill(parts: Sequence[Part], *, full: bool = False, major: int = 18) -> bool:
    """Prints the card. True if nothing falls short."""
    shown = []
    for line in lines(parts, full=full, major=major):
        print(line, flush=True)
        shown.append(line)
    good = sum(line.ok for line in shown)
    print(f"{good} of {len(shown)} ok", flush=True)
    return bool(shown) and good == len(shown)
