"""A lease is a UUID of three numbers, as pgmb_internal.lease_of makes it."""

from __future__ import annotations

from typing import Final, NamedTuple

_CLAIM_BITS: Final = 64
_TOKEN_BITS: Final = 40


class LeaseNumbers(NamedTuple):
    queue: int
    claim: int
    token: int

    @classmethod
    def of(cls, lease: bytes) -> LeaseNumbers:
        return cls(
            int.from_bytes(lease[:3]), int.from_bytes(lease[3:11], signed=True), int.from_bytes(lease[11:])
        )

    def __bytes__(self) -> bytes:
        claim = self.claim % (1 << _CLAIM_BITS)
        return (((self.queue << _CLAIM_BITS) + claim << _TOKEN_BITS) + self.token).to_bytes(16)
