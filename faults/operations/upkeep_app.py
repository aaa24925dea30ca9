"""A worker whose handler holds up its process: `pgmb work faults.operations.upkeep_app:app`."""

from __future__ import annotations

import time

import pgmb

app = pgmb.App()
app.queue("slow", stream="slow", lease_for=60)


@app.on("block", queue="slow")
async def block(seconds: float) -> None:
    # Not asyncio.sleep: the event loop, and with it all else in this process, waits.
    time.sleep(seconds)  # noqa: ASYNC251
