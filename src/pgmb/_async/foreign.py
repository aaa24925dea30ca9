"""Statements in the transaction of another library, by that library's own execute."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from pgmb._core import foreign, wire
from pgmb._core.statements import Statement
from pgmb.drivers import AsyncDriver
from pgmb.errors import exception_for, server_error

# A local setting lasts as long as the transaction: without one, as long as its own statement.
_MARK: Final = Statement("select set_config('pgmb_joined.here', 'yes', true)", ())
_LOOK: Final = Statement("select current_setting('pgmb_joined.here', true)", ())


class AsyncForeign:
    """A driver, as the client uses connections of its own."""

    def __init__(self, driver: AsyncDriver) -> None:
        self._driver = driver

    async def fetch(self, statement: Statement) -> list[wire.Row]:
        text, parameters = foreign.as_text(statement, self._driver.placeholder)
        return [foreign.row(told[0]) for told in await self._execute(text, parameters)]

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[None]:
        """The caller's transaction; in autocommit mode, one for the block."""
        await self.fetch(_MARK)
        if await self.fetch(_LOOK) == [("yes",)]:
            yield
            return
        await self._execute("begin", [])
        try:
            yield
        except BaseException:
            await self._execute("rollback", [])
            raise
        await self._execute("commit", [])

    async def _execute(self, text: str, parameters: Sequence[str | None]) -> Sequence[Sequence[Any]]:
        try:
            return await self._driver.execute(text, parameters)
        except Exception as error:
            said = server_error(error)
            ours = None if said is None else exception_for(said)
            if ours is None:
                raise
            raise ours from error
