"""The HTTP side, one ASGI application: server-sent events, REST, operations, the dashboard.

Needs the extra `server`. The data's way: access.py says who asks, limits.py how much; a part answers.
"""

from __future__ import annotations

from functools import partial

from pgmb._async.broker import AsyncBroker
from pgmb.server import dashboard, operations, rest, root, sse
from pgmb.server.application import Application, Part
from pgmb.server.limits import Limits
from pgmb.server.mounting import mounted_at
from pgmb.server.sse import Subscription, create_sse_app

__all__ = ["Application", "Limits", "Subscription", "create_app", "create_sse_app", "mounted_at"]


def create_app(
    dsn: str = "",
    *,
    broker: AsyncBroker | None = None,
    limits: Limits | None = None,
    metrics_public: bool = False,
    max_size: int = 10,
) -> Application:
    """The whole HTTP side as one ASGI application, to be served by itself or mounted into another one.

    It connects to `dsn` with up to `max_size` connections when it starts, or uses the broker that it is given
    and leaves it open. `metrics_public`: /metrics answers without a key.
    """
    parts: list[Part] = [
        root.routes,
        partial(operations.routes, metrics_public=metrics_public),
        rest.routes,
        sse.routes,
        dashboard.routes,
    ]
    return Application(dsn, parts=parts, broker=broker, limits=limits, max_size=max_size)
