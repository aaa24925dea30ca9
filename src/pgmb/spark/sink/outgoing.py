"""The rows of one task on their way out as events: counted, and never more than a batch of them in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from pgmb.spark.sink.columns import Columns

Extra = Callable[["dict[str, Any]", int, int], None]
"""Is shown the columns of each batch, how many rows went before and how many these are; may add columns."""


class Outgoing:
    """Events made of a task's batches, when asked for.

    events   how many there were so far
    """

    def __init__(self, batches: Iterator[Any], columns: Columns, *extras: Extra) -> None:
        self.events = 0
        self._batches = self._made(batches, columns, extras)
        self._first = next(self._batches, None)
        self._error: BaseException | None = None

    @property
    def empty(self) -> bool:
        return self._first is None

    def stream(self) -> Any:
        """All of them, as ADBC takes them."""
        schema = pa.schema([]) if self._first is None else self._first.schema
        return pa.RecordBatchReader.from_batches(schema, self._guarded())

    def drain(self) -> None:
        """Looks at all of them and lets them go."""
        for _ in self._guarded():
            pass

    def raise_own(self) -> None:
        """Raises what went wrong here, which the database's driver reports as an error of its own."""
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

    def _made(self, batches: Iterator[Any], columns: Columns, extras: tuple[Extra, ...]) -> Iterator[Any]:
        for batch in batches:
            if not len(batch):
                continue
            events = columns.events(batch)
            for extra in extras:
                extra(events, self.events, len(batch))
            self.events += len(batch)
            yield pa.record_batch(list(events.values()), names=list(events))
