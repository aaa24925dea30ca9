"""Whether requests should come here: the schema fits, the primary takes writes, and the log moves on."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import psycopg
from psycopg.rows import tuple_row
from psycopg_pool import PoolTimeout

from pgmb import schema
from pgmb._async.broker import AsyncBroker

_SERVER: Final = """
select (select version from pgmb.installation), pg_is_in_recovery(),
  current_setting('transaction_read_only')::boolean
"""
_PROGRESS: Final = """
select count(*) filter (where unticked_for > %(unticked)s * interval '1 second'),
  count(*) filter (where overdue_for > %(overdue)s * interval '1 second')
from pgmb.stream_health()
"""

UNTICKED: Final = 30.0
"""So many seconds events may lie in the log before a tick names them. A Ticker does it at once."""
OVERDUE: Final = 60.0
"""So many seconds an event with a delay may be late."""


class Check(msgspec.Struct, omit_defaults=True):
    ok: bool
    detail: str | None = None


class Readiness(msgspec.Struct):
    ready: bool
    checks: dict[str, Check]

    @classmethod
    def of(cls, checks: dict[str, Check]) -> Readiness:
        return cls(all(check.ok for check in checks.values()), checks)


async def look(broker: AsyncBroker) -> dict[str, Check]:
    """Asks the database. What it answers is told in our words: whoever reads this need not have a key."""
    try:
        async with broker.connection() as connection:
            cursor = connection.cursor(row_factory=tuple_row)
            await cursor.execute(_SERVER)
            version, recovering, read_only = await cursor.fetchone() or (None, False, False)
            checks = {
                "database": Check(True),
                "schema": _schema(version),
                "primary": _primary(recovering, read_only),
            }
            if all(check.ok for check in checks.values()):
                await cursor.execute(_PROGRESS, {"unticked": UNTICKED, "overdue": OVERDUE})
                checks["progress"] = _progress(await cursor.fetchone())
            return checks
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        return {"database": Check(True), "schema": _schema(None)}
    except psycopg.errors.InsufficientPrivilege:
        return {"database": Check(False, "the role may not do what the server does")}
    except (psycopg.Error, PoolTimeout):
        return {"database": silent()}


def silent() -> Check:
    return Check(False, "the database does not answer")


def _schema(version: int | None) -> Check:
    if version == schema.VERSION:
        return Check(True, f"version {version}")
    found = "it is not installed" if version is None else f"it is at version {version}"
    return Check(False, f"version {schema.VERSION} is needed, {found}")


def _primary(recovering: bool, read_only: bool) -> Check:
    if recovering:
        return Check(False, "the server is a standby")
    return Check(False, "the server takes no writes") if read_only else Check(True)


def _progress(row: Any) -> Check:
    unticked, overdue = row
    if unticked:
        return Check(False, f"streams with events and without ticks: {unticked}; is a ticker running?")
    if overdue:
        return Check(False, f"streams with events that are overdue: {overdue}; is a ticker running?")
    return Check(True)
