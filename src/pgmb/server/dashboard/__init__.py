"""The dashboard at /ui: server-rendered pages, live through server-sent events.

The data's way: gate.py says who looks, a page's module asks and changes, pages.py renders; sampler.py looks
at everything every few seconds for all viewers together.
"""

from __future__ import annotations

from starlette.routing import BaseRoute, Route

from pgmb.server.context import Context
from pgmb.server.dashboard import audit, dead, endpoints, events, live, login, overview, queues, streams
from pgmb.server.dashboard.assets import Assets
from pgmb.server.dashboard.desk import Desk

__all__ = ["routes"]


def routes(context: Context) -> list[BaseRoute]:
    """Everything under /ui."""
    assets = Assets()
    desk = Desk(context, assets)
    context.on_close(desk.close)
    context.on_drain(desk.drain)
    desk.sampler.start()
    return [
        Route("/ui/static/{name}", assets.serve),
        Route("/ui/login", desk.open(login.show), methods=["GET"]),
        Route("/ui/login", desk.open(login.enter), methods=["POST"]),
        desk.change("/ui/logout", login.leave, "inspect"),
        desk.page("/ui", overview.show),
        desk.page("/ui/", overview.show),
        desk.page("/ui/streams", streams.listing),
        desk.page("/ui/stream", streams.show),
        desk.page("/ui/queues", queues.listing),
        desk.page("/ui/queue", queues.show),
        desk.change("/ui/queue", queues.change),
        desk.page("/ui/events", events.search),
        desk.page("/ui/event", events.show),
        desk.page("/ui/event/raw", events.raw),
        desk.page("/ui/dead", dead.search),
        desk.change("/ui/dead", dead.change),
        desk.page("/ui/dead-letter", dead.show),
        desk.page("/ui/dead-letter/raw", dead.raw),
        desk.page("/ui/endpoints", endpoints.listing),
        desk.page("/ui/endpoint", endpoints.show),
        desk.change("/ui/endpoint", endpoints.change),
        desk.page("/ui/audit", audit.search),
        desk.page("/ui/live", live.stream),
        desk.page("/ui/{rest:path}", desk.nothing),
    ]
