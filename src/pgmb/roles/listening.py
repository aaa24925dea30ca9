"""uvicorn as a part of our process: our signals, our log, our loop. Needs the extra `server`."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager, suppress

import uvicorn

from pgmb.roles.http_settings import HttpSettings
from pgmb.roles.protocol import limited
from pgmb.server import Application


class Server(uvicorn.Server):
    """Leaves signals to the process it runs in: other roles have to hear of them, too."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def allow_connections() -> None:
    """Take as many open files as this process may have: each connection is one."""
    with suppress(ImportError, OSError, ValueError):
        # Not on every system.
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def spare_the_collector() -> None:
    """Look for garbage less often: thousands of connections are many objects, which all stay."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def configure(application: Application, settings: HttpSettings, keep_alive: int) -> uvicorn.Config:
    return uvicorn.Config(
        application,
        http=limited(settings.head_within),
        # It is started and closed by the role, and logs requests itself.
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        ws="none",
        server_header=False,
        proxy_headers=settings.proxy_headers,
        forwarded_allow_ips=settings.forwarded_allow_ips,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        timeout_keep_alive=keep_alive,
        timeout_graceful_shutdown=max(1, round(settings.finish_within)),
    )
