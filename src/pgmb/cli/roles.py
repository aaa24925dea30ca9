"""pgmb serve, janitor, scheduler, ticker."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Annotated

import typer

from pgmb import aconnect
from pgmb.cli import output
from pgmb.cli.options import Dsn
from pgmb.errors import InvalidArgument
from pgmb.roles import ROLES
from pgmb.roles import serve as serve_roles


def register(app: typer.Typer) -> None:
    app.command()(serve)
    app.command()(janitor)
    app.command()(scheduler)
    app.command()(ticker)


def serve(
    dsn: Dsn = "",
    roles: Annotated[str, typer.Option(help="Which roles, with commas between.")] = ",".join(sorted(ROLES)),
) -> None:
    """Run background roles in one process until it is interrupted. Several copies may run."""
    names = [name.strip() for name in roles.split(",") if name.strip()]
    unknown = sorted(set(names) - set(ROLES))
    if unknown or not names:
        refused = InvalidArgument(f"not a role: {', '.join(unknown) or repr(roles)}")
        refused.advise(f"Roles are {', '.join(sorted(ROLES))}.")
        raise refused
    asyncio.run(_serve(dsn, names))


def janitor(dsn: Dsn = "") -> None:
    """Run the Janitor: rotation, retention, clearing."""
    serve(dsn, "janitor")


def scheduler(dsn: Dsn = "") -> None:
    """Run the Scheduler: publishes what schedules say."""
    serve(dsn, "scheduler")


def ticker(dsn: Dsn = "") -> None:
    """Run the Ticker: names positions and wakes sleepers."""
    serve(dsn, "ticker")


async def _serve(dsn: str, names: list[str]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with await aconnect(dsn, max_size=len(names) + 1) as broker:
        output.line(f"Serving {', '.join(names)}.")
        await serve_roles(broker, [ROLES[name]() for name in names], stop)
