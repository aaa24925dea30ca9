"""What a reader asks for by fields is found in memory, as the database would find it."""

from __future__ import annotations

import json
import random
from typing import Any

import psycopg

import pgmb
from pgmb.server.sse.matching import EventFields, Interest

SCALARS: list[Any] = [
    0,
    1,
    1.0,
    -1,
    2**53 + 1,
    0.1,
    1e300,
    True,
    False,
    None,
    "",
    "1",
    "a",
    "é",
    "\u0000",
    "\\u0000",
]


def some_document(chance: random.Random) -> Any:
    def value(depth: int) -> Any:
        kind = chance.random()
        if depth and kind < 0.4:
            return {chance.choice("ab01"): value(depth - 1) for _ in range(chance.randint(0, 3))}
        if depth and kind < 0.5:
            return [value(depth - 1) for _ in range(chance.randint(0, 2))]
        return chance.choice(SCALARS)

    return {chance.choice("ab01"): value(2) for _ in range(3)} if chance.random() < 0.9 else value(0)


def some_fields(chance: random.Random) -> dict[str, Any]:
    scalar = chance.choice([one for one in SCALARS if one != "\u0000"])
    path = [chance.choice("ab01") for _ in range(chance.randint(1, 2))]
    asked: Any = scalar
    for name in reversed(path):
        asked = {name: asked}
    return {chance.choice(["payload", "payload", "headers"]): asked}


def test_fields_are_compared_as_in_the_database(dsn: str, db: psycopg.Connection[Any]) -> None:
    chance = random.Random(7)
    for _ in range(300):
        db.execute(
            "select pgmb.publish('t', %s, headers => %s)",
            [json.dumps(some_document(chance)), json.dumps({"a": chance.choice([1, True, "1"])})],
        )
    found = 0
    with pgmb.connect(dsn, max_size=1) as broker:
        events = broker.between("main", broker.earliest(), broker.position(), 0, 1000)
        assert len(events) == 300
        for _ in range(150):
            equals = some_fields(chance)
            rows = db.execute(
                "select seq from pgmb.between_filtered('main', pgmb.earliest(), pgmb.position(), 0, 1000,"
                " equals => %s) where topic is not null",
                [json.dumps(equals)],
            ).fetchall()
            interest = Interest.of(equals=equals)
            mine = {event.seq for event in events if interest.matches(event, EventFields(event))}
            assert mine == {seq for (seq,) in rows}, equals
            found += len(mine)
    assert found > 200
