"""One face for plain SQL, the synchronous client and the asynchronous one: the same promises hold for all."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, cast
from uuid import UUID

import msgspec
import psycopg
from psycopg.types.string import TextLoader

import pgmb
from pgmb.errors import translated


class Delivered(NamedTuple):
    seq: int
    id: UUID
    topic: str
    key: str | None
    raw: str
    headers: Any
    attempt: int

    @property
    def payload(self) -> Any:
        return msgspec.json.decode(self.raw)


class Received(NamedTuple):
    id: UUID | None
    events: list[Delivered]

    @property
    def payloads(self) -> list[Any]:
        return [event.payload for event in self.events]

    @property
    def seqs(self) -> list[int]:
        return [event.seq for event in self.events]


class Dead(NamedTuple):
    id: int
    error: str | None
    attempt: int
    payload: Any


def plain(value: Any) -> Any:
    """What a client returned, in the types of this module."""
    if isinstance(value, pgmb.Event):
        return Delivered(
            value.seq,
            value.id,
            value.topic,
            value.key,
            value.raw.decode(),
            value.headers or None,
            value.attempt,
        )
    if isinstance(value, pgmb.Lease | pgmb.AsyncLease):
        return Received(value.id if value else None, [plain(event) for event in value])
    if isinstance(value, pgmb.DeadLetter):
        return Dead(value.id, value.error, value.attempt, value.event.payload)
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, pgmb.Position):
        return str(value)
    return value


class Client:
    """Any of the three. Methods are the broker's: `await client.publish("a", 1)`."""

    async def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        async def method(*args: Any, **kwargs: Any) -> Any:
            return await self.call(name, *args, **kwargs)

        return method

    def transaction(self, commit: bool = True) -> Any:
        """A connection inside a transaction, for `conn=`, that commits at the end or rolls back."""
        raise NotImplementedError


def _positions(kwargs: dict[str, Any], *names: str) -> dict[str, Any]:
    return {
        name: pgmb.Position.parse(value) if name in names and isinstance(value, str) else value
        for name, value in kwargs.items()
    }


class SyncClient(Client):
    def __init__(self, broker: pgmb.Broker, dsn: str) -> None:
        self.broker = broker
        self.dsn = dsn

    async def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        kwargs = _positions(kwargs, "starting", "to", "after", "upto", "at")
        return plain(getattr(self.broker, name)(*args, **kwargs))

    @asynccontextmanager
    async def transaction(self, commit: bool = True) -> AsyncGenerator[psycopg.Connection[Any]]:
        with psycopg.connect(self.dsn) as conn:
            yield conn
            if not commit:
                conn.rollback()


class AsyncClient(Client):
    def __init__(self, broker: pgmb.AsyncBroker, dsn: str) -> None:
        self.broker = broker
        self.dsn = dsn

    async def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        kwargs = _positions(kwargs, "starting", "to", "after", "upto", "at")
        return plain(await getattr(self.broker, name)(*args, **kwargs))

    @asynccontextmanager
    async def transaction(self, commit: bool = True) -> AsyncGenerator[psycopg.AsyncConnection[Any]]:
        async with await psycopg.AsyncConnection.connect(self.dsn) as conn:
            yield conn
            if not commit:
                await conn.rollback()


class SqlClient(Client):
    """Calls the functions by their names, with the arguments by theirs."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.conn: psycopg.Connection[Any] = psycopg.connect(dsn, autocommit=True)

    async def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        conn = kwargs.pop("conn", None) or self.conn
        if name == "publish_many":
            return self._publish_many(conn, *args, **kwargs)
        given = inspect.signature(getattr(pgmb.Broker, name)).bind(None, *args, **kwargs).arguments
        given.pop("self")
        rows = self._run(
            conn, name, {key: value for key, value in given.items() if value is not None or key == "payload"}
        )
        if name == "receive":
            return Received(
                rows[0][0] if rows else None,
                [Delivered._make((*row[1:7], row[8])) for row in rows],
            )
        if name == "dead_letters":
            return [Dead(row[0], row[4], row[3], msgspec.json.decode(row[9])) for row in rows]
        if name == "between":
            return [Delivered._make((*row[:6], 1)) for row in rows]
        if name == "next_events":
            return msgspec.json.decode(rows[0][0], type=pgmb.NextEvents)
        return rows[0][0]

    @asynccontextmanager
    async def transaction(self, commit: bool = True) -> AsyncGenerator[psycopg.Connection[Any]]:
        with psycopg.connect(self.dsn) as conn:
            yield conn
            if not commit:
                conn.rollback()

    def _publish_many(
        self, conn: Any, topic: Any, payloads: Any = None, headers: Any = None, stream: str = "main"
    ) -> Any:
        if isinstance(topic, str):
            given = {"topic": topic, "payloads": list(payloads), "headers": headers, "stream": stream}
        else:
            events = cast("list[pgmb.NewEvent]", list(topic))
            given = {
                "topics": [event.topic for event in events],
                "payloads": [event.payload for event in events],
                "keys": [event.key for event in events],
                "headers": [event.headers for event in events],
                "ids": [event.id for event in events],
                "stream": stream,
            }
        return self._run(conn, "publish_many", given)[0][0]

    def _run(self, conn: psycopg.Connection[Any], name: str, given: dict[str, Any]) -> list[tuple[Any, ...]]:
        types = self._types(conn, name, set(given))
        arguments = ", ".join(f'"{key}" => %s::{types[key]}' for key in given)
        values = [_parameter(key, value, types[key]) for key, value in given.items()]
        if name in ("position", "earliest", "position_at", "position_of"):
            query = f"select pgmb.{name}({arguments})::text"
        else:
            query = f"select f.* from pgmb.{name}({arguments}) f"
        with translated(), conn.cursor() as cursor:
            cursor.adapters.register_loader("json", TextLoader)
            cursor.execute(query, values)
            assert cursor.description is not None
            names = [column.name for column in cursor.description]
            return [
                tuple(
                    msgspec.json.decode(value) if column == "headers" and value is not None else value
                    for column, value in zip(names, row, strict=True)
                )
                for row in cursor.fetchall()
            ]

    @staticmethod
    def _types(conn: psycopg.Connection[Any], name: str, given: set[str]) -> dict[str, str]:
        rows = conn.execute(
            "select proargnames, array(select format_type(t, null) from unnest(coalesce(proallargtypes,"
            " proargtypes::oid[])) with ordinality u (t, n) order by n) from pg_proc"
            " where proname = %s and pronamespace = 'pgmb'::regnamespace",
            [name],
        ).fetchall()
        for names, types in rows:
            if given <= set(names or ()):
                return dict(zip(names or (), types, strict=False))
        raise AssertionError(f"pgmb.{name} takes no {sorted(given)}")


def _parameter(name: str, value: Any, kind: str) -> Any:
    if kind in ("json", "jsonb"):
        return _json(name, value)
    if kind == "json[]":
        return [_json(name, one) for one in value]
    if kind == "interval" and isinstance(value, int | float):
        return f"{value} seconds"
    return list(value) if kind.endswith("[]") else value


def _json(name: str, value: Any) -> str | None:
    # No headers are null in SQL; a payload of None is null in JSON.
    return None if value is None and name == "headers" else msgspec.json.encode(value).decode()
