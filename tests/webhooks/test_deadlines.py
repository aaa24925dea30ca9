"""Tasks that take too long are ended, those that are cancelled for another reason stay cancelled."""

from __future__ import annotations

import asyncio

import pytest

from pgmb.webhooks.client import Deadlines

pytestmark = pytest.mark.once


async def bounded(deadlines: Deadlines, seconds: float, work: float) -> str:
    task = asyncio.current_task()
    assert task is not None
    deadlines.begin(task, seconds)
    try:
        await asyncio.sleep(work)
    except asyncio.CancelledError:
        if not deadlines.ended(task):
            raise
        return "late"
    finally:
        deadlines.end(task)
    await asyncio.sleep(0)
    return "done"


async def test_what_takes_too_long_ends_and_the_rest_does_not() -> None:
    deadlines = Deadlines()
    said = await asyncio.gather(
        bounded(deadlines, 0.1, 60), bounded(deadlines, 60, 0), bounded(deadlines, 60, 0.2)
    )
    assert [*said] == ["late", "done", "done"]


async def test_one_that_is_cancelled_stays_so() -> None:
    deadlines = Deadlines()
    task = asyncio.create_task(bounded(deadlines, 60, 60))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_one_that_is_cancelled_and_late_at_once_stays_so() -> None:
    deadlines = Deadlines()
    task = asyncio.create_task(bounded(deadlines, 0.0, 60))
    await asyncio.sleep(0)
    # Its deadline is found to have passed, and somebody cancels it before it runs again.
    asyncio.get_running_loop().call_later(0.06, task.cancel)
    done, _ = await asyncio.wait([task], timeout=10)
    assert done
    assert task.cancelled() or task.result() == "late"


async def test_a_task_may_have_one_deadline_after_another() -> None:
    deadlines = Deadlines()
    for _ in range(3):
        assert await bounded(deadlines, 0.05, 60) == "late"
        assert await bounded(deadlines, 60, 0) == "done"
