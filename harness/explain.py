"""The plans of all statements of a session, nested ones included, as auto_explain shows them; their costs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import psycopg
from psycopg.errors import Diagnostic

Plan: TypeAlias = dict[str, Any]

_SETTINGS = {
    "log_min_duration": "0",
    "log_nested_statements": "on",
    "log_format": "json",
    "log_analyze": "on",
    "log_buffers": "on",
    "log_timing": "off",
}


_RUNS = 4


class Explained:
    """A session that keeps the plan of every statement it runs, nested ones included."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection
        self.plans: list[tuple[str, Plan]] = []
        connection.add_notice_handler(self._note)
        connection.execute("load 'auto_explain'")
        for name, setting in _SETTINGS.items():
            connection.execute("select set_config('auto_explain.' || %s, %s, false)", [name, setting])
        connection.execute("set client_min_messages = log")

    def _note(self, diagnostic: Diagnostic) -> None:
        message = diagnostic.message_primary or ""
        if "plan:" in message:
            document = json.loads(message[message.index("{") :])
            self.plans.append((document["Query Text"], document["Plan"]))

    def run(self, statement: str, *parameters: Any) -> list[Any]:
        self.plans.clear()
        return self.connection.execute(statement, parameters).fetchall()


def nodes(plan: Plan) -> Iterator[Plan]:
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


def buffers(plan: Plan) -> int:
    """The pages that a statement looked at, those of the statements inside it included."""
    return int(plan["Shared Hit Blocks"]) + int(plan["Shared Read Blocks"])


@dataclass(frozen=True, slots=True)
class Cost:
    """What a statement touches and writes, with the statements inside it. The same on every machine."""

    pages: int
    wal_bytes: int


def cost(connection: psycopg.Connection[Any], statement: str, parameters: Sequence[Any] = ()) -> Cost:
    """The cost of a statement, which is rolled back: the least of several, because the first fill caches."""
    made = [_cost_once(connection, statement, parameters) for _ in range(_RUNS)]
    return Cost(min(one.pages for one in made), min(one.wal_bytes for one in made))


def _cost_once(connection: psycopg.Connection[Any], statement: str, parameters: Sequence[Any]) -> Cost:
    # Receives look for expired leases at most every 50 ms: each of these does.
    time.sleep(0.06)
    with connection.transaction(force_rollback=True):
        ((document,),) = connection.execute(
            f"explain (analyze, buffers, wal, timing off, format json) {statement}".encode(), parameters
        ).fetchall()
    plan = document[0]["Plan"]
    return Cost(buffers(plan), int(plan["WAL Bytes"]))


def entries_read(connection: psycopg.Connection[Any], table: str) -> int:
    """The entries of a table's indexes that this transaction has read so far, those of dead rows included."""
    row = connection.execute(
        "select sum(pg_stat_get_xact_tuples_returned(indexrelid))::bigint from pg_index"
        " where indrelid = %s::regclass",
        [table],
    ).fetchone()
    assert row is not None
    return int(row[0])
