"""Names from the database for the shell's completion: quick, and silent when there is nothing to ask."""

from __future__ import annotations

import os
from typing import LiteralString

import psycopg
import typer

ENVIRONMENT = ["PGMB_DSN", "DATABASE_URL"]
"""Where the connection string comes from if it is not given."""

_QUICK = "-c statement_timeout=1000 -c lock_timeout=100"


def queues(ctx: typer.Context, incomplete: str) -> list[str]:
    return _names(ctx, incomplete, "select queue from pgmb.queue_status")


def streams(ctx: typer.Context, incomplete: str) -> list[str]:
    return _names(ctx, incomplete, "select stream from pgmb.stream_status")


def endpoints(ctx: typer.Context, incomplete: str) -> list[str]:
    return _names(ctx, incomplete, "select name from pgmb.endpoints")


def _names(ctx: typer.Context, incomplete: str, query: LiteralString) -> list[str]:
    dsn = ctx.params.get("dsn") or next(
        (os.environ[name] for name in ENVIRONMENT if os.environ.get(name)), ""
    )
    try:
        with psycopg.connect(dsn, connect_timeout=2, autocommit=True, options=_QUICK) as conn:
            return sorted(name for (name,) in conn.execute(query) if name.startswith(incomplete))
    except Exception:
        # A shell that waits for words wants no message.
        return []
