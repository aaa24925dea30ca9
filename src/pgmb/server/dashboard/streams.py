"""Streams: what they hold, who reads them, what retention would drop."""

from __future__ import annotations

from starlette.responses import Response

from pgmb.server.dashboard.desk import Desk
from pgmb.server.dashboard.gate import Visit


async def listing(desk: Desk, visit: Visit) -> Response:
    sample = await desk.sampler.latest()
    streams = await desk.rows("select * from pgmb.describe_streams()")
    readers = [reader["stream"] for reader in sample.readers]
    queues = [queue["stream"] for queue in sample.queues]
    for stream in streams:
        stream["rate"] = sample.published.get(stream["stream"], 0.0)
        stream["readers"] = readers.count(stream["stream"])
        stream["queues"] = queues.count(stream["stream"])
    return desk.render(visit, "streams.html", streams=streams)


async def show(desk: Desk, visit: Visit) -> Response:
    name = visit.needed("name")
    sample = await desk.sampler.latest()
    settings = (await desk.rows("select pgmb.stream_settings(%s) settings", (name,)))[0]["settings"]
    segments = await desk.rows("select * from pgmb.stream_segments(%s)", (name,))
    status = await desk.rows("select * from pgmb.describe_streams() where stream = %s", (name,))
    readers = await desk.rows(
        "select reader, confirmed_at, waiting, waiting_bytes, lag, held_segments, held_for, lost"
        " from pgmb.describe_readers() where stream = %s",
        (name,),
    )
    return desk.render(
        visit,
        "stream.html",
        name=name,
        settings=settings,
        segments=segments,
        standing=status[0],
        rate=sample.published.get(name, 0.0),
        readers=readers,
        queues=[queue for queue in sample.queues if queue["stream"] == name],
    )
