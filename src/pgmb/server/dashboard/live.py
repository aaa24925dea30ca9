"""Samples as server-sent events: first all that is remembered, then each as it is taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec
from starlette.responses import Response, StreamingResponse

from pgmb.server.dashboard import curves
from pgmb.server.dashboard.curves import Scope
from pgmb.server.dashboard.desk import Desk
from pgmb.server.dashboard.formats import counted
from pgmb.server.dashboard.gate import Visit
from pgmb.server.dashboard.headers import PAGE
from pgmb.server.dashboard.sampler import Sample
from pgmb.server.problems import Problem
from pgmb.server.sse.frame import frame, retry

_HEARTBEAT = 15.0
_MOST_VIEWERS = 200


async def stream(desk: Desk, visit: Visit) -> Response:
    if desk.sampler.watchers >= _MOST_VIEWERS:
        raise Problem(503, "busy", "too many look at this process already", headers={"Retry-After": "10"})
    headers = {**PAGE, "Cache-Control": "no-store, no-transform", "X-Accel-Buffering": "no"}
    if visit.request.method == "HEAD":
        return Response(headers=headers, media_type="text/event-stream")
    return StreamingResponse(_told(desk, visit), headers=headers, media_type="text/event-stream")


async def _told(desk: Desk, visit: Visit) -> AsyncGenerator[bytes]:
    sampler = desk.sampler
    scope = Scope(
        visit.given("queue"),
        visit.given("stream"),
        visit.given("endpoint"),
        visit.given("endpoints") is not None,
    )
    with sampler.watching():
        # A viewer who goes away in the middle of a statement must not take its connection along.
        newest = await asyncio.shield(sampler.latest())
        yield retry(2000)
        at = [round(sample.at, 1) for sample in sampler.samples]
        yield _message("history", newest, {"at": at, "curves": desk.curves.of(scope)})
        async for sample in sampler.following(newest.number, _HEARTBEAT):
            if sample is None:
                yield b": \n\n"
            else:
                told = curves.last(desk.curves.of(scope))
                yield _message("sample", sample, {"at": round(sample.at, 1), "curves": told})
            # A key that was taken back, or a session that ended elsewhere, is no longer told.
            if await asyncio.shield(desk.context.access.principal(visit.request)) is None:
                return


def _message(event: str, sample: Sample, told: dict[str, object]) -> bytes:
    badges = {"dead": counted(int(sample.total("dead"))), "tripped": counted(sample.endpoints["tripped"])}
    return frame(msgspec.json.encode({**told, "marks": sample.marks, "badges": badges}), event=event)
