"""The way in: browsers go to the dashboard, others are told what there is."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from pgmb.server.context import Context


def routes(_: Context) -> list[BaseRoute]:
    return [Route("/", root, methods=["GET"])]


async def root(request: Request) -> Response:
    """Under whatever prefix the application is mounted."""
    below = request.scope.get("root_path", "")
    if "text/html" in request.headers.get("accept", ""):
        return RedirectResponse(f"{below}/ui", 303, headers={"Vary": "Accept"})
    places = {
        "openapi": "/v1/openapi.json",
        "dashboard": "/ui",
        "live": "/livez",
        "ready": "/readyz",
        "metrics": "/metrics",
    }
    return JSONResponse({name: below + path for name, path in places.items()}, headers={"Vary": "Accept"})
