"""Converts Arrow batches of the log to those for Spark: derived ids, and columns constant in a batch."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow
import pyarrow.compute
from numpy.typing import NDArray

# The stubs of pyarrow are incomplete.
pa: Any = pyarrow
pc: Any = pyarrow.compute

_HEX: Final = np.array([int.from_bytes(b"%02x" % byte, "little") for byte in range(256)], dtype="<u2")
_MAX_MILLIS: Final = (1 << 48) - 1


class Rows:
    """Converts record batches of the log to a schema of `arrow_schema`."""

    def __init__(self, schema: Any, stream: str, position: str, salt: int) -> None:
        self._schema, self._salt = schema, salt
        self._same = {"stream": stream, "position": position}
        self._repeated: dict[str, Any] = {}

    def of(self, batch: Any) -> Any:
        """The events as Spark sees them."""
        return pa.RecordBatch.from_arrays(
            [self._column(name, batch) for name in self._schema.names], schema=self._schema
        )

    def _column(self, name: str, batch: Any) -> Any:
        if name in self._same:
            return self._repeat(name, batch.num_rows)
        if name == "id":
            return self._ids(batch)
        column = batch.column(name)
        # json is an extension type over text.
        return column.storage if isinstance(column, pa.ExtensionArray) else column

    def _repeat(self, name: str, rows: int) -> Any:
        made = self._repeated.get(name)
        if made is None or len(made) < rows:
            made = self._repeated[name] = pa.repeat(pa.scalar(self._same[name]), rows)
        return made.slice(0, rows)

    def _ids(self, batch: Any) -> Any:
        given = batch.column("id")
        given = given.storage if isinstance(given, pa.ExtensionArray) else given
        if pa.types.is_string(given.type):
            # Of the lake, whose ids are complete.
            return given
        if given.null_count == 0:
            return uuid_texts(_bytes_of(given))
        derived = uuid_texts(derived_ids(batch.column("seq"), batch.column("published_at"), self._salt))
        if given.null_count == len(given):
            return derived
        return pc.if_else(pc.is_null(given), derived, uuid_texts(_bytes_of(given.fill_null(bytes(16)))))


def derived_ids(seq: Any, published_at: Any, salt: int) -> NDArray[np.uint8]:
    """The ids of events published without one, 16 bytes each, as the SQL function `derive_id` makes them."""
    micros = published_at.cast(pa.int64()).to_numpy(zero_copy_only=False)
    # In floating point and rounded, as the server does.
    millis = np.clip(np.rint(micros / 1e6 * 1000.0), 0, _MAX_MILLIS).astype(np.uint64)
    numbers = seq.to_numpy(zero_copy_only=False).astype(np.uint64)
    pair = np.empty((len(numbers), 2), dtype=">u8")
    pair[:, 0] = (millis << np.uint64(16)) | np.uint64(0x7000 | (salt & 0xFFF))
    pair[:, 1] = ((numbers + np.uint64(salt)) & np.uint64((1 << 62) - 1)) | np.uint64(1 << 63)
    return pair.view(np.uint8).reshape(-1, 16)


def uuid_texts(ids: NDArray[np.uint8]) -> Any:
    """UUIDs as text."""
    rows = len(ids)
    digits = _HEX[ids].view(np.uint8).reshape(rows, 32)
    text = np.full((rows, 36), ord("-"), dtype=np.uint8)
    for column, start, end in ((0, 0, 8), (9, 8, 12), (14, 12, 16), (19, 16, 20), (24, 20, 32)):
        text[:, column : column + end - start] = digits[:, start:end]
    offsets = np.arange(0, 36 * rows + 1, 36, dtype=np.int32)
    return pa.StringArray.from_buffers(rows, pa.py_buffer(offsets.data), pa.py_buffer(text.data))


def _bytes_of(ids: Any) -> NDArray[np.uint8]:
    whole: NDArray[np.uint8] = np.frombuffer(memoryview(ids.buffers()[1] or b""), dtype=np.uint8)
    return whole.reshape(-1, 16)[ids.offset : ids.offset + len(ids)]
