"""Waiting for something to become true, for as long as a busy machine may take."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any, Final

PATIENCE: Final = 60.0
"""Seconds."""


async def until(condition: Callable[[], Any], seconds: float = PATIENCE) -> None:
    """`condition` may be a coroutine function."""
    async with asyncio.timeout(seconds):
        while True:
            found = condition()
            if await found if inspect.isawaitable(found) else found:
                return
            await asyncio.sleep(0.01)


def until_true(condition: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """The first answer of `condition` that is true."""
    end = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < end, "it did not become true in time"
        time.sleep(0.02)
    return answer
