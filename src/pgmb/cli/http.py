"""Options of the HTTP side, as `pgmb serve` and `pgmb http` take them."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, TypeAlias

import typer

from pgmb.cli import durations

Host: TypeAlias = Annotated[str, typer.Option(help="The address to serve HTTP on; 0.0.0.0 or :: for all.")]
Port: TypeAlias = Annotated[int, typer.Option(min=0, max=65535, help="And the port; 0: any that is free.")]
Connections: TypeAlias = Annotated[
    int, typer.Option(min=2, max=1000, help="Connections to the database for HTTP, beside those of others.")
]
MetricsPublic: TypeAlias = Annotated[
    bool, typer.Option("--metrics-public", help="Answer /metrics without a key.")
]
ProxyHeaders: TypeAlias = Annotated[
    bool, typer.Option("--proxy-headers", help="Believe X-Forwarded-For and X-Forwarded-Proto of a proxy.")
]
ForwardedAllowIps: TypeAlias = Annotated[
    str,
    typer.Option(metavar="ADDRESSES", help="Of which proxies: addresses or networks with commas between."),
]
SslCertfile: TypeAlias = Annotated[
    str | None, typer.Option(metavar="FILE", help="Serve HTTPS with this certificate and its chain, PEM.")
]
SslKeyfile: TypeAlias = Annotated[
    str | None, typer.Option(metavar="FILE", help="The certificate's key, if it is not in the same file.")
]
DrainFor: TypeAlias = Annotated[
    timedelta | None,
    typer.Option(
        parser=durations.parse,
        metavar="DURATION",
        help="When told to stop, say so in /readyz for this long before the port closes.",
    ),
]
