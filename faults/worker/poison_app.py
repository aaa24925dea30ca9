"""Handlers that fail in every way there is: `pgmb work faults.worker.poison_app:app`."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

import pgmb
from faults.worker.handling import Diary

MAX_ATTEMPTS = 4

app = pgmb.App(grace=5)
app.queue("jobs", lease_for=1, max_attempts=MAX_ATTEMPTS, concurrency=8)
diary = Diary(Path(os.environ.get("FAULTS_DIARY", os.devnull)))


@dataclass
class Job:
    number: int
    kind: str


@app.on("job", queue="jobs", timeout=0.3, retry=0)
async def work(delivery: pgmb.Delivery[Job]) -> None:
    job = delivery.payload
    diary.begin(job.kind, job.number, delivery.attempt)
    if job.kind == "raises" or (job.kind == "fails-once" and delivery.attempt == 1):
        raise ValueError(f"job {job.number} cannot be done")
    if job.kind == "hangs":
        await asyncio.sleep(3600)
    if job.kind == "exits":
        os._exit(3)
    diary.end(job.kind, job.number, delivery.attempt)
