"""Endpoints in the hands of a test: what a dispatcher asks of the database, step by step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg
import pytest

from harness.states import deliveries

URL = "http://hooks.example/in"


@dataclass(frozen=True, slots=True)
class Received:
    """What one receive_deliveries gave. Without events it is false."""

    lease: UUID | None
    rows: list[tuple[int, int, str, int, frozenset[UUID]]]
    """Payload, seq, topic, attempt and endpoints of each event."""

    def __bool__(self) -> bool:
        return bool(self.rows)

    @property
    def names(self) -> list[int]:
        return [row[0] for row in self.rows]

    @property
    def attempts(self) -> dict[int, int]:
        return {name: attempt for name, _, _, attempt, _ in self.rows}

    @property
    def meant(self) -> dict[int, frozenset[UUID]]:
        return {row[0]: row[4] for row in self.rows}

    def seqs(self, *names: int) -> list[int]:
        return [seq for name, seq, *_ in self.rows if name in names]


class Waited(dict[int, tuple[int, UUID, int]]):
    """What one claim_deliveries gave, by payload: row, endpoint and attempt."""

    lease: UUID | None = None

    def rows(self, *names: int) -> list[int]:
        return [self[name][0] for name in names or self]


def value(db: psycopg.Connection[Any], statement: str, *parameters: Any) -> Any:
    ((only,),) = db.execute(statement, parameters).fetchall()
    return only


def refused(sqlstate: str) -> Any:
    return pytest.raises(psycopg.Error, check=lambda error: error.sqlstate == sqlstate)


def create(db: psycopg.Connection[Any], name: str, patterns: str = "{#}", **settings: Any) -> UUID:
    """create_endpoint with these settings; texts are cast to what the parameter is."""
    named = "".join(f", {setting} => %s" for setting in settings)
    made = value(
        db, f"select pgmb.create_endpoint(%s, %s, %s::text[]{named})", name, URL, patterns, *settings.values()
    )
    assert isinstance(made, UUID)
    return made


def publish(db: psycopg.Connection[Any], *names: int, topic: str = "t", key: str | None = None) -> None:
    for name in names:
        db.execute("select pgmb.publish(%s, to_json(%s::int), key => %s)", [topic, name, key])


def receive(
    db: psycopg.Connection[Any], queue: str = "webhooks", max: int = 100, lease_for: str = "1 hour"
) -> Received:
    rows = db.execute(
        "select lease, payload::int, seq, topic, attempt, endpoints"
        " from pgmb.receive_deliveries(%s, %s, %s::interval)",
        [queue, max, lease_for],
    ).fetchall()
    return Received(rows[0][0] if rows else None, [(*row[1:5], frozenset(row[5])) for row in rows])


def settle(
    db: psycopg.Connection[Any],
    lease: UUID | None,
    seqs: Iterable[int] | None = None,
    failures: Iterable[tuple[int, UUID, str | None, str | None, bool, bool]] = (),
) -> int:
    """settle_deliveries; a failure is seq, endpoint, after, error, tried, last."""
    columns = [list(column) for column in zip(*failures, strict=True)] or [[] for _ in range(6)]
    return int(
        value(
            db,
            "select pgmb.settle_deliveries(%s, %s::bigint[], %s::bigint[], %s::uuid[], %s::interval[],"
            " %s::text[], %s::boolean[], %s::boolean[])",
            lease,
            None if seqs is None else list(seqs),
            *columns,
        )
    )


def claim(
    db: psycopg.Connection[Any],
    max: int = 100,
    room: int = 10,
    rooms: dict[UUID, int] | None = None,
    lease_for: str = "1 hour",
) -> Waited:
    rows = db.execute(
        "select payload::int, delivery, endpoint, attempt, lease"
        " from pgmb.claim_deliveries(%s, %s::interval, %s, %s::uuid[], %s::integer[])",
        [max, lease_for, room, list(rooms or ()), list((rooms or {}).values())],
    ).fetchall()
    waited = Waited({row[0]: row[1:4] for row in rows})
    waited.lease = rows[0][4] if rows else None
    return waited


def settle_claimed(
    db: psycopg.Connection[Any],
    lease: UUID | None,
    done: Iterable[int] = (),
    failures: Iterable[tuple[int, str | None, str | None, bool, bool]] = (),
) -> int:
    """settle_claimed; a failure is row, after, error, tried, last."""
    columns = [list(column) for column in zip(*failures, strict=True)] or [[] for _ in range(5)]
    return int(
        value(
            db,
            "select pgmb.settle_claimed(%s, %s::bigint[], %s::bigint[], %s::interval[], %s::text[],"
            " %s::boolean[], %s::boolean[])",
            lease,
            list(done),
            *columns,
        )
    )


def waiting(db: psycopg.Connection[Any]) -> list[tuple[UUID | None, int, int, str | None]]:
    """Endpoint, payload, attempt and error of what waits for one endpoint."""
    waits = sorted(deliveries(db), key=lambda event: event.payload)
    return [(event.endpoint, event.payload, event.attempt, event.error) for event in waits]


def dead(db: psycopg.Connection[Any]) -> list[tuple[UUID | None, int, int, str | None]]:
    """Endpoint, payload, attempt and error of the dead letters."""
    return db.execute(
        "select endpoint, payload::text::int name, attempt, error from pgmb.dead order by name, id"
    ).fetchall()
