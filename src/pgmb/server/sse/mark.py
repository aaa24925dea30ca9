"""The id of a server-sent event: which epoch, and which place in the log. No I/O."""

from __future__ import annotations

import re
from typing import Final, NamedTuple, Self

_TEXT: Final = re.compile(r"([0-9a-f]{1,8})-([0-9a-f]{1,16})-([0-9a-f]{1,16})-([0-9a-f]{1,16})", re.ASCII)
_MOST: Final = (1 << 63) - 1


class Mark(NamedTuple):
    """How far a reader has come: everything before tick `done`, and what lies between it and tick `batch` and
    is numbered up to `seq`. Ticks are in the database, so any process of any node can go on from here.
    """

    epoch: int
    done: int
    batch: int
    seq: int = 0

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """None if it is none of ours."""
        found = _TEXT.fullmatch(text)
        if found is None:
            return None
        numbers = [int(part, 16) for part in found.groups()]
        return None if max(numbers) > _MOST else cls(*numbers)

    def __str__(self) -> str:
        return f"{self.epoch:x}-{self.done:x}-{self.batch:x}-{self.seq:x}"
