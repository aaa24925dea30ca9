"""Applications over real HTTP, served by this event loop or by a thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn

from pgmb.server.application import Application
from pgmb.server.limits import Limits
from pgmb.server.rest import routes


@contextmanager
def serving(dsn: str, limits: Limits | None = None) -> Iterator[str]:
    """Serves the REST interface in a thread. Gives its address."""
    application = Application(dsn, parts=[routes], limits=limits)
    config = uvicorn.Config(
        application, host="127.0.0.1", port=0, lifespan="on", log_config=None, access_log=False, ws="none"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        host, port = server.servers[0].sockets[0].getsockname()
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        thread.join(60)
    assert not thread.is_alive()


@asynccontextmanager
async def served(app: Any) -> AsyncGenerator[int]:
    """Serves an application in this loop. Gives its port."""
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, log_config=None, lifespan="on", timeout_graceful_shutdown=5
    )
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server._serve())
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        if isinstance(app, Application):
            await app.drain()
        server.should_exit = True
        await task
