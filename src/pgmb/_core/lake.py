"""Events that only the lake has, for readers of a stream. Arrow and Delta are imported when there are any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import msgspec

from pgmb._core.patterns import compiled
from pgmb.errors import MissingExtra
from pgmb.types import Event, LakeAccess, Position, Source

if TYPE_CHECKING:
    from pgmb.lake.read import LakeEvents

_OPEN: Final = 4
"""Readings whose files stay open for the next page."""

Matches: TypeAlias = Callable[[list[str]], set[str]]
"""Which of these topics are wanted."""


class LakeSegment(msgspec.Struct, frozen=True):
    """A segment that only the lake has, as pgmb.lake_between() tells it: its events with lo < seq <= hi."""

    segment: int
    url: str
    lake_version: int
    lo: int
    hi: int
    events: int
    current: bool


_decode: Final = msgspec.json.Decoder(LakeSegment).decode


class Place(NamedTuple):
    """Where a page begins."""

    stream: str
    after: Position
    upto: Position
    after_seq: int


def topics(patterns: Sequence[str]) -> Matches | None:
    """Which topics match one of the patterns; None: all."""
    if not patterns:
        return None
    matching = [compiled(pattern) for pattern in patterns]
    return lambda given: {topic for topic in given if any(one.fullmatch(topic) for one in matching)}


class LakeReading:
    """The events of some segments between two positions, page by page. `scanned_to`: how far it has come."""

    def __init__(self, events: LakeEvents, segments: Sequence[LakeSegment], source: Source) -> None:
        from pgmb.lake.read import LakeRange

        self._batches = (
            batch
            for one in segments
            for batch in events.read(
                LakeRange(one.url, one.lo, one.hi, one.current, one.lake_version, one.segment, one.events)
            )
        )
        self._batch: Any = None
        self._end = segments[-1].hi
        self._source = source
        self.scanned_to = segments[0].lo
        self.ended = False

    def page(self, limit: int) -> list[Event]:
        """The next events, at most `limit`, or fewer before the end: a page reads one batch of a file."""
        from pgmb.lake.read import events_of

        if self._batch is None:
            self._batch = next(self._batches, None)
        if self._batch is None:
            self.ended, self.scanned_to = True, self._end
            return []
        page, rest = self._batch.slice(0, limit), self._batch.slice(limit)
        self._batch = rest if rest.num_rows else None
        found = events_of(page, self._source)
        self.scanned_to = found[-1].seq
        return found


class LakePages:
    """Opens readings, and keeps those open that end between two pages: the next page goes on with it.

    since     leaves out events that were published earlier
    matches   leaves out events of other topics
    """

    def __init__(
        self,
        access: LakeAccess | None = None,
        since: datetime | None = None,
        matches: Matches | None = None,
    ) -> None:
        self._access, self._since, self._matches = access or LakeAccess(), since, matches
        self._open: dict[Place, LakeReading] = {}

    def take(self, place: Place) -> LakeReading | None:
        """The reading that goes on there. Nobody else has it, until it is kept again."""
        return self._open.pop(place, None)

    def keep(self, place: Place, reading: LakeReading) -> None:
        """Keep a reading for its next page."""
        if not reading.ended:
            self._open[place._replace(after_seq=reading.scanned_to)] = reading
            for oldest in list(self._open)[:-_OPEN]:
                self._open.pop(oldest, None)

    def begin(self, place: Place, told: Sequence[bytes]) -> LakeReading:
        """A reading of segments. Raises MissingExtra without what reads the lake."""
        segments = [_decode(one) for one in told]
        try:
            from pgmb.lake.read import LakeEvents
        except ImportError as error:
            missing = MissingExtra(
                f"events of stream {place.stream} are in the lake at {segments[0].url}, and the package"
                f" {error.name} to read it is not installed"
            )
            missing.advise('Run: pip install "pgmb[lake]". With lake=False only the log is read.')
            raise missing from error
        if self._access.url is not None:
            segments = [msgspec.structs.replace(one, url=self._access.url) for one in segments]
        since = None if self._since is None else round(self._since.timestamp() * 1_000_000)
        events = LakeEvents(
            place.after, place.upto, since=since, matches=self._matches, options=self._access.options
        )
        return LakeReading(events, segments, Source(place.stream, 0))
