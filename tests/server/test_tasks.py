"""Promise: an application ends although a background task loses a cancellation."""

from __future__ import annotations

import asyncio

import pytest

from pgmb.server.tasks import cancel_and_wait


async def test_a_task_that_loses_a_cancellation_is_ended() -> None:
    lost = 0
    started = asyncio.Event()

    async def stubborn() -> None:
        nonlocal lost
        while True:
            try:
                started.set()
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                lost += 1
                if lost == 2:
                    raise

    task = asyncio.create_task(stubborn())
    await started.wait()
    async with asyncio.timeout(30):
        await cancel_and_wait(task)
    assert task.cancelled()
    assert lost == 2


@pytest.mark.parametrize("failing", [False, True])
async def test_a_task_that_is_over_stays_as_it_is(failing: bool) -> None:
    async def over() -> None:
        if failing:
            raise ValueError

    task = asyncio.create_task(over())
    await asyncio.wait([task])
    await cancel_and_wait(task)
    assert not task.cancelled()
