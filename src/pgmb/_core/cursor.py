"""The cursor of a reader without a queue, and which of two positions is the later one."""

from __future__ import annotations

from typing import Final, Self

import msgspec

from pgmb._core.statements import Statement
from pgmb.types import Position

_LOOK: Final = (
    "select pgmb.tick(stream => %s::text),"
    " (select newest.position::text from pgmb.newest_tick(stream => %s::text) newest)"
)
_NEWEST_TICK: Final = "select newest.position::text from pgmb.newest_tick(stream => %s::text) newest"


class ReadCursor(msgspec.Struct, frozen=True):
    """How far a reader has come: it has all events before `start`, and those up to `scanned_to` before `end`.

    `str(cursor)` is short enough for a header, and `ReadCursor.parse` reads it back. A cursor at the end of a
    batch is written as a position.
    """

    start: Position
    end: Position | None = None
    """The end of the batch that is being read; None between two batches."""
    scanned_to: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        start, *rest = text.split("|")
        if not rest:
            return cls(Position.parse(start))
        end, _, seq = rest[0].rpartition("@")
        if len(rest) > 1 or not seq.isdecimal() or not seq.isascii():
            raise ValueError(f"invalid position: {text!r}")
        return cls(Position.parse(start), Position.parse(end), int(seq))

    @classmethod
    def of(cls, given: Position | ReadCursor | str) -> ReadCursor:
        """The cursor that a caller names by a position, a cursor or the text of one."""
        if isinstance(given, str):
            return cls.parse(given)
        return cls(given) if isinstance(given, Position) else given

    def at(self, seq: int) -> ReadCursor:
        """The cursor after the event with that seq in the same batch."""
        return ReadCursor(self.start, self.end, seq)

    def __str__(self) -> str:
        return str(self.start) if self.end is None else f"{self.start}|{self.end}@{self.scanned_to}"


def later(one: Position, other: Position) -> bool:
    """Whether `one` was taken after something happened that `other` does not know of.

    Snapshots of one server follow each other: either transactions beyond the earlier one's end have finished,
    or some that were under way.
    """
    if one.epoch != other.epoch:
        return one.epoch > other.epoch
    _, end, unfinished = one.snapshot.split(":")
    _, other_end, other_unfinished = other.snapshot.split(":")
    if end != other_end:
        return int(end) > int(other_end)
    return _count(unfinished) < _count(other_unfinished)


def _count(listed: str) -> int:
    return listed.count(",") + 1 if listed else 0


def look(stream: str) -> Statement:
    """Tick, and say what the newest tick was before. Where nothing happened it takes no transaction id."""
    return Statement(_LOOK, (stream, stream))


def newest_tick(stream: str) -> Statement:
    """The position of the newest tick of any process. Works on a replica too."""
    return Statement(_NEWEST_TICK, (stream,))
