"""pgmb work."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from pgmb import connect, schema
from pgmb.app import App, loading, running
from pgmb.app.processes import EXIT_WITHOUT_RESTART, PARENT_PIPE, WORKER, supervise
from pgmb.cli import durations, logs, output, worker_metrics
from pgmb.errors import InvalidArgument

_DSN = "PGMB_WORK_DSN"


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
    """Run an app's handlers until interrupted. Running handlers finish; other leased events are released."""
    if reload and metrics_port is not None:
        raise InvalidArgument("--reload and --metrics-port exclude each other")
    worker = os.environ.pop(WORKER, None)
    logs.configure(
        text=f"%(asctime)s %(levelname)s %(name)s{f' worker {worker}:' if worker else ''} %(message)s"
    )
    waiting = None if unhandled_for is None else durations.parse(unhandled_for)
    if processes > 1 or reload:
        options = {"concurrency": concurrency, "grace": grace, "unhandled-for": unhandled_for}
        sys.exit(_supervised(target, processes, queue or [], options, dsn, install, metrics_port, reload))
    app = _loaded(target, queue)
    if waiting is not None:
        app.unhandled_for = waiting.total_seconds()
    if dsn is not None:
        app.dsn = dsn
    if install and (schema.installed_version(app.dsn) or 0) < schema.VERSION:
        schema.install(app.dsn)
    with contextlib.ExitStack() as stack:
        worker_metrics.serve(stack, metrics_port, app)
        asyncio.run(running.until_signalled(app.work_spec(queue, concurrency, grace), _parent()))


def _loaded(target: str, queues: list[str] | None) -> App:
    try:
        app = loading.load(target)
        app.work_spec(queues)
    except InvalidArgument as error:
        output.fail(str(error), error.hint, code=EXIT_WITHOUT_RESTART)
    return app


def _supervised(
    target: str,
    count: int,
    queues: list[str],
    options: Mapping[str, object],
    dsn: str | None,
    install: bool,
    metrics_port: int | None,
    reload: bool,
) -> int:
    """`options` are passed on to every process, but for those that are None."""
    command = [sys.executable, "-m", "pgmb", "work", target]
    command += [f"--queue={name}" for name in queues]
    command += [f"--{name}={value}" for name, value in options.items() if value is not None]
    command += ["--install"] if install else []
    # Not on the command line, where everybody on the machine could read a password.
    environment = dict(os.environ) if dsn is None else {**os.environ, _DSN: dsn}
    if reload:
        # Compiled files are told from newer ones by the second alone.
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        return asyncio.run(supervise(command, count, environment, reload=Path.cwd()))
    app = _loaded(target, queues or None)
    if dsn is not None:
        app.dsn = dsn
    # What fails now fails for good: processes that have once connected are restarted for ever.
    connect(app.dsn, **app.connection).close()
    with contextlib.ExitStack() as stack:
        if metrics_port is not None:
            environment |= worker_metrics.serve_workers(stack, metrics_port, app.dsn, app)
        return asyncio.run(supervise(command, count, environment))


def _parent() -> int | None:
    pipe = os.environ.pop(PARENT_PIPE, None)
    return None if pipe is None else int(pipe)
