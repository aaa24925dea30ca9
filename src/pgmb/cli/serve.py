"""pgmb serve, dispatcher, http, janitor, scheduler, ticker."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib.util import find_spec
from typing import Annotated, TypeAlias
from uuid import UUID, uuid4

import psycopg
import typer
from psycopg_pool import PoolTimeout

from pgmb import aconnect
from pgmb._core.logs import LogFormat, configure
from pgmb.cli import durations, output
from pgmb.cli.options import Dsn
from pgmb.errors import InvalidArgument, PgmbError
from pgmb.services import SERVICES, Dispatcher, Http, HttpSettings, Leadership, Service, Turns
from pgmb.services import serve as serve_services
from pgmb.services.fork import Board
from pgmb.services.parent import Parent
from pgmb.services.supervisor import Child, keep

logger = logging.getLogger("pgmb.services")

_EXTRAS = {"dispatcher": "webhooks", "http": "server"}
_MODULES = {
    "dispatcher": ("aiohttp", "cryptography"),
    "http": ("starlette", "uvicorn", "jinja2", "prometheus_client"),
}
"""What a service imports that only an extra brings."""

_END_WITHIN_SECONDS = 28.0
"""After SIGTERM, beside --drain-for: orchestrators kill a process after 30 seconds."""

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
    names = sorted(filter(_here, SERVICES)) if services is None else _asked(services)
    turns, board = Turns(), Board()

    def hung() -> list[str]:
        return [*turns.hung(), *board.read()]

    made = [_service(name, dsn, allow or (), egress_proxy, settings, hung) for name in names]
    # Before anything runs: a port that is taken is known at once.
    serving = next((service for service in made if isinstance(service, Http)), None)
    if serving is not None:
        serving.bind()
    configure(log_format)
    if not access_log:
        logging.getLogger("pgmb.access").setLevel(logging.WARNING)
    # Machines that read JSON get nothing else.
    say = output.line if log_format is LogFormat.TEXT else logger.info
    left_out = sorted(set(SERVICES) - set(names)) if services is None else []
    # Said once signals are handled.
    greet = asyncio.run(_greeting(dsn, made, left_out, serving, say))
    end_within = settings.drain_for + _END_WITHIN_SECONDS
    processes = _processes(made)
    if in_one_process or len(processes) == 1:
        board.close()
        _run(dsn, made, turns, end_within, uuid4(), greet=greet)
        return
    children = [
        _child(name, dsn, parts, turns, end_within, serving if serving not in parts else None)
        for name, parts in processes.items()
    ]
    _share_imports(names)
    code = asyncio.run(keep(children, board, greet))
    if code:
        raise typer.Exit(code)


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
        if not _here(name):
            missing = InvalidArgument(f"the service {name} needs {', '.join(_MODULES[name])}")
            missing.advise(f"pip install 'pgmb[{_EXTRAS[name]}]'")
            raise missing


def _here(service: str) -> bool:
    """Whether what it needs is installed."""
    return all(find_spec(module) is not None for module in _MODULES.get(service, ()))


def _service(
    name: str,
    dsn: str,
    allow: Sequence[str],
    egress_proxy: str | None,
    settings: HttpSettings,
    hung: Callable[[], Sequence[str]],
) -> Service:
    match name:
        case "dispatcher":
            return Dispatcher(allow, egress_proxy)
        case "http":
            return Http(dsn, settings, hung)
        case _:
            return SERVICES[name]()


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop


async def _greeting(
    dsn: str,
    services: Sequence[Service],
    left_out: Sequence[str],
    http: Http | None,
    say: Callable[[str], None],
) -> Callable[[], None]:
    """Connect to the database, to tell mistakes at once. Returns a function that says what is served."""
    async with await aconnect(
        dsn, max_size=1, max_wait=5.0, fallback_application_name="pgmb serve"
    ) as broker:
        keyless = http is not None and not await broker.api_keys()

    def greet() -> None:
        say(f"Serving {', '.join(service.name for service in services)}.")
        for name in left_out:
            note = output.note if say is output.line else say
            note(f"{name} is not installed: pip install 'pgmb[{_EXTRAS[name]}]'")
        if http is not None:
            say(f"HTTP at {http.url}, the dashboard at {http.url}/ui.")
        if keyless:
            say("There is no API key yet. Create one: pgmb keys create admin --scope operate")

    return greet


def _processes(services: Sequence[Service]) -> dict[str, list[Service]]:
    """Services by the process that runs them: what strangers reach, what receivers reach, and the upkeep."""
    processes: dict[str, list[Service]] = {}
    for service in services:
        name = service.name if service.name in ("http", "dispatcher") else "upkeep"
        processes.setdefault(name, []).append(service)
    return processes


def _child(
    name: str, dsn: str, services: Sequence[Service], turns: Turns, end_within: float, foreign: Http | None
) -> Child:
    # The successor of a process that died goes on leading at once.
    process = uuid4()

    def run(parent: Parent) -> int:
        if foreign is not None:
            foreign.release()
        return _run(dsn, services, turns, end_within, process, parent)

    return Child(name, background=name == "upkeep", run=run)


def _share_imports(names: Sequence[str]) -> None:
    """Import what the processes need, before they are forked: so they share its memory."""
    if "http" in names:
        import pgmb.server
        import pgmb.services.http_server
    if "dispatcher" in names:
        import pgmb.webhooks.dispatcher  # noqa: F401
    _fast_loop()
    gc.collect()
    gc.freeze()


def _run(
    dsn: str,
    services: Sequence[Service],
    turns: Turns,
    end_within: float,
    process: UUID,
    parent: Parent | None = None,
    greet: Callable[[], None] | None = None,
) -> int:
    """Run services in this process. Returns its exit code."""
    fast = any(isinstance(service, Http) for service in services)
    with asyncio.Runner(loop_factory=_fast_loop() if fast else None) as runner:
        try:
            runner.run(_serve(dsn, services, turns, end_within, process, parent, greet))
        except (psycopg.Error, PoolTimeout, PgmbError) as error:
            if parent is None:
                raise
            logger.error("%s", str(error).strip())
            return 1
    return 0


async def _serve(
    dsn: str,
    services: Sequence[Service],
    turns: Turns,
    end_within: float,
    process: UUID,
    parent: Parent | None,
    greet: Callable[[], None] | None,
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end() -> None:
        stop.set()
        # Whatever may hang, the process ends.
        last = threading.Timer(end_within, os._exit, [1])
        last.daemon = True
        last.start()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    if greet is not None:
        greet()
    reporting = None
    if parent is not None:
        parent.when_gone(end)
        reporting = asyncio.create_task(parent.keep_reporting(turns.hung))
    async with await aconnect(
        dsn, max_size=len(services) + 1, max_wait=5.0, fallback_application_name="pgmb serve"
    ) as broker:
        leadership = Leadership([service.name for service in services], "pgmb serve", process)
        elected = leadership if leadership.services else None
        await serve_services(broker, services, stop, turns=turns, leadership=elected)
    if reporting is not None:
        reporting.cancel()
