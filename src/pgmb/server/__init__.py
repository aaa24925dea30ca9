"""The HTTP server, one ASGI application: server-sent events, REST, operations, dashboard.

Needs the extra `server`. `access` identifies the client, `limits` bounds its requests, and one of the parts
(`operations`, `rest`, `sse`, `dashboard`) responds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from prometheus_client import Metric

from pgmb._async.broker import AsyncBroker
from pgmb.server import dashboard, operations, rest, sse
from pgmb.server.application import Application, Part, mounted_at
from pgmb.server.limits import Limits
from pgmb.server.sse import Subscription, create_sse_app

__all__ = ["Application", "Limits", "Subscription", "create_app", "create_sse_app", "mounted_at"]


def create_app(
    dsn: str = "",
    *,
    broker: AsyncBroker | None = None,
    limits: Limits | None = None,
    metrics_public: bool = False,
    max_size: int = 10,
    hung: Callable[[], Sequence[str]] = tuple,
    families: Callable[[], Iterable[Metric]] = tuple,
) -> Application:
    """Create the ASGI application, to serve by itself or to mount into another one.

    It connects to `dsn` with up to `max_size` connections when it starts, or uses the given broker, which it
    does not close. With `metrics_public`, /metrics needs no key. `hung` names background work of this process
    that makes no progress, if any: then /livez is 503. /metrics shows `families`, too.
    """
    parts: list[Part] = [
        partial(operations.routes, metrics_public=metrics_public, families=families),
        rest.routes,
        sse.routes,
        dashboard.routes,
    ]
    return Application(dsn, parts=parts, broker=broker, limits=limits, max_size=max_size, hung=hung)
