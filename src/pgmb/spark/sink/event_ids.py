"""Ids by which those who read events can tell that one was published again."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import numpy as np
import pyarrow

pa: Any = pyarrow

_ROWS = 2**40


class EventIds:
    """Gives the events of a task ids (UUIDs of version 8) made of application, version, task and row."""

    def __init__(self, app: str, version: int | None, task: int) -> None:
        first = bytearray(sha256(f"{app}\0{version}\0{task}".encode()).digest()[:16])
        first[6] = first[6] & 0x0F | 0x80
        first[8] = first[8] & 0x3F | 0x80
        self._first = np.frombuffer(bytes(first), np.uint8)

    def __call__(self, events: dict[str, Any], before: int, rows: int) -> None:
        if before + rows > _ROWS:
            raise OverflowError(f"a task of more than {_ROWS} rows")
        ids = np.tile(self._first, (rows, 1))
        numbers = np.arange(before, before + rows, dtype=">u8").view(np.uint8).reshape(rows, 8)
        ids[:, 11:] = numbers[:, 3:]
        events["id"] = pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(16), rows, [None, pa.py_buffer(ids.tobytes())]
        )
