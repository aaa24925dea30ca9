"""What was read lately, kept in memory for readers that come back. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

from pgmb.server.sse import frame
from pgmb.server.sse.interest import Document, Interest, Question
from pgmb.server.sse.log import Tick
from pgmb.server.sse.mark import Mark
from pgmb.types import Event

_MOST_EVENTS: Final = 20_000
_MOST_BYTES: Final = 16 << 20
_MOST_BATCHES: Final = 5_000
_MOST_INTERESTS: Final = 64
_END: Final = 1 << 63


class Entry:
    """An event with its place. It is written out once, however many read it."""

    __slots__ = ("_named", "_plain", "document", "event", "mark")

    def __init__(self, event: Event, mark: Mark) -> None:
        self.event = event
        self.mark = mark
        self.document = Document(event)
        self._plain: bytes | None = None
        self._named: bytes | None = None

    def frame(self, named: bool) -> bytes:
        """As bytes; named: under its topic."""
        if named:
            if self._named is None:
                data = frame.document(self.event)
                self._named = frame.frame(data, id=str(self.mark), event=frame.name(self.event.topic))
            return self._named
        if self._plain is None:
            self._plain = frame.frame(frame.document(self.event), id=str(self.mark))
        return self._plain


class Batch:
    """The events between two ticks, as far as they were read."""

    def __init__(self, done: Tick, upto: Tick) -> None:
        self.done = done
        self.upto = upto
        self.begin = done.mark()
        self.mark = done.mark(upto)
        self.entries: list[Entry] = []
        self.passing: dict[Question, set[int]] = {}
        self.size = 0
        self.complete = False
        self._matching: dict[Interest, list[Entry] | None] = {}

    def matching(self, interest: Interest, after: int = 0) -> list[Entry] | None:
        """Those with a higher number that a reader asks for; None if nobody asked by its filter then."""
        if interest in self._matching:
            found = self._matching[interest]
        else:
            found = self._found(interest)
            if self.complete and len(self._matching) < _MOST_INTERESTS:
                # Readers come back in crowds, and many ask for the same.
                self._matching[interest] = found
        if found is None or not after:
            return found
        return [entry for entry in found if entry.event.seq > after]

    def _found(self, interest: Interest) -> list[Entry] | None:
        found = self.entries
        if interest.question is not None and found:
            passed = self.passing.get(interest.question)
            if passed is None:
                return None
            found = [entry for entry in found if entry.event.seq in passed]
        return [entry for entry in found if interest.matches(entry.event, entry.document)]


class Recent:
    """Batches that follow each other, the newest ones."""

    def __init__(self, at: Tick, most: int = _MOST_EVENTS, most_bytes: int = _MOST_BYTES) -> None:
        self.at = at
        """The tick that all before the batch under way was read up to."""
        self._batches: deque[Batch] = deque()
        self._most = most
        self._most_bytes = most_bytes
        self._events = 0
        self._size = 0

    @property
    def mark(self) -> Mark:
        """Where a reader stands that has all that was read."""
        if self._batches and self._batches[-1].upto is not self.at:
            under_way = self._batches[-1]
            last = under_way.entries[-1].event.seq if under_way.entries else 0
            return under_way.mark._replace(seq=last)
        return self.at.mark()

    def begin(self, upto: Tick) -> None:
        """A batch, from where the last one ended."""
        self._batches.append(Batch(self.at, upto))

    def add(self, events: Iterable[Event], passing: Mapping[Question, set[int]]) -> list[Entry]:
        """A page of the batch under way."""
        batch = self._batches[-1]
        added = [Entry(event, batch.mark._replace(seq=event.seq)) for event in events]
        size = sum(len(entry.event.raw) + 300 for entry in added)
        batch.entries.extend(added)
        batch.size += size
        for question, passed in passing.items():
            # Asked for the first time in the middle of a batch: of what came before nothing is known.
            if question in batch.passing or len(batch.entries) == len(added):
                batch.passing.setdefault(question, set()).update(passed)
        self._events += len(added)
        self._size += size
        return added

    def end(self) -> None:
        """The batch is read to its end."""
        batch = self._batches[-1]
        batch.complete = True
        self.at = batch.upto
        while len(self._batches) > 1 and (
            self._events > self._most or self._size > self._most_bytes or len(self._batches) > _MOST_BATCHES
        ):
            gone = self._batches.popleft()
            self._events -= len(gone.entries)
            self._size -= gone.size

    def _read_up_to(self, batch: Batch) -> int:
        if batch.upto is self.at or batch is not self._batches[-1]:
            return _END
        return batch.entries[-1].event.seq if batch.entries else 0

    def since(self, mark: Mark, interest: Interest) -> list[Entry] | None:
        """What a reader missed that comes back with a mark; None if memory does not hold it."""
        if mark.epoch != self.at.position.epoch:
            return None
        missed: list[Entry] = []
        whole = mark._replace(seq=0)
        if mark.done != mark.batch:
            batches = list(self._batches)
            for place, batch in enumerate(batches):
                if batch.mark == whole:
                    rest = batch.matching(interest, mark.seq)
                    later = batches[place + 1 :]
                    break
            else:
                return None
            if rest is None or mark.seq > self._read_up_to(batch):
                # It is ahead of what was read here.
                return None
            missed.extend(rest)
        else:
            later = list(self._batches)
            while later and later[0].begin != whole:
                del later[0]
            if not later:
                return [] if whole == self.at.mark() else None
        for batch in later:
            found = batch.matching(interest)
            if found is None:
                return None
            missed.extend(found)
        return missed
