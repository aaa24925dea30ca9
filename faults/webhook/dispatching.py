"""A dispatcher that kills itself: `python -m faults.webhook.dispatching STEP TIME NAME`.

It does so when it reaches that step of a delivery for the TIMEth time. Every request names its process.
A liar serves to show that the judge can fail: of four posts it makes one up, and makes another one twice.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import aiohttp
from psycopg.pq import TransactionStatus

import pgmb
from pgmb.services import Dispatcher, serve
from pgmb.webhooks import dispatcher
from pgmb.webhooks.client import AttemptResult, WebhookClient
from pgmb.webhooks.leases import Settlement
from pgmb.webhooks.request import Request
from pgmb.webhooks.store import Store

STEPS = ("received", "before the post", "posted", "answered", "settling", "settled")
LIVE, LIAR = "live", "liar"
PROCESS = "x-process"
LEASE_FOR = 3.0
"""Seconds: what a killed one held comes again soon; one that lives keeps what it has, however slow."""
_HEARTBEAT_EVERY = 0.5
_receive, _claim, _settle, _settle_all = Store.receive, Store.claim, Store._settle, Store.settle  # noqa: SLF001
_post, _write = WebhookClient.post, aiohttp.ClientRequest.write_bytes


class Fuse:
    """Burns down with every time that its step is reached."""

    def __init__(self, step: str, time: int) -> None:
        self._step = step
        self._left = time

    def reached(self, step: str) -> None:
        if step == self._step:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def install(fuse: Fuse, step: str, name: str) -> None:
    """Into the classes of this process."""
    posts = 0

    async def receive(store: Store, *given: Any) -> Any:
        got = await _receive(store, *given)
        if got:
            fuse.reached("received")
        return got

    async def claim(store: Store, *given: Any) -> Any:
        got = await _claim(store, *given)
        if got:
            fuse.reached("received")
        return got

    async def settle(store: Store, report: Settlement) -> None:
        await _settle(store, report)
        # Not where all have failed, which come again in any case, nor where it is committed already.
        open_ = store._connection.info.transaction_status is TransactionStatus.INTRANS  # noqa: SLF001
        if open_ and (report.done or not report.claimed):
            fuse.reached("settling")

    async def settle_all(store: Store, *given: Any) -> Any:
        found = await _settle_all(store, *given)
        fuse.reached("settled")
        return found

    async def post(poster: WebhookClient, request: Request, *given: Any) -> AttemptResult:
        nonlocal posts
        posts += 1
        request.headers[PROCESS] = name
        fuse.reached("before the post")
        if posts % 4 == 0 and step == LIAR:
            return AttemptResult(204, 0.0, None, None, None, None, "delivered")
        if posts % 4 == 2 and step == LIAR:
            await _post(poster, request, *given)
        attempted = await _post(poster, request, *given)
        fuse.reached("answered")
        return attempted

    async def write(request: aiohttp.ClientRequest, *given: Any) -> None:
        await _write(request, *given)
        fuse.reached("posted")

    for owner, method, replacement in (
        (Store, "receive", receive),
        (Store, "claim", claim),
        (Store, "_settle", settle),
        (Store, "settle", settle_all),
        (WebhookClient, "post", post),
        (aiohttp.ClientRequest, "write_bytes", write),
    ):
        setattr(owner, method, replacement)


async def main(step: str, time: int, name: str) -> None:
    install(Fuse(step, time), step, name)
    # So that one that was started takes its part at once.
    dispatcher.HEARTBEAT_EVERY = _HEARTBEAT_EVERY  # type: ignore[misc]
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with await pgmb.aconnect(os.environ["PGMB_DSN"], max_size=2) as broker:
        await serve(broker, [Dispatcher(("127.0.0.0/8",), lease_for=LEASE_FOR)], stop)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
