"""pgmb up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import Annotated

import psycopg
import typer

from pgmb import schema
from pgmb._core.connecting import connect
from pgmb._core.logs import LogFormat, configure
from pgmb.cli import serve, work, worker_metrics
from pgmb.cli.options import of_environment
from pgmb.cli.parts import Parts, installed, is_installed, sayer
from pgmb.services import SERVICES, HttpSettings
from pgmb.services.supervisor import Child, supervise

_HAS_KEYS = "select exists (select from pgmb.api_keys)"


def register(app: typer.Typer) -> None:
    app.command()(up)


def up(
    target: Annotated[
        str | None,
        typer.Argument(
            help="Where the app is: module:app, from the current directory. Without it no handlers run.",
            show_default=False,
        ),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Number of worker processes.")] = 1,
    dsn: Annotated[
        str | None,
        typer.Option(
            help="Connection string to use instead of the app's own, or of the environment's.",
            show_default=False,
        ),
    ] = None,
    install: Annotated[
        bool, typer.Option("--install", help="Install or upgrade the schema first, if needed.")
    ] = False,
    allow: serve.Allow = None,
    host: serve.Host = "127.0.0.1",
    port: serve.Port = 8080,
    metrics_public: serve.MetricsPublic = False,
    access_log: serve.AccessLog = True,
    log_format: serve.Log = LogFormat.TEXT,
) -> None:
    """Run everything on a machine: an app's handlers, webhooks, HTTP and the upkeep, until interrupted.

    It is `pgmb work` and `pgmb serve` under one supervisor: the workers, HTTP, the dispatcher, and the upkeep
    (ticker, janitor, scheduler) each run in a process of their own, which is started again when it ends. The
    dispatcher needs the extra `webhooks`, HTTP the extra `server`. /metrics shows the handlers, too.
    """
    settings = HttpSettings(host=host, port=port, metrics_public=metrics_public)
    if target is None:
        dsn = dsn or of_environment()
        if install and (schema.installed_version(dsn) or 0) < schema.VERSION:
            schema.install(dsn)
        serve.serve(
            dsn,
            None,
            allow,
            host=host,
            port=port,
            metrics_public=metrics_public,
            access_log=access_log,
            log_format=log_format,
        )
        return
    with contextlib.ExitStack() as stack:
        environment, families = dict(os.environ), None
        if is_installed("http"):
            more, written = worker_metrics.collect_workers(stack)
            environment |= more
            families = written.collect
        code = _supervise(
            Parts(installed(), settings, allow or (), families=families),
            work.workers(
                target,
                processes,
                environment,
                ["--install"] if install else [],
                dsn=dsn,
                log_format=log_format,
            ),
            access_log,
            log_format,
        )
    raise typer.Exit(code)


def _supervise(parts: Parts, workers: list[Child], access_log: bool, log_format: LogFormat) -> int:
    configure(log_format)
    if not access_log:
        logging.getLogger("pgmb.access").setLevel(logging.WARNING)
    first, *others = workers
    services = parts.children()

    def then(dsn: str) -> list[Child]:
        # The first worker works, so this is the app's database, with the schema.
        parts.connect_to(dsn)
        left_out = sorted(set(SERVICES) - set(installed()))
        parts.greet(sayer(log_format), left_out, keyless=parts.http is not None and _is_keyless(dsn))
        return [*others, *services]

    return asyncio.run(supervise(first, then, board=parts.board))


def _is_keyless(dsn: str) -> bool:
    # Without threads, which a fork would lose: not by a broker.
    with contextlib.suppress(psycopg.Error), connect(dsn, "pgmb up") as conn:
        ((found,),) = conn.execute(_HAS_KEYS).fetchall()
        return not found
    return False
