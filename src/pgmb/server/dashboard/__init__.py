"""The dashboard at /ui: server-rendered pages, kept live by server-sent events.

`auth` identifies the visitor, `PageRouter` calls the handler of a page (in `pages`, `queues`, `events`,
`dead_letters`, `endpoints`, `schedules`), and `rendering` renders it. `forms` creates and changes queues and
endpoints. `sampler` reads the database every few seconds for all viewers together.
"""

from __future__ import annotations

from starlette.routing import BaseRoute, Route

from pgmb.server.application import Context
from pgmb.server.dashboard import dead_letters, endpoints, events, pages, queues, schedules
from pgmb.server.dashboard.rendering import Assets
from pgmb.server.dashboard.router import PageRouter

__all__ = ["routes"]


def routes(context: Context) -> list[BaseRoute]:
    """All routes under /ui."""
    assets = Assets()
    router = PageRouter(context, assets)
    context.on_close(router.close)
    context.on_drain(router.drain)
    router.sampler.start()
    return [
        Route("/ui/static/{name}", assets.serve),
        Route("/ui/login", router.open(pages.show_login), methods=["GET"]),
        Route("/ui/login", router.open(pages.log_in), methods=["POST"]),
        router.change("/ui/logout", pages.log_out, "inspect"),
        router.page("/ui", pages.show_overview),
        router.page("/ui/", pages.show_overview),
        router.page("/ui/streams", pages.list_streams),
        router.page("/ui/stream", pages.show_stream),
        router.page("/ui/queues", queues.listing),
        router.page("/ui/queue", queues.show),
        router.change("/ui/queue", queues.change),
        router.page("/ui/queue/edit", queues.editor.show),
        router.change("/ui/queue/edit", queues.editor.save),
        router.page("/ui/events", events.search),
        router.page("/ui/event", events.show),
        router.page("/ui/event/raw", events.raw),
        router.page("/ui/dead", dead_letters.search),
        router.change("/ui/dead", dead_letters.change),
        router.page("/ui/dead-letter", dead_letters.show),
        router.page("/ui/dead-letter/raw", dead_letters.raw),
        router.page("/ui/endpoints", endpoints.listing),
        router.page("/ui/endpoint", endpoints.show),
        router.change("/ui/endpoint", endpoints.change),
        router.page("/ui/endpoint/edit", endpoints.editor.show),
        router.change("/ui/endpoint/edit", endpoints.editor.save),
        router.page("/ui/workers", pages.list_workers),
        router.page("/ui/schedules", schedules.listing),
        router.page("/ui/schedule", schedules.show),
        router.change("/ui/schedule", schedules.change),
        router.page("/ui/keys", pages.list_keys),
        router.page("/ui/audit", pages.search_audit),
        router.page("/ui/live", pages.stream_samples),
        router.page("/ui/{rest:path}", router.nothing),
    ]
