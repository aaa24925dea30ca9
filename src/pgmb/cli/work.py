"""pgmb work."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from pgmb import schema
from pgmb._core import logs
from pgmb.app import App, loading, running
from pgmb.cli import durations, output, worker_metrics
from pgmb.errors import InvalidArgument
from pgmb.services.parent import Parent
from pgmb.services.supervisor import EXIT_WITHOUT_RESTART, Child, supervise
from pgmb.services.upkeep import upkeep

_DSN = "PGMB_WORK_DSN"
_WORKER = "PGMB_WORKER"
"""The number of a worker process, for its log."""
_LOG_FORMAT = "PGMB_WORK_LOG_FORMAT"


def register(app: typer.Typer) -> None:
    app.command()(work)


def work(
    target: Annotated[str, typer.Argument(help="Where the app is: module:app, from the current directory.")],
    processes: Annotated[int, typer.Option(min=1, help="Number of worker processes.")] = 1,
    queue: Annotated[
        list[str] | None, typer.Option(help="Only this queue; may be repeated. All by default.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Concurrent events per queue and process.", show_default=False)
    ] = None,
    grace: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds to wait for running handlers at shutdown.", show_default=False),
    ] = None,
    unhandled_for: Annotated[
        str | None,
        typer.Option(
            help="How long an event without a handler waits for another worker: 30m, 2d; default: 1d.",
            show_default=False,
        ),
    ] = None,
    dsn: Annotated[
        str | None,
        typer.Option(
            envvar=_DSN,
            show_envvar=False,
            help="Connection string to use instead of the app's own.",
            show_default=False,
        ),
    ] = None,
    install: Annotated[
        bool, typer.Option("--install", help="Install or upgrade the schema first, if needed.")
    ] = False,
    services: Annotated[
        bool,
        typer.Option(
            "--services/--no-services",
            help="Run ticker, janitor and scheduler in a process beside the handlers, or leave them to other"
            " processes.",
        ),
    ] = True,
    prune: Annotated[
        bool,
        typer.Option("--prune", help="Remove patterns that no live worker declares from the app's queues."),
    ] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Serve Prometheus metrics on this port.", show_default=False),
    ] = None,
    reload: Annotated[
        bool,
        typer.Option(
            "--reload",
            help="Restart when a Python file below the current directory changes. For development.",
        ),
    ] = False,
) -> None:
    """Run an app's handlers, and the services that keep the log in order, until interrupted.

    Handlers run in processes of their own, which are restarted when they end. Ticker, janitor and scheduler
    run in one more; of all processes on a database, one leads. On interrupt, running handlers finish; other
    leased events are released. Webhooks and HTTP need `pgmb serve`.
    """
    if reload and metrics_port is not None:
        raise InvalidArgument("--reload and --metrics-port exclude each other")
    worker = os.environ.pop(_WORKER, None)
    logs.configure(
        logs.LogFormat(os.environ.pop(_LOG_FORMAT, logs.LogFormat.TEXT)),
        text=f"%(asctime)s %(levelname)s %(name)s{f' worker {worker}:' if worker else ''} %(message)s",
    )
    waiting = None if unhandled_for is None else durations.parse(unhandled_for)
    if services or processes > 1 or reload:
        given = {"concurrency": concurrency, "grace": grace, "unhandled-for": unhandled_for}
        options = [f"--queue={name}" for name in queue or []]
        options += [f"--{name}={value}" for name, value in given.items() if value is not None]
        options += [flag for flag, given in (("--install", install), ("--prune", prune)) if given]
        sys.exit(_supervised(target, processes, options, queue, dsn, services, metrics_port, reload))
    app = _loaded(target, queue)
    if waiting is not None:
        app.unhandled_for = waiting.total_seconds()
    if dsn is not None:
        app.dsn = dsn
    if install and (schema.installed_version(app.dsn) or 0) < schema.VERSION:
        schema.install(app.dsn)
    with contextlib.ExitStack() as stack:
        worker_metrics.serve(stack, metrics_port, app)
        spec = app.work_spec(queue, concurrency, grace, services=False)._replace(prune=prune)
        asyncio.run(running.until_signalled(spec, Parent.of_environment()))


def _loaded(target: str, queues: list[str] | None) -> App:
    try:
        app = loading.load(target)
        app.work_spec(queues)
    except InvalidArgument as error:
        output.fail(str(error), error.hint, code=EXIT_WITHOUT_RESTART)
    return app


def workers(
    target: str,
    count: int,
    environment: Mapping[str, str],
    options: Sequence[str] = (),
    *,
    dsn: str | None = None,
    log_format: logs.LogFormat = logs.LogFormat.TEXT,
) -> list[Child]:
    """Processes that run the app's handlers."""
    command = [sys.executable, "-m", "pgmb", "work", target, "--no-services", *options]
    environment = {**environment, _LOG_FORMAT: log_format}
    if dsn is not None:
        # Not on the command line, where everybody on the machine could read a password.
        environment[_DSN] = dsn
    if count == 1:
        return [Child("worker", command, environment)]
    return [
        Child(f"worker {number}", command, {**environment, _WORKER: str(number)})
        for number in range(1, count + 1)
    ]


def _supervised(
    target: str,
    count: int,
    options: list[str],
    queues: list[str] | None,
    dsn: str | None,
    services: bool,
    metrics_port: int | None,
    reload: bool,
) -> int:
    """Run the handlers in `count` processes, and the services in one more."""
    environment = dict(os.environ)
    if reload:
        # Compiled files are told from newer ones by the second alone.
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
    with contextlib.ExitStack() as stack:
        if metrics_port is not None and count == 1:
            options = [*options, f"--metrics-port={metrics_port}"]
        elif metrics_port is not None:
            app = _loaded(target, queues)
            if dsn is not None:
                app.dsn = dsn
            environment |= worker_metrics.serve_workers(stack, metrics_port, app.dsn, app)

        first, *others = workers(target, count, environment, options, dsn=dsn)

        def then(dsn: str) -> list[Child]:
            return [*others, upkeep(dsn, os.environ)] if services else others

        return asyncio.run(supervise(first, then, reload=Path.cwd() if reload else None))
