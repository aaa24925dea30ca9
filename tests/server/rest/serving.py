"""The REST interface over real HTTP, served by a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from pgmb.server.application import Application
from pgmb.server.limits import Limits
from pgmb.server.rest import routes


@contextmanager
def serving(dsn: str, limits: Limits | None = None) -> Iterator[str]:
    """The address of an application, which ends with the block."""
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
