"""The settings of the HTTP service."""

from __future__ import annotations

import msgspec


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    port: int = 8080
    """0: any that is free."""
    connections: int = 10
    """To the database, apart from those of other services."""
    metrics_public: bool = False
    proxy_headers: bool = False
    """Whether to believe X-Forwarded-For and X-Forwarded-Proto."""
    forwarded_allow_ips: str = "127.0.0.1"
    """From whom: addresses or networks with commas between, or *."""
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    head_within: float = 10.0
    """Seconds that a request's line and headers may take to arrive."""
    drain_for: float = 0.0
    """Seconds between being told to stop and closing the port, for a balancer to see that it is not ready."""
    finish_within: float = 10.0
    """Seconds that requests under way have after that."""
