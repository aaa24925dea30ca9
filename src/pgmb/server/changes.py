"""Changes over HTTP, with an audit entry in the same transaction."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, Final

import msgspec
from psycopg import AsyncConnection
from psycopg.rows import tuple_row

from pgmb._async.broker import AsyncBroker
from pgmb.errors import translated
from pgmb.server.access import Principal
from pgmb.server.problems import unauthorised

_HOLD: Final = "select expires_at from pgmb.hold_api_key(%s, %s)"


class Change:
    """A change in progress. Pass `conn` to the broker's methods."""

    def __init__(
        self, broker: AsyncBroker, conn: AsyncConnection[Any], actor: str, ends: datetime | None
    ) -> None:
        self.conn = conn
        self.ends = ends
        """When the key expires that makes the change."""
        self._broker = broker
        self._actor = actor

    async def record(self, action: str, subject: str | None = None, **detail: Any) -> None:
        """Add an audit entry. `action` is the name of the broker's method; None values are left out."""
        given = {name: value for name, value in detail.items() if value is not None}
        await self._broker.record(self._actor, action, subject, given, conn=self.conn)


@asynccontextmanager
async def changing(broker: AsyncBroker, principal: Principal) -> AsyncGenerator[Change]:
    """A transaction for a change and its audit entry: both commit, or neither does.

    Requests are let in by credentials that were valid seconds ago. The transaction keeps the key and the
    session valid until it commits. Raises Problem 401 if they no longer are.
    """
    with translated():
        async with broker.own_connection() as conn, conn.transaction():
            cursor = conn.cursor(row_factory=tuple_row)
            await cursor.execute(_HOLD, (principal.key, principal.session))
            held = await cursor.fetchone()
            if held is None:
                raise unauthorised()
            yield Change(broker, conn, principal.actor, held[0])


def audited(given: msgspec.Struct, *hidden: str) -> Mapping[str, Any]:
    """A request's fields for the audit, without the `hidden` (secret) ones."""
    return {name: value for name, value in msgspec.structs.asdict(given).items() if name not in hidden}
