"""Litestar with the whole HTTP side mounted at /broker.

    PGMB_DSN=postgresql:///shop uvicorn examples.server.litestar_app:app

Litestar cuts the prefix off the path and does not say so: `mounted_at` puts that right.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from litestar import Litestar, Request, asgi, post

from pgmb import aconnect
from pgmb.server import create_app, mounted_at

DSN = os.environ.get("PGMB_DSN", "")

broker_app = create_app(DSN)


@post("/orders")
async def create_order(request: Request[Any, Any, Any]) -> dict[str, str]:
    order = await request.json()
    published = await request.app.state.broker.publish("order.created", order, key=str(order["id"]))
    return {"event": str(published)}


@asynccontextmanager
async def lifespan(app: Litestar) -> AsyncGenerator[None]:
    async with await aconnect(DSN) as broker, broker_app.lifespan():
        app.state.broker = broker
        yield


app = Litestar(
    route_handlers=[
        create_order,
        asgi("/broker", is_mount=True, copy_scope=True)(mounted_at("/broker", broker_app)),
    ],
    lifespan=[lifespan],
)
