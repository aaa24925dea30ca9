"""A client for `faults upgrade`, run with the package on PYTHONPATH until its standard input ends.

It publishes numbers of its own and consumes those of all clients. At the end it prints JSON: the numbers that
it published and received, its failures, and the seconds of its slowest call.
"""

from __future__ import annotations

import json
import select
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pgmb


def main(dsn: str, first: int) -> None:
    published: list[int] = []
    received: list[int] = []
    failed: list[str] = []
    slowest = 0.0

    def timed(call: Callable[[], Any]) -> Any:
        nonlocal slowest
        began = time.monotonic()
        try:
            return call()
        except Exception as error:
            failed.append(f"{type(error).__name__}: {error}")
            return None
        finally:
            slowest = max(slowest, time.monotonic() - began)

    with pgmb.connect(dsn) as broker:
        broker.create_queue("upgrade", ["number"])
        print("ready", flush=True)
        number = first
        ending = False
        while not ending:
            ending = bool(select.select([sys.stdin], [], [], 0.005)[0])
            if timed(partial(broker.publish, "number", number)) is not None:
                published.append(number)
            number += 1
            lease = timed(partial(broker.receive, "upgrade", max=10))
            if lease and timed(lease.ack) is not None:
                received += [event.payload for event in lease]
    print(json.dumps({"published": published, "received": received, "failed": failed, "slowest": slowest}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
