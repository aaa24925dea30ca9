"""What is changed over HTTP, and who did it, written in one transaction."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from psycopg import AsyncConnection

from pgmb._async.broker import AsyncBroker
from pgmb.errors import translated
from pgmb.server.scopes import Principal


class Change:
    """A change under way: its connection is for `conn=` of the broker's methods."""

    def __init__(self, broker: AsyncBroker, conn: AsyncConnection[Any], actor: str) -> None:
        self.conn = conn
        self._broker = broker
        self._actor = actor

    async def record(self, action: str, subject: str | None = None, **detail: Any) -> None:
        """Write down what was done, by the name of the broker's method. What is None is left out."""
        given = {name: value for name, value in detail.items() if value is not None}
        await self._broker.record(self._actor, action, subject, given, conn=self.conn)


@asynccontextmanager
async def changing(broker: AsyncBroker, principal: Principal) -> AsyncGenerator[Change]:
    """A transaction for a change and its record: both commit, or neither does."""
    with translated():
        async with broker.connection() as conn, conn.transaction():
            yield Change(broker, conn, f"key:{principal.name}")


def told(given: msgspec.Struct, *hidden: str) -> Mapping[str, Any]:
    """What a request asked for, as an audit shows it: without what is secret."""
    return {name: value for name, value in msgspec.structs.asdict(given).items() if name not in hidden}
