"""Starlette with the whole HTTP side mounted at /broker.

PGMB_DSN=postgresql:///shop uvicorn examples.server.starlette_app:app
curl -H "Authorization: Bearer $KEY" -N localhost:8000/broker/v1/streams/main/events?topic=order.%23
curl -d '{"id": 1, "total": 20}' localhost:8000/orders
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from pgmb import aconnect
from pgmb.server import create_app

DSN = os.environ.get("PGMB_DSN", "")

broker_app = create_app(DSN)


async def create_order(request: Request) -> Response:
    order = await request.json()
    published = await request.app.state.broker.publish("order.created", order, key=str(order["id"]))
    return JSONResponse({"event": str(published)}, 201)


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncGenerator[None]:
    async with await aconnect(DSN) as broker, broker_app.lifespan():
        app.state.broker = broker
        yield


app = Starlette(
    routes=[Route("/orders", create_order, methods=["POST"]), Mount("/broker", broker_app)],
    lifespan=lifespan,
)
