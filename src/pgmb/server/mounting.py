"""Mounting into a host that says where it has mounted something otherwise than ASGI asks for."""

from __future__ import annotations

from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send


def mounted_at(prefix: str, application: ASGIApp) -> ASGIApp:
    """For hosts that cut the prefix off the path, as Litestar does, and do not tell.

    The whole path comes back, and `root_path` says which part of it is the host's: so links lead to where
    they should. Starlette and FastAPI do that by themselves.
    """

    async def asgi(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            above = scope.get("root_path", "")
            raw = scope.get("raw_path")
            path = (
                above + prefix + scope["path"]
                if raw is None
                else unquote(raw.partition(b"?")[0].decode("latin-1"))
            )
            scope = {**scope, "path": path, "root_path": above + prefix}
        await application(scope, receive, send)

    return asgi
