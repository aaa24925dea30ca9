"""A task's rows as events: record batches, derived ids, and a digest to compare two runs of a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import sha256
from importlib import import_module
from typing import Any, Final, cast

import numpy as np
import pyarrow
import pyarrow.compute
from numpy.typing import NDArray

from pgmb.errors import InvalidArgument
from pgmb.spark.sink.columns import Columns

# The stubs of pyarrow are incomplete.
pa: Any = pyarrow
pc: Any = pyarrow.compute

Step = Callable[["dict[str, Any]", int, int], None]
"""Is shown the columns of each batch, how many rows went before and how many these are; may add columns."""


class EventBatches:
    """Converts a task's batches to events, lazily.

    events   the number of events so far
    """

    def __init__(self, batches: Iterator[Any], columns: Columns, *extras: Step) -> None:
        self.events = 0
        self._batches = self._made(batches, columns, extras)
        self._first = next(self._batches, None)
        self._error: BaseException | None = None

    @property
    def empty(self) -> bool:
        return self._first is None

    def stream(self) -> Any:
        """All batches, for ADBC."""
        schema = pa.schema([]) if self._first is None else self._first.schema
        return pa.RecordBatchReader.from_batches(schema, self._guarded())

    def drain(self) -> None:
        """Consume all batches: digests and counts need every row."""
        for _ in self._guarded():
            pass

    def raise_own(self) -> None:
        """Raise the error of an iteration, which ADBC replaces by one of its own."""
        if self._error is not None:
            raise self._error

    def _guarded(self) -> Iterator[Any]:
        try:
            first, self._first = self._first, None
            if first is not None:
                yield first
                del first
            yield from self._batches
        except GeneratorExit:
            raise
        except BaseException as error:
            self._error = error
            raise

    def _made(self, batches: Iterator[Any], columns: Columns, extras: tuple[Step, ...]) -> Iterator[Any]:
        for batch in batches:
            if not len(batch):
                continue
            events = columns.events(batch)
            for extra in extras:
                extra(events, self.events, len(batch))
            self.events += len(batch)
            yield pa.record_batch(list(events.values()), names=list(events))


_MOST_ROWS = 2**40


class EventIds:
    """Gives the events of a task ids (UUIDs, version 8) derived from application, version, task and row.

    A repeated task gives its events the same ids.
    """

    def __init__(self, app: str, version: int | None, task: int) -> None:
        first = bytearray(sha256(f"{app}\0{version}\0{task}".encode()).digest()[:16])
        first[6] = first[6] & 0x0F | 0x80
        first[8] = first[8] & 0x3F | 0x80
        self._first = np.frombuffer(bytes(first), np.uint8)

    def __call__(self, events: dict[str, Any], before: int, rows: int) -> None:
        if before + rows > _MOST_ROWS:
            raise OverflowError(f"a task of more than {_MOST_ROWS} rows")
        ids = np.tile(self._first, (rows, 1))
        numbers = np.arange(before, before + rows, dtype=">u8").view(np.uint8).reshape(rows, 8)
        ids[:, 11:] = numbers[:, 3:]
        events["id"] = pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(16), rows, [None, pa.py_buffer(ids.tobytes())]
        )


_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)
_TEXT_COLUMNS: Final = ("topic", "key", "payload", "headers")


class Digest:
    """The sum of the events' hashes, which does not depend on their order or batches."""

    def __init__(self) -> None:
        # Imported here because it is slow, and only this needs it.
        self._sum, self._util = 0, cast("Any", import_module("pandas.util"))

    def __call__(self, events: dict[str, Any], before: int, rows: int) -> None:
        """Add a batch."""
        texts = [events[name] for name in _TEXT_COLUMNS if name in events]
        joined = pc.binary_join_element_wise(*texts, "\x1f", null_handling="replace", null_replacement="\x1e")
        try:
            whole = joined.to_numpy(zero_copy_only=False)
        except pa.ArrowException as error:
            raise _not_utf8(events) from error
        hashes: NDArray[np.uint64] = self._util.hash_array(whole, categorize=False)
        if "id" in events:
            ids = pc.fill_null(events["id"], bytes(16)).buffers()[1]
            words = np.frombuffer(ids, np.uint64, 2 * rows).reshape(rows, 2)
            hashes = _mix(_mix(hashes, words[:, 0]), words[:, 1])
        if "due_at" in events:
            due = pc.fill_null(events["due_at"].cast("int64"), 0).to_numpy()
            hashes = _mix(hashes, due.astype(np.uint64))
        self._sum = (self._sum + int(hashes.sum(dtype=np.uint64))) % 2**64

    @property
    def value(self) -> int:
        """The digest as a signed 64-bit integer."""
        return self._sum - 2**64 if self._sum >= 2**63 else self._sum


def _not_utf8(events: dict[str, Any]) -> InvalidArgument:
    """What the server would say of such strings, if they came that far."""
    for name in _TEXT_COLUMNS:
        try:
            if name in events:
                events[name].validate(full=True)
        except pa.ArrowInvalid as error:
            return InvalidArgument(f"strings of events must be UTF-8: {error}; column {name}")
    return InvalidArgument("strings of events must be UTF-8")


def _mix(hashes: NDArray[np.uint64], words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed = (hashes ^ (words * _MULTIPLIER)) * _MULTIPLIER
    return mixed ^ (mixed >> np.uint64(29))
