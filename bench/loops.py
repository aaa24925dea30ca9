"""What workers do: each function gets ready, warm-up included, and returns the measured part."""

from __future__ import annotations

import time
from collections.abc import Callable

from bench.contender import Contender
from bench.crew import Work
from bench.payload import TOPIC, payload, payloads
from bench.wire import Client

# A prepared statement is planned anew five times before its generic plan is considered.
_WARM = 6
_IDLE = 0.001


def publish(client: Client, contender: Contender, *, batches: int, size: int) -> Work:
    send, batch = contender.publisher(client), payloads(size)
    for _ in range(_WARM):
        send(batch)

    def measured() -> dict[str, float]:
        for _ in range(batches):
            send(batch)
        return {"messages": batches * size}

    return measured


def publish_for(client: Client, contender: Contender, *, seconds: float, size: int) -> Work:
    send, batch = contender.publisher(client), payloads(size)
    for _ in range(_WARM):
        send(batch)

    def measured() -> dict[str, float]:
        published, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            send(batch)
            published += size
        return {"published": published}

    return measured


def copy(client: Client, contender: Contender, *, events: int) -> Work:
    rows = min(events, 10_000)
    chunk = b"".join(TOPIC.encode() + b"\t" + payload(number) + b"\n" for number in range(rows))
    target = contender.copy_target
    assert target is not None
    client.copy(target, chunk[: len(chunk) // rows], 1)

    def measured() -> dict[str, float]:
        client.copy(target, chunk, events // rows)
        return {"messages": events // rows * rows}

    return measured


def consume(client: Client, contender: Contender, *, events: int, size: int) -> Work:
    """Until so many were received. The backlog must hold them, and `warm_up` more batches."""
    take = contender.consumer(client, size)
    for _ in range(_WARM):
        take()

    def measured() -> dict[str, float]:
        got = empty = 0
        while got < events:
            part = take()
            got += part
            empty = 0 if part else empty + 1
            if empty > 5000:
                raise RuntimeError(f"{contender.name}: nothing more after {got} of {events}")
            if not part:
                time.sleep(_IDLE)
        return {"messages": got}

    return measured


def consume_for(client: Client, contender: Contender, *, seconds: float, size: int) -> Work:
    take = contender.consumer(client, size)
    for _ in range(_WARM):
        take()

    def measured() -> dict[str, float]:
        got, calls, end = 0, 0, time.monotonic() + seconds
        while time.monotonic() < end:
            part = take()
            calls += 1
            got += part
            if not part:
                time.sleep(_IDLE)
        return {"messages": got, "calls": calls}

    return measured


def receive_and_settle_for(client: Client, contender: Contender, *, seconds: float, size: int) -> Work:
    """Receives and settles in two calls, for so long."""
    receive, settle = contender.receiver(client, size)
    step = _stepper(receive, settle)
    for _ in range(_WARM):
        step()

    def measured() -> dict[str, float]:
        got, empty, end = 0, 0, time.monotonic() + seconds
        while time.monotonic() < end:
            part = step()
            got += part
            empty += not part
        return {"messages": got, "empty": empty}

    return measured


def claim(client: Client, contender: Contender, *, claims: int, size: int) -> Work:
    """Receives and settles in two calls, so many times; tells how many buffers that touched."""
    receive, settle = contender.receiver(client, size)
    step = _stepper(receive, settle)
    for _ in range(_WARM):
        step()

    def measured() -> dict[str, float]:
        before = _buffers(client)
        for _ in range(claims):
            if not step():
                raise RuntimeError(f"{contender.name}: the queue ran empty")
        return {"messages": claims, "buffers": (_buffers(client) - before) / claims}

    return measured


def _buffers(client: Client) -> int:
    client.connection.execute("select pg_stat_force_next_flush()")
    row = client.connection.execute(
        "select blks_hit + blks_read from pg_stat_database where datname = current_database()"
    ).fetchone()
    assert row is not None
    return int(row[0])


def _stepper(
    receive: Callable[[], tuple[object, list[bytes]]], settle: Callable[[object], None]
) -> Callable[[], int]:
    def step() -> int:
        receipt, bodies = receive()
        if bodies:
            settle(receipt)
        return len(bodies)

    return step


WARM_BATCHES = _WARM
