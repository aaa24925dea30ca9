"""What type checkers see of handlers. mypy and pyright check this file; little of it runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypedDict, assert_type
from uuid import UUID

import psycopg
import pytest

import pgmb

app = pgmb.App("")


@dataclass
class Order:
    number: int


class Address(TypedDict):
    city: str


if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session

    @app.on("order.*", queue="billing", concurrency=8, retry=lambda attempt: 2.0**attempt, timeout=30)
    async def charge(order: Order) -> None:
        assert_type(order, Order)
        assert_type(order.number, int)

    assert_type(charge, Callable[[Order], Coroutine[Any, Any, None]])  # type: ignore[assert-type]

    @app.on("order.cancelled", queue="billing")
    def refund(event: pgmb.Delivery[Order]) -> int:
        assert_type(event.payload, Order)
        assert_type(event.payload.number, int)
        assert_type(event.topic, str)
        assert_type(event.key, str | None)
        assert_type(event.id, UUID)
        assert_type(event.published_at, datetime)
        assert_type(event.event, pgmb.Event)
        return 1

    @app.on("audit.#", batch=500)
    async def archive(events: list[pgmb.Delivery[Address]]) -> None:
        assert_type(events[0].payload, Address)
        assert_type(events[0].payload["city"], str)

    @app.on("audit.#", batch=500)
    async def archive_payloads(entries: list[Address]) -> None: ...

    @app.middleware
    async def timing(delivery: Any, call_next: Callable[[Any], Awaitable[None]]) -> None:
        await call_next(delivery)

    async def settling(
        event: pgmb.Delivery[Order],
        conn: psycopg.Connection[Any],
        aconn: psycopg.AsyncConnection[Any],
        session: Session,
        asession: AsyncSession,
    ) -> None:
        assert_type(event.ack(conn=conn), int)
        assert_type(await event.ack(conn=aconn), int)
        assert_type(event.ack(conn=session), int)
        assert_type(await event.ack(conn=asession), int)
        assert_type(await event.extend(), datetime)
        assert_type(app.publish("a", Order(1), key="k", conn=conn), UUID)
        assert_type(await app.apublish("a", Order(1), conn=aconn), UUID)
        # A handler stays the function that it was.
        assert_type(refund(event), int)
        await charge(Order(1))

    def wider(event: pgmb.Delivery[int]) -> None: ...

    def narrower(event: pgmb.Delivery[bool]) -> None:
        wider(event)

    @app.on("a")  # type: ignore[type-var]
    def without_an_argument() -> None: ...

    @app.on("a")  # type: ignore[type-var]
    async def with_two(first: Order, second: Order) -> None: ...

    @app.on("a", batch=5)  # type: ignore[type-var]
    async def not_a_list(order: Order) -> None: ...

    async def refused(event: pgmb.Delivery[Order]) -> None:
        await charge(5)  # type: ignore[arg-type]
        event.ack(conn=5)  # type: ignore[call-overload]
        app.publish("a")  # type: ignore[call-arg]
        app.publish("a", 1, kee="k")  # type: ignore[call-arg]
        event.topic = "b"  # type: ignore[misc]


def test_what_checkers_refuse_is_refused_at_decoration() -> None:
    with pytest.raises(TypeError, match="one argument"):
        pgmb.App("").on("a")(lambda: None)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="one argument"):
        pgmb.App("").on("a")(lambda first, second: None)  # type: ignore[type-var]
