"""Ending background tasks."""

from __future__ import annotations

import asyncio
from typing import Any, Final

_AGAIN_AFTER: Final = 0.2


async def end(task: asyncio.Task[Any]) -> None:
    """Cancel a task until it has ended, whatever it ends with.

    One cancellation can be lost: `asyncio.wait_for` of Python 3.11 returns the result if it comes in the same
    moment, and a statement that is cancelled with the task may end it with an error that the task handles.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_AGAIN_AFTER)
    if not task.cancelled():
        task.exception()
