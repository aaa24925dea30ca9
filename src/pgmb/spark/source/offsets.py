"""Offsets: how far a query has come in each shard. Pure, and all that a plan depends on.

An offset normally stands at a position, `from_position`: everything before it was read. Between two such
positions lies a batch. A limit may cut a batch: then `to_position` is where the batch ends, which stays the
same until all of it is read, and `seq` is how far it was read. `ranges` records how the events that end here
were divided among tasks, so that a repeated batch is divided the same, even after a restart with other
settings.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from pgmb.types import Position

VERSION: Final = 2
SEGMENT_BITS: Final = 40
"""The seq above these bits is the number of the segment."""


class SeqRange(msgspec.Struct, frozen=True, array_like=True):
    """The events with lo < seq <= hi. A late range has events that committed late, found by their xids."""

    lo: int
    hi: int
    late: bool = False


class ShardOffset(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far a query has come in one shard. The names in checkpoints are short, and must stay."""

    from_position: str = msgspec.field(name="done")
    to_position: str | None = msgspec.field(default=None, name="batch")
    seq: int = 0
    # The highest seq that an event of the batch can have.
    last: int = 0
    # Only events published at or after this time, in microseconds: startingTimestamp when the query began.
    since: int | None = None
    ranges: list[SeqRange] = msgspec.field(default=[], name="parts")


class BatchRange(msgspec.Struct, frozen=True):
    """The events between two offsets of a shard, divided into ranges."""

    after: Position
    upto: Position
    since: int | None
    ranges: list[SeqRange]


class Offset(msgspec.Struct, frozen=True):
    """An offset per shard, by the cluster and database that it belongs to."""

    stream: str
    shards: dict[str, ShardOffset]
    v: int = VERSION

    @classmethod
    def parse(cls, given: dict[str, Any]) -> Offset:
        if given.get("v") != VERSION:
            raise ValueError(
                f"an offset of version {given.get('v')}: this pgmb reads version {VERSION}. "
                "Upgrade pgmb, or start with a new checkpoint"
            )
        try:
            return msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"not an offset of pgmb: {error}") from None

    def dump(self) -> dict[str, Any]:
        dumped: dict[str, Any] = msgspec.to_builtins(self)
        return dumped


def between(start: ShardOffset, end: ShardOffset) -> BatchRange | None:
    """The events from one offset to the next; None if there are none."""
    if start == end:
        return None
    upto = start.to_position or end.to_position or end.from_position
    follows = (
        end.from_position == upto
        if end.to_position is None
        else (end.from_position, end.to_position) == (start.from_position, upto)
    )
    if not follows:
        raise ValueError(
            f"the offset {end.from_position} does not follow {start.from_position}:"
            " the checkpoint's offsets were changed"
        )
    return BatchRange(Position.parse(start.from_position), Position.parse(upto), end.since, end.ranges)
