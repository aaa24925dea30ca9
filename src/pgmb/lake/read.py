"""Events of the lake between two positions: what the log gave for the same range, before it was dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow
import pyarrow.compute
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from pgmb.errors import ForeignTable
from pgmb.lake.storage import Storage
from pgmb.lake.table import files_of
from pgmb.lake.task import in_order
from pgmb.types import Position

# The stubs of pyarrow are incomplete.
pa: Any = pyarrow
pc: Any = pyarrow.compute

_BEGIN: Final = datetime(1970, 1, 1, tzinfo=UTC)
_REBASED: Final = 3
"""The xid of events before a rebase, as the log has it."""


class LakeRange(msgspec.Struct, frozen=True):
    """The events of a segment with lo < seq <= hi in the table at a URL.

    current   whether their xids are of the present epoch
    """

    url: str
    lo: int
    hi: int
    current: bool


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
        self._tables: dict[str, tuple[Storage, DeltaTable]] = {}

    def read(self, asked: LakeRange) -> Iterator[Any]:
        """The events in the order of seq, with the columns of a file."""
        storage, table = self._table(asked.url)
        files = storage.files()
        known = files_of(table, asked.lo, asked.hi, _moment(self._since), _moment(self._until))
        for events in in_order(files, [file.path for file in known], asked.lo, asked.hi):
            kept = events.filter(self._mask(events, asked))
            if kept.num_rows:
                yield kept

    def _table(self, url: str) -> tuple[Storage, DeltaTable]:
        if url not in self._tables:
            storage = Storage.at(url, self._options)
            try:
                table = DeltaTable(storage.url, storage_options=storage.options)
            except TableNotFoundError as error:
                gone = ForeignTable(f"there is no table at {url}, where events of this stream are archived")
                gone.advise(
                    "Give this machine access to the storage, or read with tier=log what the log has."
                )
                raise gone from error
            self._tables[url] = storage, table
        return self._tables[url]

    def _mask(self, events: Any, asked: LakeRange) -> Any:
        seqs = events.column("seq").to_numpy(zero_copy_only=False)
        mask = (seqs > asked.lo) & (seqs <= asked.hi)
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
        return pa.array(mask)

    def _topics(self, topics: Any, matches: Callable[[list[str]], set[str]]) -> Any:
        """Topics are few: each is looked at once."""
        coded = topics.dictionary_encode()
        names = coded.dictionary.to_pylist()
        if strange := [name for name in names if name not in self._wanted]:
            wanted = matches(strange)
            self._wanted |= {name: name in wanted for name in strange}
        known = np.array([self._wanted[name] for name in names], dtype=bool)
        return known[coded.indices.to_numpy(zero_copy_only=False)]


def _moment(micros: int | None) -> datetime | None:
    return None if micros is None else _BEGIN + timedelta(microseconds=micros)


class _Snapshot:
    """Which transactions a snapshot shows: those below xmin, and those below xmax that it does not list."""

    def __init__(self, text: str) -> None:
        xmin, xmax, listed = text.split(":")
        self._xmin, self._xmax = int(xmin), int(xmax)
        self._running = np.array([int(xid) for xid in listed.split(",") if xid], dtype=np.int64)

    def shows(self, xids: Any) -> Any:
        return (xids < self._xmin) | ((xids < self._xmax) & ~np.isin(xids, self._running))
