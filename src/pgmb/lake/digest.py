"""The digest of events in Arrow: the same that `pgmb.digest_segment` computes in the database.

Blocks of events, see `BLOCK_BITS`, are hashed column by column: of each value its length (4 bytes, -1: null)
and its bytes, as PostgreSQL sends them, in network order. A payload or headers of more than 1,024 bytes count
by their SHA-256. A derived id counts as null, since the log does not store it. A block has the SHA-256 of its
columns' SHA-256s, and a segment that of its blocks, in order.
"""

from __future__ import annotations

import binascii
import hashlib
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow
import pyarrow.compute
from numpy.typing import NDArray

from pgmb.spark.source.offsets import SEGMENT_BITS
from pgmb.spark.source.rows import derived_ids, uuid_texts

# The stubs of pyarrow are incomplete.
pa: Any = pyarrow
pc: Any = pyarrow.compute

BLOCK_BITS: Final = 12
"""Events whose seq is the same above these bits are a block."""

_MOST_BYTES: Final = 1024
# Microseconds from 1970, as Arrow counts, to 2000, as PostgreSQL does.
_EPOCH: Final = 946_684_800_000_000
_NUMBER: Final = np.dtype([("length", ">i4"), ("value", ">i8")])
_COLUMNS: Final = ("seq", "xid", "published_at", "id", "topic", "key", "payload", "headers")
# Where the dashes of a UUID stand in its text.
_DASHES: Final = np.array([8, 13, 18, 23])


class Block(NamedTuple):
    """A block of events: its number is their seq above BLOCK_BITS."""

    number: int
    events: int
    digest: bytes


Encoded: TypeAlias = tuple[memoryview, NDArray[Any]]
"""Bytes, and where those of each event begin."""


class Digested(NamedTuple):
    """A segment: how many events, and their digest."""

    events: int
    digest: bytes


class BlockDigests:
    """The digests of the blocks of events that are added in the order of seq."""

    def __init__(self, salt: int) -> None:
        self._salt = salt
        self._done: list[Block] = []
        self._number: int | None = None
        self._events = 0
        self._hashes = _hashes()

    def add(self, batch: Any) -> None:
        """Add a record batch, or a table, of events."""
        if batch.num_rows == 0:
            return
        if isinstance(batch, pa.Table):
            for part in batch.combine_chunks().to_batches():
                self.add(part)
            return
        blocks = _numbers(batch.column("seq")) >> BLOCK_BITS
        columns = encode(batch, self._salt)
        bounds = [0, *(np.flatnonzero(np.diff(blocks)) + 1).tolist(), len(blocks)]
        for start, end in pairwise(bounds):
            if (number := int(blocks[start])) != self._number:
                self._close()
                self._number = number
            for hashed, (data, offsets) in zip(self._hashes, columns, strict=True):
                hashed.update(data[int(offsets[start]) : int(offsets[end])])
            self._events += end - start

    def blocks(self) -> list[Block]:
        """The blocks so far. Nothing can be added afterwards."""
        self._close()
        return self._done

    def _close(self) -> None:
        if self._number is not None:
            joined = b"".join(hashed.digest() for hashed in self._hashes)
            self._done.append(Block(self._number, self._events, hashlib.sha256(joined).digest()))
        self._number, self._events, self._hashes = None, 0, _hashes()


def _hashes() -> list[Any]:
    return [hashlib.sha256() for _ in _COLUMNS]


def segments(blocks: Iterable[Block]) -> Mapping[int, Digested]:
    """The digests of segments, from those of their blocks. A block that comes twice changes the digest."""
    found: dict[int, list[Block]] = {}
    for block in sorted(blocks):
        found.setdefault(block.number >> (SEGMENT_BITS - BLOCK_BITS), []).append(block)
    return {
        number: Digested(
            sum(block.events for block in its),
            hashlib.sha256(b"".join(block.digest for block in its)).digest(),
        )
        for number, its in found.items()
    }


EMPTY: Final = Digested(0, hashlib.sha256().digest())
"""A segment without events."""


def encode(batch: Any, salt: int) -> list[Encoded]:
    """What is hashed of events, column by column."""
    return [_encoded(batch, name, salt) for name in _COLUMNS]


def _encoded(batch: Any, name: str, salt: int) -> Encoded:
    if name in ("seq", "xid", "published_at"):
        values = _numbers(batch.column(name).cast(pa.int64()))
        fixed = np.empty(len(values), dtype=_NUMBER)
        fixed["length"], fixed["value"] = 8, values - _EPOCH if name == "published_at" else values
        return memoryview(fixed.tobytes()), np.arange(0, fixed.nbytes + 1, fixed.itemsize)
    column = _ids(batch, salt) if name == "id" else batch.column(name).cast(pa.binary())
    if name in ("payload", "headers"):
        column = _shortened(column)
    lengths = _numbers(pc.fill_null(pc.binary_length(column), -1)).astype(">i4")
    joined = pc.binary_join_element_wise(
        _pieces(lengths), column, pa.scalar(b"", pa.binary()), null_handling="replace", null_replacement=""
    )
    _, offsets, data = joined.buffers()
    found: NDArray[np.int32] = np.frombuffer(offsets, dtype=np.int32)
    return memoryview(data), found[joined.offset : joined.offset + len(joined) + 1]


def _numbers(column: Any) -> NDArray[np.int64]:
    return column.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _pieces(fixed: NDArray[Any]) -> Any:
    """Values of one size as a binary array."""
    size = fixed.dtype.itemsize
    offsets = np.arange(0, size * len(fixed) + 1, size, dtype=np.int32)
    return pa.Array.from_buffers(
        pa.binary(), len(fixed), [None, pa.py_buffer(offsets.data), pa.py_buffer(fixed.tobytes())]
    )


def _shortened(column: Any) -> Any:
    """Long values as their SHA-256."""
    long = pc.fill_null(pc.greater(pc.binary_length(column), _MOST_BYTES), False)
    if not pc.any(long).as_py():
        return column
    hashes = [hashlib.sha256(value.as_buffer()).digest() for value in column.filter(long)]
    return pc.replace_with_mask(column, long, pa.array(hashes, pa.binary()))


def _ids(batch: Any, salt: int) -> Any:
    """The bytes of ids, null where they are derived. What is not the text of a UUID stays text."""
    texts = pc.fill_null(batch.column("id"), "")
    derived = derived_ids(batch.column("seq"), batch.column("published_at"), salt)
    # Formatting derived ids is cheaper than parsing given ones, and most batches hold only one kind.
    if pc.equal(texts[:1], uuid_texts(derived[:1]))[0].as_py() and texts.equals(uuid_texts(derived)):
        return pa.nulls(len(texts), pa.binary())
    raw = texts.cast(pa.binary())
    ids, valid = _parsed(raw)
    found = _pieces(ids.view("V16").reshape(-1))
    if not valid.all():
        found = pc.if_else(pa.array(valid), found, raw)
    is_derived = valid & (ids.view(">u8") == derived.view(">u8")).all(axis=1)
    if is_derived.any():
        found = pc.if_else(pa.array(is_derived), pa.scalar(None, pa.binary()), found)
    return found


def _parsed(texts: Any) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """UUIDs from their texts, 16 bytes each, and which of the texts are UUIDs as PostgreSQL writes them."""
    whole = pc.equal(pc.binary_length(texts), 36)
    if not pc.all(whole).as_py():
        texts = pc.if_else(whole, texts, pa.scalar(b"?" * 36, pa.binary()))
    offset = np.frombuffer(texts.buffers()[1], dtype=np.int32)[texts.offset]
    data: NDArray[np.uint8] = np.frombuffer(texts.buffers()[2], dtype=np.uint8)
    characters = data[offset : offset + 36 * len(texts)].reshape(-1, 36)
    digits = np.empty((len(characters), 32), dtype=np.uint8)
    for place, start, end in ((0, 0, 8), (8, 9, 13), (12, 14, 18), (16, 19, 23), (20, 24, 36)):
        digits[:, place : place + end - start] = characters[:, start:end]
    are_digits = (digits - ord("0") < 10) | (digits - ord("a") < 6)
    valid = are_digits.all(axis=1) & (characters[:, _DASHES] == ord("-")).all(axis=1)
    if not valid.all():
        digits[~valid] = ord("0")
    return np.frombuffer(binascii.unhexlify(digits.data), dtype=np.uint8).reshape(-1, 16), valid
