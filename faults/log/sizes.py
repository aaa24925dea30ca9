"""A burst of large events beside small ones: all are delivered, the small ones soon, in bounded batches."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

import pgmb
from faults.crew import Crew
from harness.dispatchers import Dispatchers, wait_settled
from harness.receiver import ReceiverProcess

_MIB = 1 << 20
_ENDPOINT_EVENT = 4 * _MIB
_QUEUE_EVENT = 40 * 1000 * 1000
_BATCH = 32 * _MIB
_SMALL_EVERY = 0.2
_KINDS = {"plain": "", "ordered": ", ordered => true", "fair": ", fair_by => 'key'"}
SOON = 5.0
"""Seconds within which a small event must arrive."""


@dataclass(slots=True)
class Result:
    expected: int
    delivered: int = 0
    largest: int = 0
    """Bytes of payloads in one lease or page."""
    slowest: float = 0.0
    """Seconds from publishing a small event to its delivery."""
    memory: int = 0
    """The largest server process, in MiB."""
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        bounded = self.largest < _BATCH + _QUEUE_EVENT
        return self.delivered == self.expected and self.slowest < SOON and bounded

    def __str__(self) -> str:
        return (
            f"sizes {'holds' if self.holds else 'VIOLATED'}: {self.delivered} of {self.expected} delivered, "
            f"small ones within {self.slowest:.1f} s, largest batch {self.largest / _MIB:.0f} MiB"
            f" | server process {self.memory} MiB | {self.seconds:.1f} s"
        )


def run(dsn: str, *, endpoints: int, endpoint_events: int, queue_events: int) -> Result:
    """Large events for queues of all kinds and for endpoints, small ones for an endpoint beside them."""
    began = time.monotonic()
    posted = endpoints * endpoint_events
    result = Result(posted + (len(_KINDS) + 1) * queue_events)
    crew, ended = Crew(), threading.Event()
    with (
        psycopg.connect(dsn, autocommit=True) as admin,
        pgmb.connect(dsn, max_size=8) as broker,
        ReceiverProcess() as large,
        ReceiverProcess() as small,
    ):
        admin.execute("select pgmb.create_stream('hooks'), pgmb.create_stream('small')")
        for kind, options in _KINDS.items():
            admin.execute(f"select pgmb.create_queue('{kind}'{options})")
        for number in range(endpoints):
            admin.execute(
                "select pgmb.create_endpoint(%s, %s, '{large}', stream => 'hooks')",
                [f"e{number}", f"{large.url}/{number}"],
            )
        admin.execute("select pgmb.create_endpoint('s', %s, '{small}', stream => 'small')", [small.url])
        start = broker.position()
        with Dispatchers(dsn):
            neighbours = crew.start("neighbours", lambda: _neighbours(broker, small, ended, result))
            consumers = [
                crew.start(kind, partial(_consume, broker, kind, queue_events, result)) for kind in _KINDS
            ]
            _publish(admin, endpoint_events, queue_events)
            crew.join(*consumers)
            _read_pages(broker, start, result)
            large.wait_for(posted)
            # While these publish there is always an event on its way.
            ended.set()
            crew.join(neighbours)
            wait_settled(admin)
            result.memory = _memory(dsn)
        result.delivered += min(large.count(), posted)
    result.seconds = time.monotonic() - began
    return result


def _publish(connection: psycopg.Connection[Any], endpoint_events: int, queue_events: int) -> None:
    # Digits at random are stored as they are, a repeated letter as a ninetieth.
    connection.execute(
        "with large as materialized (select to_json(string_agg(md5(n::text), '')) payload"
        " from generate_series(1, %s) n) select pgmb.publish('large', payload, stream => 'hooks')"
        " from large, generate_series(1, %s)",
        [_ENDPOINT_EVENT // 32, endpoint_events],
    )
    connection.execute(
        "with large as materialized (select to_json(repeat('x', %s)) payload)"
        " select pgmb.publish('large', payload, key => (n %% 3)::text) from large, generate_series(1, %s) n",
        [_QUEUE_EVENT - 2, queue_events],
    )


def _consume(broker: pgmb.Broker, queue: str, events: int, result: Result) -> None:
    seen: set[int] = set()
    while len(seen) < events:
        lease = broker.receive(queue, 500)
        if not lease:
            time.sleep(0.05)
            continue
        result.largest = max(result.largest, sum(len(event.raw) for event in lease))
        seen.update(event.seq for event in lease)
        lease.ack()
    result.delivered += len(seen)


def _read_pages(broker: pgmb.Broker, start: pgmb.Position, result: Result) -> None:
    upto, seq = broker.position(), 0
    while page := broker.between("main", start, upto, seq, lake=False):
        result.largest = max(result.largest, sum(len(event.raw) for event in page))
        result.delivered += len(page)
        seq = page[-1].seq


def _neighbours(
    broker: pgmb.Broker, receiver: ReceiverProcess, ended: threading.Event, result: Result
) -> None:
    """Small events to an endpoint of another stream, one after another."""
    arrived = 0
    while not ended.wait(_SMALL_EVERY):
        began = time.monotonic()
        broker.publish("small", arrived, stream="small")
        arrived += 1
        receiver.wait_for(arrived)
        result.slowest = max(result.slowest, time.monotonic() - began)


def _memory(dsn: str) -> int:
    with psycopg.connect(dsn, autocommit=True) as connection:
        pids: list[Any] = connection.execute("select pid from pg_stat_activity").fetchall()
    largest = 0
    for (pid,) in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        for line in status.splitlines():
            if line.startswith("VmHWM:"):
                largest = max(largest, int(line.split()[1]) // 1024)
    return largest
