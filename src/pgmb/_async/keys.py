"""Keys for HTTP, and the audit of what was changed."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from pgmb._async.calls import AsyncCalls
from pgmb._core import keys
from pgmb.outbox import AsyncConnectionLike
from pgmb.types import ApiKey, AuditEntry, NewKey


class AsyncKeys(AsyncCalls):
    async def create_api_key(
        self,
        name: str,
        scopes: Iterable[str],
        *,
        expires_at: datetime | None = None,
        conn: AsyncConnectionLike | None = None,
    ) -> NewKey:
        """Make a key for HTTP. The result shows it this once: the database knows its digest alone.

        Scopes: `publish:STREAM`, `read:STREAM`, `consume:QUEUE`, each with `*` for all; `inspect`: see
        everything; `operate`: change everything.
        """
        text = keys.generate()
        await self._value(keys.create(name, text, scopes, expires_at), conn)
        return NewKey(name, text)

    async def api_keys(self, *, conn: AsyncConnectionLike | None = None) -> list[ApiKey]:
        """Every key, by name."""
        return [ApiKey.of(row) for row in await self._rows(keys.API_KEYS, conn)]

    async def drop_api_key(self, name: str, *, conn: AsyncConnectionLike | None = None) -> bool:
        """Take a key back, with its sessions and tickets. True if there was one."""
        return bool(await self._value(keys.drop(name), conn))

    async def record(
        self,
        actor: str,
        action: str,
        subject: str | None = None,
        detail: Any = None,
        *,
        conn: AsyncConnectionLike | None = None,
    ) -> int:
        """Write down what was changed, by whom: with `conn=`, if the change is made. Returns its id."""
        return int(await self._value(keys.record(actor, action, subject, detail), conn))

    async def audit(
        self, limit: int = 100, *, before: int | None = None, conn: AsyncConnectionLike | None = None
    ) -> list[AuditEntry]:
        """What was changed over HTTP and on the command line, latest first; `before` an id, for more."""
        return [AuditEntry.of(row) for row in await self._rows(keys.audit(limit, before), conn)]
