"""Offsets: how far a query has come in each shard. Pure, and all that a plan depends on.

An offset at rest stands at a position, `done`: everything before it was read. Between two of them lies a
batch. A limit cuts a batch: then `batch` is the position where it ends, frozen until all of it is read, and
`seq` how far. `parts` says how the stretch that ended here was divided among tasks, so that a batch that is
run again, also after a restart with other settings, is divided the same.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from pgmb.types import Position

VERSION: Final = 2


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A stretch of numbers, lo < seq <= hi. A late one holds stragglers, which are found by their xids."""

    lo: int
    hi: int
    late: bool = False


class Mark(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far a query is in one shard."""

    done: str
    batch: str | None = None
    seq: int = 0
    # The highest number that an event of the batch can have.
    last: int = 0
    # Only events published at or after it: microseconds. What startingTimestamp said when the query began.
    since: int | None = None
    parts: list[Part] = []


class Stretch(msgspec.Struct, frozen=True):
    """What lies between two marks of a shard: the batch, and the parts of it."""

    after: Position
    upto: Position
    since: int | None
    parts: list[Part]


class Offset(msgspec.Struct, frozen=True):
    """A mark for each shard, by where it lives (`Home`)."""

    stream: str
    shards: dict[str, Mark]
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


def between(start: Mark, end: Mark) -> Stretch | None:
    """What to read from one mark to the next; None where nothing lies between."""
    if start == end:
        return None
    upto = start.batch or end.batch or end.done
    follows = end.done == upto if end.batch is None else (end.done, end.batch) == (start.done, upto)
    if not follows:
        raise ValueError(
            f"the offset {end.done} does not follow {start.done}: the checkpoint's offsets were changed"
        )
    return Stretch(Position.parse(start.done), Position.parse(upto), end.since, end.parts)
