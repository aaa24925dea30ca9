"""FastAPI with the whole HTTP side at /broker, and events by the application's own rules at /live.

    PGMB_DSN=postgresql:///shop uvicorn examples.server.fastapi_app:app

What a browser may see at /live is decided here, from the request: a customer, known by a cookie of this
application, sees its own orders and nothing else. It needs no key of the broker's:

    const orders = new EventSource("/live/");
    orders.onmessage = (event) => show(JSON.parse(event.data));
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Cookie, FastAPI, HTTPException, Request, Response

from pgmb import aconnect
from pgmb.server import Subscription, create_app, create_sse_app

DSN = os.environ.get("PGMB_DSN", "")

# In place of a table of sessions: who has which cookie.
CUSTOMERS = {"cookie-of-ann": "ann", "cookie-of-bob": "bob"}


def customer_of(request: Request) -> str | None:
    return CUSTOMERS.get(request.cookies.get("customer", ""))


def own_orders(request: Request) -> Subscription:
    return Subscription(topics=("order.#",), equals={"payload": {"customer": customer_of(request)}})


broker_app = create_app(DSN)
live_app = create_sse_app(
    DSN, authorize=lambda request: customer_of(request) is not None, subscription=own_orders
)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
    async with await aconnect(DSN) as broker, broker_app.lifespan(), live_app.lifespan():
        app.state.broker = broker
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=201)
async def create_order(
    order: dict[str, Any], request: Request, customer: Annotated[str, Cookie()] = ""
) -> dict[str, str]:
    if customer not in CUSTOMERS:
        raise HTTPException(401)
    given = {**order, "customer": CUSTOMERS[customer]}
    published = await request.app.state.broker.publish("order.created", given, key=CUSTOMERS[customer])
    return {"event": str(published)}


@app.get("/healthz")
async def healthz() -> Response:
    return Response("ok\n", media_type="text/plain")


app.mount("/broker", broker_app)
app.mount("/live", live_app)
