"""What workers do at a pace: open loops that publish on time, and polls."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from bench import cpu
from bench.contender import Contender
from bench.crew import Work
from bench.payload import payload, payloads
from bench.wire import Client

# payload() writes the stamp with a leading 1; jsonb puts a space before it.
_STAMP = re.compile(rb'"t": ?1(\d{19})')


def publish_at(client: Client, contender: Contender, *, rate: float, seconds: float, offset: float) -> Work:
    """One event a call, stamped with the time at which it was due, late or not."""
    send = contender.one_publisher(client)
    for number in range(6):
        send(payload(number))

    def measured() -> dict[str, float]:
        start = time.monotonic() + offset
        for number in range(int(rate * seconds)):
            due = start + number / rate
            _wait_until(due)
            send(payload(number, int(due * 1e9)))
        return {"published": int(rate * seconds)}

    return measured


def poll(client: Client, contender: Contender, *, interval: float, seconds: float, size: int) -> Work:
    """Receives and settles every `interval`; the waits of all stamped events, in milliseconds."""
    receive, settle = contender.receiver(client, size)

    def measured() -> dict[str, object]:
        waits: list[float] = []
        end = time.monotonic() + seconds
        bodies: list[bytes] = []
        # What is late is waited for: leaving it out would flatter whoever is slow.
        while (now := time.monotonic()) < end or (bodies and now < end + 10):
            receipt, bodies = receive()
            arrived = time.monotonic_ns()
            if bodies:
                settle(receipt)
            for body in bodies:
                found = _STAMP.search(body)
                if found is not None and (stamp := int(found[1])):
                    waits.append((arrived - stamp) / 1e6)
            _wait_until(now + interval)
        return {"messages": len(waits), "waits": waits}

    return measured


def publish_batches_at(
    client: Client, contender: Contender, *, rate: float, size: int, seconds: float
) -> Work:
    send, batch = contender.publisher(client), payloads(size)

    def measured() -> dict[str, float]:
        start = time.monotonic()
        batches = int(rate * seconds / size)
        for number in range(batches):
            _wait_until(start + number * size / rate)
            send(batch)
        return {"published": batches * size}

    return measured


def consume_and_sample(
    client: Client, contender: Contender, *, interval: float, seconds: float, size: int, postmaster: int
) -> Work:
    """Consumes every `interval`; notes each second the time, the events so far and the server's CPU time."""
    take = contender.consumer(client, size)

    def measured() -> dict[str, object]:
        got = 0
        start = now = time.monotonic()
        samples = [(now, got, cpu.of_server(postmaster))]
        while now < start + seconds:
            _wait_until(now + interval)
            now = time.monotonic()
            got += take()
            if now - samples[-1][0] >= min(1.0, seconds / 10):
                samples.append((now, got, cpu.of_server(postmaster)))
        return {"messages": got, "samples": samples}

    return measured


def maintain(client: Client, contender: Contender, *, going: Callable[[], bool]) -> Work:
    """What the Janitor does: pgmb.maintain() every second."""

    def measured() -> dict[str, float]:
        while going():
            client.connection.execute("select pgmb.maintain()")
            time.sleep(1)
        return {}

    return measured


def _wait_until(due: float) -> None:
    ahead = due - time.monotonic()
    if ahead > 0:
        time.sleep(ahead)
