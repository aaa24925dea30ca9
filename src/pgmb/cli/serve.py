"""pgmb serve, dispatcher, http, janitor, scheduler, ticker."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from typing import Annotated, TypeAlias

import typer

from pgmb import aconnect
from pgmb._core.logs import LogFormat, configure
from pgmb.cli import durations
from pgmb.cli.options import Dsn
from pgmb.cli.parts import EXTRAS, MODULES, Parts, installed, is_installed, sayer
from pgmb.errors import InvalidArgument
from pgmb.services import SERVICES, HttpSettings
from pgmb.services.supervisor import keep

Host: TypeAlias = Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 or :: for all.")]
Port: TypeAlias = Annotated[
    int, typer.Option(min=0, max=65535, help="The port to listen on; 0 for any free port.")
]
Connections: TypeAlias = Annotated[
    int, typer.Option(min=2, max=1000, help="Maximum number of database connections for HTTP.")
]
MetricsPublic: TypeAlias = Annotated[
    bool, typer.Option("--metrics-public", help="Serve /metrics without an API key.")
]
ProxyHeaders: TypeAlias = Annotated[
    bool, typer.Option("--proxy-headers", help="Trust X-Forwarded-For and X-Forwarded-Proto from proxies.")
]
ForwardedAllowIps: TypeAlias = Annotated[
    str,
    typer.Option(metavar="ADDRESSES", help="Trusted proxies: addresses or networks, separated by commas."),
]
SslCertfile: TypeAlias = Annotated[
    str | None, typer.Option(metavar="FILE", help="Serve HTTPS with this certificate and its chain, PEM.")
]
SslKeyfile: TypeAlias = Annotated[
    str | None, typer.Option(metavar="FILE", help="The certificate's private key, if it is in another file.")
]
DrainFor: TypeAlias = Annotated[
    timedelta | None,
    typer.Option(
        parser=durations.parse,
        metavar="DURATION",
        help="On shutdown, fail /readyz for this long before closing the port.",
    ),
]
Allow: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CIDR",
        help="Allow endpoints in this private network, for example 10.1.0.0/16. May be repeated.",
    ),
]
EgressProxy: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Post through this HTTP proxy, which must refuse private addresses.",
    ),
]
Services: TypeAlias = Annotated[
    str | None,
    typer.Option(help=f"Which of {', '.join(sorted(SERVICES))}, separated by commas. [default: all]"),
]
Log: TypeAlias = Annotated[LogFormat, typer.Option("--log-format", help="Log format: text or JSON.")]
AccessLog: TypeAlias = Annotated[
    bool, typer.Option("--access-log/--no-access-log", help="Log each HTTP request.", show_default=True)
]


InOneProcess: TypeAlias = Annotated[
    bool,
    typer.Option("--in-one-process", help="Run all services in this process. For demos and tests."),
]


def register(app: typer.Typer) -> None:
    for command in (serve, dispatcher, http, janitor, scheduler, ticker):
        app.command()(command)


def serve(
    dsn: Dsn = "",
    services: Services = None,
    allow: Allow = None,
    egress_proxy: EgressProxy = None,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    connections: Connections = 10,
    metrics_public: MetricsPublic = False,
    proxy_headers: ProxyHeaders = False,
    forwarded_allow_ips: ForwardedAllowIps = "127.0.0.1",
    ssl_certfile: SslCertfile = None,
    ssl_keyfile: SslKeyfile = None,
    drain_for: DrainFor = None,
    in_one_process: InOneProcess = False,
    access_log: AccessLog = True,
    log_format: Log = LogFormat.TEXT,
) -> None:
    """Run background services and HTTP until interrupted. You can run several.

    HTTP, the dispatcher, and the upkeep (ticker, janitor, scheduler) each run in a process of their own,
    which is started again when it ends or hangs. The dispatcher needs the extra `webhooks`, HTTP the extra
    `server`. Without `--services`, the installed services run.
    """
    settings = HttpSettings(
        host=host,
        port=port,
        connections=connections,
        metrics_public=metrics_public,
        proxy_headers=proxy_headers,
        forwarded_allow_ips=forwarded_allow_ips,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        drain_for=0.0 if drain_for is None else drain_for.total_seconds(),
    )
    names = installed() if services is None else _asked(services)
    # Before anything runs: a port that is taken is known at once.
    parts = Parts(names, settings, allow or (), egress_proxy, dsn)
    configure(log_format)
    if not access_log:
        logging.getLogger("pgmb.access").setLevel(logging.WARNING)
    say = sayer(log_format)
    left_out = sorted(set(SERVICES) - set(names)) if services is None else []
    keyless = asyncio.run(_keyless(dsn, parts))

    def greet() -> None:
        # Said once signals are handled.
        parts.greet(say, left_out, keyless=keyless)

    if in_one_process or len(parts.processes) == 1:
        parts.run(greet)
        return
    code = asyncio.run(keep(parts.children(), parts.board, greet))
    if code:
        raise typer.Exit(code)


async def _keyless(dsn: str, parts: Parts) -> bool:
    """Connect to the database, to tell mistakes at once. Whether clients of HTTP still need a first key."""
    async with await aconnect(
        dsn, max_size=1, max_wait=5.0, fallback_application_name="pgmb serve"
    ) as broker:
        return parts.http is not None and not await broker.api_keys()


def dispatcher(
    dsn: Dsn = "", allow: Allow = None, egress_proxy: EgressProxy = None, log_format: Log = LogFormat.TEXT
) -> None:
    """Run the dispatcher: post events to webhooks."""
    serve(dsn, "dispatcher", allow, egress_proxy, log_format=log_format)


def http(
    dsn: Dsn = "",
    host: Host = "127.0.0.1",
    port: Port = 8080,
    connections: Connections = 10,
    metrics_public: MetricsPublic = False,
    proxy_headers: ProxyHeaders = False,
    forwarded_allow_ips: ForwardedAllowIps = "127.0.0.1",
    ssl_certfile: SslCertfile = None,
    ssl_keyfile: SslKeyfile = None,
    drain_for: DrainFor = None,
    access_log: AccessLog = True,
    log_format: Log = LogFormat.TEXT,
) -> None:
    """Serve HTTP: REST, server-sent events, the dashboard, metrics."""
    serve(
        dsn,
        "http",
        host=host,
        port=port,
        connections=connections,
        metrics_public=metrics_public,
        proxy_headers=proxy_headers,
        forwarded_allow_ips=forwarded_allow_ips,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        drain_for=drain_for,
        access_log=access_log,
        log_format=log_format,
    )


def janitor(dsn: Dsn = "", log_format: Log = LogFormat.TEXT) -> None:
    """Run the janitor: segment rotation, retention and cleanup."""
    serve(dsn, "janitor", log_format=log_format)


def scheduler(dsn: Dsn = "", log_format: Log = LogFormat.TEXT) -> None:
    """Run the scheduler: publish the events of schedules."""
    serve(dsn, "scheduler", log_format=log_format)


def ticker(dsn: Dsn = "", log_format: Log = LogFormat.TEXT) -> None:
    """Run the ticker: write ticks, which wake idle consumers and readers."""
    serve(dsn, "ticker", log_format=log_format)


def _asked(services: str) -> list[str]:
    """The services of a comma-separated list. Raises for unknown services and missing extras."""
    names = list(dict.fromkeys(name.strip() for name in services.split(",") if name.strip()))
    unknown = sorted(set(names) - set(SERVICES))
    if unknown or not names:
        refused = InvalidArgument(f"unknown service: {', '.join(unknown) or repr(services)}")
        refused.advise(f"Services are {', '.join(sorted(SERVICES))}.")
        raise refused
    require(*names)
    return names


def require(*services: str) -> None:
    """Raise unless the extras of these services are installed."""
    for name in services:
        if not is_installed(name):
            missing = InvalidArgument(f"the service {name} needs {', '.join(MODULES[name])}")
            missing.advise(f"pip install 'pgmb[{EXTRAS[name]}]'")
            raise missing
