"""Handlers that record what they handle: `pgmb work faults.worker.handlers:app`, set by the environment.

`python -m faults.worker.handlers` does the same by a bare loop of receive and ack, without the app.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pgmb
from faults.worker.handling import Diary

QUEUE = os.environ.get("FAULTS_QUEUE", "ordered")
SIZE = int(os.environ.get("FAULTS_SIZE", "100"))

app = pgmb.App()
diary = Diary(Path(os.environ.get("FAULTS_DIARY", os.devnull)))


@app.on("t", queue=QUEUE)
async def handle(delivery: pgmb.Delivery[Any]) -> None:
    key = str(delivery.key)
    diary.begin(key, delivery.payload, delivery.attempt)
    diary.end(key, delivery.payload, delivery.attempt)


def loop() -> None:
    """Receives, handles one event after the other, and acks with the next receive, until SIGTERM."""
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    with pgmb.connect(app.dsn, max_size=1) as broker:
        held = None
        while not stopped:
            try:
                lease = broker.receive(QUEUE, SIZE, ack=held)
            except pgmb.LeaseLost:
                held = None
                continue
            held = lease or None
            for event in lease:
                key = str(event.key)
                diary.begin(key, event.payload, event.attempt)
                diary.end(key, event.payload, event.attempt)
            if not lease:
                time.sleep(0.002)
        if held is not None:
            held.ack()


if __name__ == "__main__":
    loop()
