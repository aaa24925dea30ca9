"""The HTTP server on a socket that is open already: python -m faults.server.fuzz_app FD, with PGMB_DSN."""

from __future__ import annotations

import os
import sys

import uvicorn

from pgmb.server import Limits, create_app


def main() -> None:
    limits = Limits(requests_per_second=1e9, burst=1e9, body=1 << 20)
    application = create_app(os.environ["PGMB_DSN"], limits=limits)
    uvicorn.run(
        application,
        fd=int(sys.argv[1]),
        lifespan="on",
        log_level="error",
        access_log=False,
        ws="none",
        timeout_keep_alive=60,
    )


if __name__ == "__main__":
    main()
