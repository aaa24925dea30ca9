"""The Janitor keeps the log in order: rotation, sealing, retention, and the tables that retention emptied."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, NamedTuple

from psycopg import AsyncConnection, errors, sql

from pgmb._async.broker import AsyncBroker

logger = logging.getLogger("pgmb.services")

_AT_ONCE = 0.05
"""Seconds between calls of maintain() while it has more to do: others take the log's lock in between."""

_OWNER = """
select current_user, pg_has_role(n.nspowner, 'usage') from pg_namespace n where n.nspname = 'pgmb'
"""

_EMPTIED = """
select s.name, c.relname, i.inhrelid is not null, coalesce(i.inhdetachpending, false)
from pgmb.segment g
join pgmb.stream s on s.id = g.stream
join pg_class c on c.relname = format('segment_%s_%s', g.stream, g.number)
  and c.relnamespace = 'pgmb'::regnamespace
left join pg_inherits i on i.inhrelid = c.oid
-- Not at once: a reader that listed its segments just before may be about to look into one.
where g.dropped_at < statement_timestamp() - interval '1 minute'
order by g.stream, g.number
"""

_DISPATCHERS = "select endpoints, dispatchers from pgmb.describe_broker()"


class _Emptied(NamedTuple):
    """A segment without events whose table is still there."""

    stream: str
    table: str
    attached: bool
    detach_pending: bool


class Janitor:
    """Calls maintain() every `every` seconds, and every tenth time removes the tables that were emptied.

    Every 60th time, first at the tenth, it looks whether endpoints have a dispatcher.

    maintain() drops them too, where it gets the log's lock at once. Detaching them first, concurrently, takes
    no lock that a publisher or reader would wait for; but it must be done outside of a transaction, by the
    owner. As another role, the janitor leaves them to maintain().
    """

    name = "janitor"

    def __init__(self, every: float = 1.0, patience: float = 5.0) -> None:
        self.every = every
        self.patience = patience
        self._turns = 0
        self._undelivered = False
        self._told_owner = False

    async def turn(self, broker: AsyncBroker) -> float:
        more = await broker.maintain()
        if self._turns % 10 == 0:
            await self.remove_emptied(broker)
        if self._turns % 60 == 10:
            await self._look_for_dispatchers(broker)
        self._turns += 1
        return min(self.every, _AT_ONCE) if more else self.every

    async def _look_for_dispatchers(self, broker: AsyncBroker) -> None:
        async with broker.own_connection() as conn:
            ((endpoints, dispatchers),) = await (await conn.execute(_DISPATCHERS)).fetchall()
        undelivered = endpoints > 0 and dispatchers == 0
        if undelivered and not self._undelivered:
            logger.warning(
                "no dispatcher runs: nothing posts the events of %s. Run pgmb serve, or pgmb dispatcher",
                "1 endpoint" if endpoints == 1 else f"{endpoints:,} endpoints",
            )
        self._undelivered = undelivered

    async def remove_emptied(self, broker: AsyncBroker) -> int:
        """Detach and drop the tables of emptied segments. Returns how many are gone."""
        gone = 0
        async with broker.own_connection() as conn:
            ((role, owner),) = await (await conn.execute(_OWNER)).fetchall()
            if not owner:
                self._tell_owner(role)
                return 0
            rows = await (await conn.execute(_EMPTIED)).fetchall()
            for emptied in map(_Emptied._make, rows):
                try:
                    async with asyncio.timeout(self.patience):
                        await _remove(conn, emptied)
                except (TimeoutError, errors.QueryCanceled):
                    # A transaction that used the log is still open. The detach is begun and will be finished.
                    logger.info("%s: waiting for older transactions", emptied.table)
                    break
                gone += 1
        return gone

    def _tell_owner(self, role: str) -> None:
        if not self._told_owner:
            self._told_owner = True
            logger.info(
                "role %s does not own schema pgmb: maintain() drops the tables of emptied segments, when no"
                " transaction uses the log. If they pile up, run pgmb janitor as the owner",
                role,
            )


async def _remove(conn: AsyncConnection[Any], emptied: _Emptied) -> None:
    log = sql.Identifier("pgmb", f"log_{emptied.stream}")
    table = sql.Identifier("pgmb", emptied.table)
    if emptied.attached:
        # A detach that was interrupted has to be finished, not begun again.
        manner = sql.SQL("finalize" if emptied.detach_pending else "concurrently")
        await conn.execute(sql.SQL("alter table {} detach partition {} {}").format(log, table, manner))
    await conn.execute(sql.SQL("drop table if exists {}").format(table))
    reader = sql.Identifier("pgmb_internal", emptied.table.replace("segment", "read", 1))
    await conn.execute(sql.SQL("drop function if exists {}").format(reader))
