"""A queue in the hands of a test: publish with keys, receive, settle, let leases expire, step by step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg
import pytest

from harness.sessions import Session
from harness.states import expire


@dataclass(frozen=True, slots=True)
class Received:
    """What one receive gave. Without events it is false."""

    lease: UUID | None
    rows: list[tuple[str | None, int, int, int]]
    """Key, name, seq and attempt of each event, in the order of delivery."""

    def __bool__(self) -> bool:
        return bool(self.rows)

    @property
    def names(self) -> list[int]:
        return [name for _, name, _, _ in self.rows]

    @property
    def attempts(self) -> dict[int, int]:
        return {name: attempt for _, name, _, attempt in self.rows}

    def seqs(self, names: Iterable[int]) -> list[int]:
        wanted = set(names)
        return [seq for _, name, seq, _ in self.rows if name in wanted]


@dataclass(slots=True)
class Consumer:
    """A session that works on one queue."""

    session: Session
    queue: str = "q"
    patience: float = 0.0
    """How long it waits before each receive: an ordered queue gives nothing more for a moment after a lease,
    because the keys of it will most likely be free at once."""

    def publish(self, key: str | None, *names: int, topic: str = "t") -> None:
        for name in names:
            self.session.run("select pgmb.publish(%s, to_json(%s::int), key => %s)", [topic, name, key])

    def receive(self, max: int = 100, lease_for: str = "1 hour", ack: UUID | None = None) -> Received:
        if self.patience:
            self.session.run("select pg_sleep(%s)", [self.patience])
        rows = self.session.run(
            "select lease, key, payload::text::int, seq, attempt"
            " from pgmb.receive(%s, %s, %s::interval, ack => %s)",
            [self.queue, max, lease_for, ack],
        )
        return Received(rows[0][0] if rows else None, [row[1:] for row in rows])

    def names(self, max: int = 100) -> list[int]:
        return self.receive(max).names

    def take_all(self, max: int = 100) -> list[int]:
        """What comes if everything is settled at once, to the end."""
        taken: list[int] = []
        while got := self.receive(max):
            taken += got.names
            self.ack(got)
        return taken

    def ack(self, got: Received, *names: int) -> int:
        return int(self.session.value("select pgmb.ack(%s, %s::bigint[])", [got.lease, _some(got, names)]))

    def retry(self, got: Received, *names: int, after: str = "0", error: str | None = None) -> int:
        return int(
            self.session.value(
                "select pgmb.retry(%s, %s::bigint[], %s::interval, %s)",
                [got.lease, _some(got, names), after, error],
            )
        )

    def bury(self, got: Received, *names: int, error: str | None = None) -> int:
        return int(
            self.session.value(
                "select pgmb.bury(%s, %s::bigint[], %s)", [got.lease, _some(got, names), error]
            )
        )

    def release(
        self,
        got: Received,
        *names: int,
        after: str | None = None,
        error: str | None = None,
        bury_after: str | None = None,
    ) -> int:
        return int(
            self.session.value(
                "select pgmb.release(%s, %s::bigint[], %s::interval, %s, %s::interval)",
                [got.lease, _some(got, names), after, error, bury_after],
            )
        )

    def expire(self, *leases: Received) -> None:
        """Has leases run out, and waits until the next receive looks for such."""
        expire(self.session.connection, *[got.lease for got in leases if got.lease is not None])

    def dead(self) -> list[tuple[int, int]]:
        """Name and attempt of the dead letters."""
        return [
            (name, attempt)
            for name, attempt in self.session.run(
                "select payload::text::int, attempt from pgmb.dead_letters(%s)", [self.queue]
            )
        ]


def _some(got: Received, names: Iterable[int]) -> list[int] | None:
    return got.seqs(names) or None


def lost() -> Any:
    return pytest.raises(psycopg.Error, check=lambda error: error.sqlstate == "MB011")
