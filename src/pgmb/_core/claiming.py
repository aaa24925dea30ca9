"""When the client claims and reads in one statement: `statements.claim` in place of `statements.receive`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID

from pgmb._core import statements, wire
from pgmb._core.statements import Statement
from pgmb.types import Duration

_SEGMENT_BITS: Final = 40
_FIRST_NUMBERS: Final = 4096
"""As in pgmb.claim_next: the planner knows too little of a table that has fewer rows."""
_MOST_TO_PASS: Final = 256


class Claiming:
    """What is known of one queue, and whether the next receive is likely to be in the middle of a batch.

    After a full lease there is more, most likely. Where the server refuses nevertheless, each refusal in a
    row doubles the number of receives that do not try.
    """

    def __init__(self, stream: int | None) -> None:
        """`stream`: the id of the queue's stream; None where this client can not claim by itself."""
        self._stream = stream
        self._segment: int | None = None
        self._known = 0
        self._refusals = 0
        self._to_pass = 0

    def statement(
        self, queue: str, limit: int, lease_for: Duration | None, ack: UUID | None
    ) -> Statement | None:
        """None: call `receive`."""
        # Threads share this: each value is read once.
        stream, segment = self._stream, self._segment
        if stream is None or segment is None or limit < 1:
            return None
        return statements.claim(
            queue, limit, lease_for, ack, known=self._known, stream=stream, segment=segment
        )

    def note(self, rows: Sequence[wire.Row]) -> None:
        """The rows of a full lease that `statements.receive` made."""
        seq, attempt, lease = rows[-1][0], rows[-1][7], rows[-1][8]
        self._known = _claim_of(lease)
        if self._to_pass:
            self._to_pass -= 1
        elif attempt == 1 and seq % (1 << _SEGMENT_BITS) > _FIRST_NUMBERS:
            self._segment = seq >> _SEGMENT_BITS

    def claimed(self, rows: Sequence[wire.Row]) -> bool:
        """Whether the statement claimed. If it did not, `receive` is called, and a full lease is noted."""
        if rows and rows[0][-1] is not None:
            self._known = _claim_of(rows[0][-1])
            self._refusals = 0
            return True
        self._segment = None
        # The end of a batch is refused too.
        self._refusals += 1
        self._to_pass = min(1 << self._refusals, _MOST_TO_PASS) - 2
        return False


def _claim_of(lease: bytes) -> int:
    """The claim's id, which a lease contains."""
    return int.from_bytes(lease[3:11])
