"""The digest of events in Arrow: the same that `pgmb.digest_segment` computes in the database.

An event is encoded as PostgreSQL's `record_send` does: the number of columns, then of each column its type,
its length (-1: null) and its bytes, all in network order. A payload or headers of more than 1,024 bytes count
by their SHA-256. A derived id counts as null, since the log does not store it. Blocks of events, see
`BLOCK_BITS`, have a SHA-256 each, and a segment has that of its blocks, in order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, Final, NamedTuple

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
_TEXT, _BYTEA, _UUID = 25, 17, 2950
_PREFIX: Final = np.dtype([("type", ">i4"), ("length", ">i4")])
_FIXED: Final = np.dtype(
    [
        ("columns", ">i4"),
        *((f"{name}_{part}", ">i4" if part != "value" else ">i8") for name in ("seq", "xid", "at")
          for part in ("type", "length", "value")),
        ("id_type", ">i4"),
        ("id_length", ">i4"),
    ]
)  # fmt: skip
_NIBBLES: Final = np.full(256, 255, dtype=np.uint8)
_NIBBLES[np.frombuffer(b"0123456789abcdef", dtype=np.uint8)] = np.arange(16)
# Where the 32 digits of a UUID stand in its text.
_DIGITS: Final = np.array([place for place in range(36) if place not in (8, 13, 18, 23)])


class Block(NamedTuple):
    """A block of events: its number is their seq above BLOCK_BITS."""

    number: int
    events: int
    digest: bytes


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
        self._hash = hashlib.sha256()

    def add(self, batch: Any) -> None:
        """Add a record batch, or a table, of events."""
        if batch.num_rows == 0:
            return
        if isinstance(batch, pa.Table):
            for part in batch.combine_chunks().to_batches():
                self.add(part)
            return
        seqs = batch.column("seq").to_numpy(zero_copy_only=False)
        encoded = encode(batch, self._salt)
        offsets = np.frombuffer(encoded.buffers()[1], dtype=np.int32)[
            encoded.offset : encoded.offset + len(encoded) + 1
        ]
        data = memoryview(encoded.buffers()[2])
        blocks = seqs >> BLOCK_BITS
        bounds = [0, *(np.flatnonzero(np.diff(blocks)) + 1).tolist(), len(seqs)]
        for start, end in pairwise(bounds):
            if (number := int(blocks[start])) != self._number:
                self._close()
                self._number = number
            self._hash.update(data[offsets[start] : offsets[end]])
            self._events += end - start

    def blocks(self) -> list[Block]:
        """The blocks so far. Nothing can be added afterwards."""
        self._close()
        return self._done

    def _close(self) -> None:
        if self._number is not None:
            self._done.append(Block(self._number, self._events, self._hash.digest()))
        self._number, self._events, self._hash = None, 0, hashlib.sha256()


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


def encode(batch: Any, salt: int) -> Any:
    """Each event in binary form."""
    rows = batch.num_rows
    ids, id_lengths = _ids(batch, salt)
    fixed = np.empty(rows, dtype=_FIXED)
    fixed["columns"] = 8
    for name, kind, values in (
        ("seq", 20, _numbers(batch.column("seq"))),
        ("xid", 5069, _numbers(batch.column("xid"))),
        ("at", 1184, _numbers(batch.column("published_at").cast(pa.int64())) - _EPOCH),
    ):
        fixed[f"{name}_type"], fixed[f"{name}_length"], fixed[f"{name}_value"] = kind, 8, values
    fixed["id_type"], fixed["id_length"] = _UUID, id_lengths
    parts = [_pieces(fixed)]
    if ids is not None:
        parts.append(ids)
    for name, kind in (("topic", _TEXT), ("key", _TEXT), ("payload", _BYTEA), ("headers", _BYTEA)):
        column = batch.column(name).cast(pa.binary())
        if kind == _BYTEA:
            column = _shortened(column)
        prefix = np.empty(rows, dtype=_PREFIX)
        prefix["type"] = kind
        prefix["length"] = pc.fill_null(pc.binary_length(column), -1).to_numpy(zero_copy_only=False)
        parts += [_pieces(prefix), column]
    nothing = pa.scalar(b"", pa.binary())
    return pc.binary_join_element_wise(*parts, nothing, null_handling="replace", null_replacement="")


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


def _ids(batch: Any, salt: int) -> tuple[Any, Any]:
    """The bytes of ids that are not derived, None if all are; and their lengths, -1 for derived ones."""
    texts = batch.column("id")
    derived = uuid_texts(derived_ids(batch.column("seq"), batch.column("published_at"), salt))
    is_derived = pc.fill_null(pc.equal(texts, derived), False)
    if pc.all(is_derived).as_py():
        return None, -1
    given = _uuid_bytes(texts)
    ids = pc.if_else(is_derived, pa.scalar(None, pa.binary()), given)
    return ids, pc.fill_null(pc.binary_length(ids), -1).to_numpy(zero_copy_only=False)


def _uuid_bytes(texts: Any) -> Any:
    """UUIDs as 16 bytes each. What is not the text of a UUID stays text, which equals no UUID."""
    raw = pc.fill_null(texts.cast(pa.binary()), b"")
    whole = pc.equal(pc.binary_length(raw), 36)
    padded = pc.if_else(whole, raw, pa.scalar(b"0" * 36, pa.binary()))
    offset = np.frombuffer(padded.buffers()[1], dtype=np.int32)[padded.offset]
    characters = np.frombuffer(padded.buffers()[2], dtype=np.uint8, count=36 * len(padded), offset=offset)
    nibbles = _NIBBLES[characters.reshape(-1, 36)[:, _DIGITS]]
    packed: NDArray[np.uint8] = np.ascontiguousarray(
        (nibbles[:, 0::2] << 4) | (nibbles[:, 1::2] & 15), dtype=np.uint8
    )
    exact = pc.and_(whole, pc.equal(texts, uuid_texts(packed)))
    return pc.if_else(exact, _pieces(packed.view("V16").reshape(-1)), raw)
