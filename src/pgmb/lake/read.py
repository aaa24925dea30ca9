"""Events of the lake between two positions: what the log gave for the same range, before it was dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow
import pyarrow.compute
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from pgmb.errors import ForeignTable, VerificationFailed
from pgmb.lake.delta import KnownFile, files_within, listed_files, overlapping
from pgmb.lake.storage import Storage
from pgmb.lake.task import Bounds, DamagedError, in_order
from pgmb.spark.source.offsets import SEGMENT_BITS
from pgmb.types import Event, Position, Source

# The stubs of pyarrow are incomplete.
pa: Any = pyarrow
pc: Any = pyarrow.compute

_REBASED: Final = 3
"""The xid of events before a rebase, as the log has it."""
_LAST: Final = 1 << 62
_EPOCH_OFFSET: Final = 946_684_800_000_000
"""From 1970 to 2000, in microseconds."""


class LakeRange(msgspec.Struct, frozen=True):
    """The events of a segment with lo < seq <= hi in the table at a URL.

    current   whether their xids are of the present epoch
    version   of the table, in which the segment was verified: an older one may lack it
    events    how many the whole segment has; None: not to be checked
    """

    url: str
    lo: int
    hi: int
    current: bool
    version: int = 0
    segment: int = 0
    events: int | None = None


class _Opened(NamedTuple):
    """A table, and its files as Arrow columns."""

    storage: Storage
    version: int
    files: Any


class LakeEvents:
    """Reads ranges of events. Opens each table once.

    matches   which of these topics are wanted; None: all
    """

    def __init__(
        self,
        after: Position,
        upto: Position,
        *,
        since: int | None = None,
        until: int | None = None,
        matches: Callable[[list[str]], set[str]] | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        self._after, self._upto = _Snapshot(after.snapshot), _Snapshot(upto.snapshot)
        self._since, self._until, self._options = since, until, options
        self._matches = matches
        self._wanted: dict[str, bool] = {}
        self._tables: dict[str, _Opened] = {}

    def read(self, asked: LakeRange) -> Iterator[Any]:
        """The events in the order of seq, with the columns of a file.

        Holds one batch of each file whose events overlap, whatever the size of the segment. Raises
        VerificationFailed if files are missing or damaged, or do not have all events of the segment.
        """
        seen, rest = 0, asked
        while True:
            opened = self._table(asked.url, asked.version)
            bounds = self._bounds(rest)
            try:
                for events in self._events(opened, rest, bounds):
                    mask = self._mask(events, rest)
                    seen += mask.inside
                    kept = events.filter(mask.wanted)
                    if kept.num_rows:
                        yield kept
                    rest = msgspec.structs.replace(rest, lo=max(rest.lo, events.column("seq")[-1].as_py()))
                break
            except DamagedError as damaged:
                # An erasure, or vacuum, removes files that a newer version of the table has replaced.
                del self._tables[asked.url]
                if self._table(asked.url, asked.version).version > opened.version:
                    continue
                lost = VerificationFailed(f"the table at {asked.url} cannot be read: {damaged}")
                lost.advise("Restore the file. If the log still has its segment: pgmb lake archive --repair.")
                raise lost from damaged
        inside = files_within(opened.files, asked.lo, asked.hi)
        bounds = self._bounds(asked)
        if asked.events is not None and self._is_whole(asked, bounds, inside) and seen != asked.events:
            short = VerificationFailed(
                f"segment {asked.segment} was archived with {asked.events} events,"
                f" and the table at {asked.url} has {seen}"
            )
            short.advise("Bring back the files, or the version of the table, that were removed.")
            raise short

    def _events(self, opened: _Opened, asked: LakeRange, bounds: Bounds) -> Iterator[Any]:
        """The events of the files that may have some within bounds, in the order of seq."""
        wanted = [
            file
            for file in files_within(opened.files, asked.lo, asked.hi)
            if file.highest_xid >= bounds.lowest_xid
            and file.lowest_xid <= bounds.highest_xid
            and (self._since is None or file.last_at >= self._since)
            and (self._until is None or file.first_at < self._until)
        ]
        files = opened.storage.files()
        for group in overlapping(wanted):
            yield from in_order(files, [file.path for file in group], bounds)

    def _bounds(self, asked: LakeRange) -> Bounds:
        xids = (self._after.xmin, self._upto.xmax - 1) if asked.current else (0, _LAST)
        return Bounds(asked.lo, asked.hi, *xids, -_LAST if self._since is None else self._since)

    def _is_whole(self, asked: LakeRange, bounds: Bounds, files: list[KnownFile]) -> bool:
        """Whether every event of the segment was read: nothing of it was left out by the bounds."""
        return (
            asked.lo == (asked.segment << SEGMENT_BITS) - 1
            and self._since is None
            and self._until is None
            and all(
                bounds.lowest_xid <= file.lowest_xid and file.highest_xid <= bounds.highest_xid
                for file in files
            )
        )

    def _table(self, url: str, version: int) -> _Opened:
        opened = self._tables.get(url)
        if opened is None or opened.version < version:
            storage = Storage.at(url, self._options)
            try:
                table = DeltaTable(storage.url, storage_options=storage.options)
            except TableNotFoundError as error:
                gone = ForeignTable(f"there is no table at {url}, where events of this stream are archived")
                gone.advise(
                    "Give this machine access to the storage, or read with tier=log what the log has."
                )
                raise gone from error
            if table.version() < version:
                older = ForeignTable(
                    f"the table at {url} is at version {table.version()}, and version {version} was verified"
                )
                older.advise("The table was replaced or restored. Bring its newer version back.")
                raise older
            opened = _Opened(storage, table.version(), listed_files(table))
            self._tables[url] = opened
        return opened

    def _mask(self, events: Any, asked: LakeRange) -> _Mask:
        seqs = events.column("seq").to_numpy(zero_copy_only=False)
        mask = (seqs > asked.lo) & (seqs <= asked.hi)
        inside = int(mask.sum())
        xids = (
            events.column("xid").to_numpy(zero_copy_only=False)
            if asked.current
            else np.full(len(seqs), _REBASED, dtype=np.int64)
        )
        mask &= self._upto.shows(xids) & ~self._after.shows(xids)
        if self._since is not None or self._until is not None:
            at = events.column("published_at").cast(pa.int64()).to_numpy(zero_copy_only=False)
            if self._since is not None:
                mask &= at >= self._since
            if self._until is not None:
                mask &= at < self._until
        if self._matches is not None:
            mask &= self._topics(events.column("topic"), self._matches)
        return _Mask(inside, pa.array(mask))

    def _topics(self, topics: Any, matches: Callable[[list[str]], set[str]]) -> Any:
        """Topics are few: each is looked at once."""
        coded = topics.dictionary_encode()
        names = coded.dictionary.to_pylist()
        if strange := [name for name in names if name not in self._wanted]:
            wanted = matches(strange)
            self._wanted |= {name: name in wanted for name in strange}
        known = np.array([self._wanted[name] for name in names], dtype=bool)
        return known[coded.indices.to_numpy(zero_copy_only=False)]


class _Snapshot:
    """Which transactions a snapshot shows: those below xmin, and those below xmax that it does not list."""

    def __init__(self, text: str) -> None:
        xmin, xmax, listed = text.split(":")
        self.xmin, self.xmax = int(xmin), int(xmax)
        self._running = np.array([int(xid) for xid in listed.split(",") if xid], dtype=np.int64)

    def shows(self, xids: Any) -> Any:
        return (xids < self.xmin) | ((xids < self.xmax) & ~np.isin(xids, self._running))


class _Mask(NamedTuple):
    """How many events lie in a range, and which of them are wanted."""

    inside: int
    wanted: Any


def events_of(rows: Any, source: Source) -> list[Event]:
    """Rows as the client has events."""
    return [
        Event(seq, bytes.fromhex(id.replace("-", "")), topic, key, payload, headers, at, 1, source)
        for seq, id, topic, key, payload, headers, at in zip(
            rows.column("seq").to_pylist(),
            rows.column("id").to_pylist(),
            rows.column("topic").to_pylist(),
            rows.column("key").to_pylist(),
            rows.column("payload").cast(pa.binary()).to_pylist(),
            rows.column("headers").cast(pa.binary()).to_pylist(),
            pc.subtract(rows.column("published_at").cast(pa.int64()), _EPOCH_OFFSET).to_pylist(),
            strict=True,
        )
    ]
