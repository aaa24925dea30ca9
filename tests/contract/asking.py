"""The three ways to ask for events by what they hold: a queue, a subscription of a group, a tail."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.types.json import Json, Jsonb

from harness.states import paused_queues

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Asked:
    equals: Any = None
    filter: str | None = None
    condition: str | None = None
    params: Any = None


@dataclass(frozen=True)
class Given:
    """An event; its payload and headers as values, or as texts that only json can hold."""

    payload: Any = None
    topic: str = "t"
    key: str | None = None
    headers: Any = None


class Raw(str):
    """A json text to be published to the letter."""

    __slots__ = ()


def publish(db: psycopg.Connection[Any], event: Given) -> None:
    db.execute(
        "select pgmb.publish(%s, %s::json, key => %s, headers => %s::json)",
        [
            event.topic,
            str(event.payload) if isinstance(event.payload, Raw) else Json(event.payload),
            event.key,
            str(event.headers)
            if isinstance(event.headers, Raw)
            else None
            if event.headers is None
            else Json(event.headers),
        ],
    )


def _jsonb(value: Any) -> Any:
    return None if value is None else Jsonb(value)


def passing(db: psycopg.Connection[Any], asked: Asked, events: Sequence[Given]) -> dict[str, list[int]]:
    """Which of these events, by their place, each way of asking gives."""
    name = f"asking {next(_numbers)}"
    values = {
        "name": name,
        "equals": _jsonb(asked.equals),
        "filter": asked.filter,
        "condition": asked.condition,
        "params": _jsonb(asked.params),
    }
    what = (
        "equals => %(equals)s::jsonb, filter => %(filter)s::text, condition => %(condition)s::text,"
        " params => %(params)s::jsonb"
    )
    db.execute("set statement_timeout = '60s'")
    db.execute(f"select pgmb.create_queue(%(name)s || ' queue', {what})", values)
    db.execute("select pgmb.create_queue(%(name)s || ' group')", values)
    db.execute(f"select pgmb.subscribe(%(name)s || ' group', {what})", values)
    before = db.execute("select pgmb.position()").fetchone()
    assert before is not None
    for event in events:
        publish(db, event)
    seqs = [
        row[0]
        for row in db.execute(
            "select seq from pgmb.between('main', %s::pgmb.position, pgmb.position(), 0, 100000)", [before[0]]
        )
    ]
    assert len(seqs) == len(events)
    found = {
        "queue": db.execute("select seq from pgmb.receive(%s, 10000)", [f"{name} queue"]).fetchall(),
        "group": db.execute("select seq from pgmb.receive_group(%s, 10000)", [f"{name} group"]).fetchall(),
        "tail": db.execute(
            "select seq from pgmb.between_group(%s, 'main', %s::pgmb.position, pgmb.position(), 0, 100000)"
            " where cardinality(subscriptions) > 0",
            [f"{name} group", before[0]],
        ).fetchall(),
    }
    if asked.condition is None:
        found["filtered tail"] = db.execute(
            "select seq from pgmb.between_filtered('main', %(before)s::pgmb.position, pgmb.position(), 0,"
            " 100000, %(equals)s::jsonb, %(filter)s::text, %(params)s::jsonb) where topic is not null",
            {**values, "before": before[0]},
        ).fetchall()
    paused = db.execute(
        "select group_id, paused_reason from pgmb.subscription where paused_at is not null",
        values,
    ).fetchall()
    paused += [(name, why) for name, why in paused_queues(db).items() if name.startswith(values["name"])]
    assert paused == [], paused
    db.execute("select pgmb.drop_queue(%(name)s || ' queue'), pgmb.drop_queue(%(name)s || ' group')", values)
    db.execute("delete from pgmb.subscription where group_id = %(name)s || ' group'", values)
    return {way: [seqs.index(seq) for (seq,) in got] for way, got in found.items()}


def matching(db: psycopg.Connection[Any], asked: Asked, events: Sequence[Given]) -> list[int]:
    """Which of these events pass: every way of asking says the same."""
    found = passing(db, asked, events)
    assert len({tuple(places) for places in found.values()}) == 1, found
    return found["queue"]
