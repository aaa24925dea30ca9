"""handlers: a no-op handler of an app against the bare receive loop, in one process by turns.

Both read the same log through queues of their own. What counts is the client's time on a processor.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable

import pgmb
from bench import cpu
from bench.forms import Form
from bench.ground import Ground, Site
from bench.outcome import Outcome, Reading

_BATCH = 500
_BARE, _HANDLERS, _TYPED = "bare loop", "handlers", "handlers, typed"
_WARM = 20_000
_WHAT = (
    "handlers: `async def handle(event: pgmb.Delivery)` that does nothing; typed: a dict decoded from each"
    " payload, which the bare loop does not do"
)


def run(ground: Ground, form: Form) -> Outcome:
    outcome = Outcome("handlers", f"1 process, leases of {_BATCH}, per second of the client's CPU")
    with contextlib.closing(ground.site("pgmb")) as site:
        outcome.readings = asyncio.run(_alternate(site, form))
    outcome.checks = [
        outcome.compare("handlers vs the bare loop", _HANDLERS, _BARE, 0.75, "per_client_cpu"),
    ]
    outcome.notes = [_WHAT]
    return outcome


async def _alternate(site: Site, form: Form) -> list[Reading]:
    readings: list[Reading] = []
    async with await pgmb.aconnect(site.dsn) as broker:
        await broker.create_queue("bare")
        async with _app(site, broker, "plain") as plain, _app(site, broker, "typed") as typed:
            turns: dict[str, Callable[[int], Awaitable[None]]] = {
                _BARE: lambda events: _bare(broker, events),
                _HANDLERS: plain,
                _TYPED: typed,
            }
            # A ratio of two short measurements: their median is steady with some more of them.
            for number in range(-1, max(form.rounds, 7)):
                events = form.consume if number >= 0 else max(form.consume, _WARM)
                site.fill(events)
                names = [*turns][number % 3 :] + [*turns][: number % 3]
                found = [await _measure(site, name, turns[name], events) for name in names]
                # The first round only warms up: leases grow to their size, statements are prepared.
                readings += found if number >= 0 else []
    return readings


async def _measure(site: Site, name: str, turn: Callable[[int], Awaitable[None]], events: int) -> Reading:
    server, wall, own = cpu.of_server(site.server.postmaster_pid), time.perf_counter(), time.process_time()
    await turn(events)
    own, wall = time.process_time() - own, time.perf_counter() - wall
    server = cpu.of_server(site.server.postmaster_pid) - server
    return Reading(name, events, wall, server, own, {"per_client_cpu": events / own})


async def _bare(broker: pgmb.AsyncBroker, events: int) -> None:
    lease, got = None, 0
    while got < events:
        lease = await broker.receive("bare", _BATCH, ack=lease)
        got += len(lease)
    if lease is not None:
        await lease.ack()


@contextlib.asynccontextmanager
async def _app(
    site: Site, broker: pgmb.AsyncBroker, queue: str
) -> AsyncGenerator[Callable[[int], Awaitable[None]]]:
    """What lets an app work through so many events. Between turns its queue is paused."""
    app, left, done, stop = pgmb.App(site.dsn), 0, asyncio.Event(), asyncio.Event()

    async def plain(event: pgmb.Delivery[object]) -> None:
        nonlocal left
        left -= 1
        if not left:
            done.set()

    async def typed(body: dict[str, object]) -> None:
        nonlocal left
        left -= 1
        if not left:
            done.set()

    app.on("#", queue=queue)(plain if queue == "plain" else typed)
    await broker.create_queue(queue)
    await broker.pause(queue)

    async def turn(events: int) -> None:
        nonlocal left
        left = events
        done.clear()
        await broker.resume(queue)
        await done.wait()
        await broker.pause(queue)

    async with asyncio.TaskGroup() as group:
        group.create_task(app.work(stop))
        yield turn
        stop.set()
