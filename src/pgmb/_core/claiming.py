"""When the client claims and reads in one statement: `statements.claim` in place of `statements.receive`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple
from uuid import UUID

from pgmb._core import chance, statements, wire
from pgmb._core.lease import LeaseNumbers
from pgmb._core.statements import Statement
from pgmb.types import Duration, Source

_SEGMENT_BITS: Final = 40
_TOKEN_BITS: Final = 40
_FIRST_NUMBERS: Final = 4096
"""Of a segment; left to `receive`: planned on a table of a few pages, the statement would scan all of it
when it has grown."""
_MOST_TO_PASS: Final = 256
_MOST_KNOWN: Final = 1000
"""Queues or segments that a client remembers."""


class Known:
    """What a client remembers of one installation.

    Another one counts its queues and segments from one as well: a database that was dropped and created
    again under its name, for example.
    """

    def __init__(self, installation: UUID | None) -> None:
        self.installation = installation
        self.sources: dict[int, Source] = {}
        """By queue id, which is never used again: the stream behind it is fixed."""
        self.timed: dict[str, bool] = {}
        """Whether a queue reads by an SQL condition."""
        self.claiming: dict[str, Claiming] = {}
        self.salts: dict[int, int] = {}
        """Of streams, by their segments: a stream that is dropped and created again has other segments."""

    def make_room(self) -> None:
        """Forget all if there is much: queues come and go, and a client may live for months."""
        for known in (self.sources, self.timed, self.claiming, self.salts):
            if len(known) >= _MOST_KNOWN:
                known.clear()


class Claim(NamedTuple):
    """A statement that claims, and what is known of the lease that it makes."""

    statement: Statement
    lease: LeaseNumbers
    limit: int
    lease_for: Duration | None
    opens: bool


class _Place(NamedTuple):
    """Where a lease ended. Threads replace it as a whole: `start` must be of the lease that `claim` made."""

    segment: int
    claim: int
    start: int
    """The last event."""
    ends: bool
    """The batch ended there."""


class Claiming:
    """What is known of one queue, and whether the next receive is likely to be one that the statement can do.

    After a full lease there is more, most likely: the batch goes on. After another lease the batch has ended,
    most likely, with the last event: the next one begins after that. A refusal corrects the guess. Each
    further one in a row doubles the number of receives that do not try.
    """

    def __init__(self, queue: int, stream: int | None) -> None:
        """`stream`: the id of the queue's stream; None where this client can not claim by itself."""
        self.queue = queue
        """Its id, which a queue that is created again under the same name does not have."""
        self._stream = stream
        self._place: _Place | None = None
        self._full_ends = False
        """Whether batches end with a full lease."""
        self._refusals = 0
        self._to_pass = 0

    def next(self, limit: int, lease_for: Duration | None, ack: UUID | None) -> Claim | None:
        """What to try; None: call `receive`."""
        # Threads share this: it is read once.
        stream, place = self._stream, self._place
        if stream is None or place is None or limit < 1:
            return None
        acked = None if ack is None else LeaseNumbers.of(ack.bytes)
        if acked is not None and acked.queue != self.queue:
            return None
        lease = LeaseNumbers(self.queue, place.claim, chance.bits(_TOKEN_BITS))
        statement = statements.claim(
            lease,
            limit,
            lease_for,
            acked,
            stream=stream,
            segment=place.segment,
            start=place.start,
            opens=place.ends,
        )
        return Claim(statement, lease, limit, lease_for, place.ends)

    def received(self, rows: Sequence[wire.Row], limit: int) -> None:
        """The rows of a lease that `statements.receive` made."""
        seq, attempt, lease = rows[-1][0], rows[-1][7], rows[-1][8]
        if self._to_pass:
            self._to_pass -= 1
        elif attempt == 1:
            self._go_on(LeaseNumbers.of(lease).claim, seq, ends=self._full_ends or len(rows) < limit)

    def claimed(self, claim: Claim, rows: Sequence[wire.Row]) -> LeaseNumbers | None:
        """The lease that the statement made, of claim 0 if there is nothing; None: look at `next` again."""
        made: int | None = rows[0][-1] if rows else None
        if made is None:
            place = self._place
            if not claim.opens and place is not None:
                self._full_ends = True
                self._place = place._replace(ends=True)
                return None
            self._place = None
            self._full_ends = False
            self._refusals += 1
            self._to_pass = min(1 << self._refusals, _MOST_TO_PASS) - 2
            return None
        self._refusals = 0
        if made:
            self._go_on(abs(made), rows[-1][0], ends=claim.opens and made > 0)
        return claim.lease._replace(claim=abs(made))

    def gave_back(self, queue: int) -> None:
        """Events of a queue, this one or another, are to be tried again."""
        if queue == self.queue:
            self.look()

    def look(self) -> None:
        """`receive` looks first for what is to be tried again."""
        self._place = None

    def _go_on(self, claim: int, seq: int, *, ends: bool) -> None:
        if seq % (1 << _SEGMENT_BITS) > _FIRST_NUMBERS:
            self._place = _Place(seq >> _SEGMENT_BITS, claim, seq, ends)
