"""A digest of a task's events by which another run of it can show that it holds the same."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final, cast

import numpy as np
import pyarrow.compute
from numpy.typing import NDArray

pc: Any = pyarrow.compute

_ODD: Final = np.uint64(0x9E3779B97F4A7C15)
_TEXTS: Final = ("topic", "key", "payload", "headers")


class Digest:
    """The sum of the events' hashes: the same in whichever order, and in whichever batches, they come."""

    def __init__(self) -> None:
        # Here, because it takes a while and only this needs it.
        self._sum, self._util = 0, cast("Any", import_module("pandas.util"))

    def __call__(self, events: dict[str, Any], before: int, rows: int) -> None:
        """Take in a batch."""
        texts = [events[name] for name in _TEXTS if name in events]
        whole = pc.binary_join_element_wise(
            *texts, "\x1f", null_handling="replace", null_replacement="\x1e"
        ).to_numpy(zero_copy_only=False)
        hashes: NDArray[np.uint64] = self._util.hash_array(whole, categorize=False)
        if "id" in events:
            ids = pc.fill_null(events["id"], bytes(16)).buffers()[1]
            words = np.frombuffer(ids, np.uint64, 2 * rows).reshape(rows, 2)
            hashes = _mixed(_mixed(hashes, words[:, 0]), words[:, 1])
        if "due_at" in events:
            due = pc.fill_null(events["due_at"].cast("int64"), 0).to_numpy()
            hashes = _mixed(hashes, due.astype(np.uint64))
        self._sum = (self._sum + int(hashes.sum(dtype=np.uint64))) % 2**64

    @property
    def value(self) -> int:
        """As a bigint."""
        return self._sum - 2**64 if self._sum >= 2**63 else self._sum


def _mixed(hashes: NDArray[np.uint64], words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed = (hashes ^ (words * _ODD)) * _ODD
    return mixed ^ (mixed >> np.uint64(29))
