"""The id of a server-sent event: which epoch, and which place in the log. No I/O."""

from __future__ import annotations

import re
from typing import Final, NamedTuple, Self

from pgmb.types import Position

_TEXT: Final = re.compile(
    r"([0-9a-f]{1,8})-([0-9a-f]{1,16})-([0-9a-f]{1,16})-([0-9a-f]{1,16})-([0-9a-f]{1,8})", re.ASCII
)
_MOST: Final = (1 << 63) - 1
_CHECK: Final = (1 << 32) - 1


class Mark(NamedTuple):
    """How far a reader has come: everything before tick `done`, and what lies between it and tick `batch` and
    is numbered up to `seq`. Ticks are in the database, so any process of any node can go on from here.
    `check` is made of what proves the two ticks (`check_of`): a stream that was created again under its name,
    or a history that a failover lost, may have had ticks of the same numbers.
    """

    epoch: int
    done: int
    batch: int
    seq: int
    check: int

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """None if it is none of ours."""
        found = _TEXT.fullmatch(text)
        if found is None:
            return None
        numbers = [int(part, 16) for part in found.groups()]
        return None if max(numbers) > _MOST else cls(*numbers)

    def __str__(self) -> str:
        return f"{self.epoch:x}-{self.done:x}-{self.batch:x}-{self.seq:x}-{self.check:x}"


def check_of(done: Position, batch: Position) -> int:
    """A number of 32 bits that two ticks have in common with no two others."""
    return (_proof(done) ^ (_proof(batch) << 1)) & _CHECK


def _proof(tick: Position) -> int:
    # The earliest position has no proof of its own.
    return tick.stream ^ tick.proof
