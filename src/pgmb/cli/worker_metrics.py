"""pgmb work --metrics-port."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING

from pgmb.app import App
from pgmb.cli import output
from pgmb.services.supervisor import EXIT_WITHOUT_RESTART

if TYPE_CHECKING:
    from pgmb.telemetry.serving import WorkersCollector

_SERVED_BY_PARENT = "PGMB_WORK_METRICS"


def serve(stack: contextlib.ExitStack, port: int | None, app: App) -> None:
    """Serve what an app in this process does. One of several processes only writes it down for its parent."""
    if port is None and not os.environ.pop(_SERVED_BY_PARENT, None):
        return
    with _explained(port):
        from pgmb.telemetry.handling import export_handlers
        from pgmb.telemetry.serving import serving

        export_handlers(app)
        if port is not None:
            stack.enter_context(serving(port, app.dsn, app.connection))


def serve_workers(stack: contextlib.ExitStack, port: int, dsn: str, app: App) -> Mapping[str, str]:
    """Serve what worker processes do. Returns what their environment needs."""
    with _explained(port):
        from pgmb.telemetry.serving import serving_workers

        needed = stack.enter_context(serving_workers(port, dsn, app.connection))
        return {**needed, _SERVED_BY_PARENT: "1"}


def collect_workers(stack: contextlib.ExitStack) -> tuple[Mapping[str, str], WorkersCollector]:
    """Returns what the environment of worker processes needs, and a collector of what they do."""
    from pgmb.telemetry.serving import collecting_workers

    workers = stack.enter_context(collecting_workers())
    return {**workers.environment, _SERVED_BY_PARENT: "1"}, workers


@contextlib.contextmanager
def _explained(port: int | None) -> Generator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "prometheus_client":
            raise
        output.fail(
            "--metrics-port needs prometheus_client",
            "Install it: pip install 'pgmb[prometheus]'.",
            EXIT_WITHOUT_RESTART,
        )
    except OSError as error:
        output.fail(
            f"cannot serve metrics on port {port}: {error.strerror}", "Choose another.", EXIT_WITHOUT_RESTART
        )
