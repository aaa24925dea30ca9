"""Tasks of ours that must not end: one that does is logged as an error and started again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from pgmb._core import loggers

logger = loggers.logger("pgmb.app")

_RESTART_SECONDS = 0.5


async def kept(what: str, run: Callable[[], Awaitable[None]]) -> None:
    """Run it until it returns or this task is cancelled, whatever else it raises."""
    while True:
        try:
            return await run()
        except Exception:
            logger.exception("%s ended unexpectedly; starting it again", what)
            await asyncio.sleep(_RESTART_SECONDS)
