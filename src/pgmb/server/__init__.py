"""The HTTP side, one ASGI application: server-sent events, REST, operations, the dashboard.

Needs the extra `server`. The data's way: access.py says who asks, limits.py how much; a part answers.
"""

from __future__ import annotations

from functools import partial

from pgmb._async.broker import AsyncBroker
from pgmb.server import operations
from pgmb.server.application import Application
from pgmb.server.limits import Limits

__all__ = ["Application", "Limits", "create_app"]


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
    parts = [partial(operations.routes, metrics_public=metrics_public)]
    return Application(dsn, parts=parts, broker=broker, limits=limits, max_size=max_size)
