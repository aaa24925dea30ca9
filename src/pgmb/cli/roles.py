"""pgmb serve, dispatcher, janitor, scheduler, ticker."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Annotated, TypeAlias

import typer

from pgmb import aconnect
from pgmb.cli import output
from pgmb.cli.options import Dsn
from pgmb.errors import InvalidArgument
from pgmb.roles import ROLES, Dispatcher, Role
from pgmb.roles import serve as serve_roles

_EVERYWHERE = sorted(set(ROLES) - {"dispatcher"})

Allow: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CIDR",
        help="A network that is not public and endpoints may be in, as 10.1.0.0/16; may be repeated.",
    ),
]
EgressProxy: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Post through this HTTP proxy. It is trusted to refuse addresses that are not public.",
    ),
]


def register(app: typer.Typer) -> None:
    app.command()(serve)
    app.command()(dispatcher)
    app.command()(janitor)
    app.command()(scheduler)
    app.command()(ticker)


def serve(
    dsn: Dsn = "",
    roles: Annotated[
        str | None,
        typer.Option(help=f"Which of {', '.join(sorted(ROLES))}, with commas between. [default: all]"),
    ] = None,
    allow: Allow = None,
    egress_proxy: EgressProxy = None,
) -> None:
    """Run background roles in one process until it is interrupted. Several copies may run.

    The dispatcher needs the extra `delivery`: without it the others run unless it is asked for.
    """
    names = _all_here() if roles is None else [name.strip() for name in roles.split(",") if name.strip()]
    unknown = sorted(set(names) - set(ROLES))
    if unknown or not names:
        refused = InvalidArgument(f"not a role: {', '.join(unknown) or repr(roles)}")
        refused.advise(f"Roles are {', '.join(sorted(ROLES))}.")
        raise refused
    if "dispatcher" in names and not _delivers():
        missing = InvalidArgument("the dispatcher needs aiohttp and cryptography")
        missing.advise("pip install 'pgmb[delivery]'")
        raise missing
    asyncio.run(_serve(dsn, [_role(name, allow or (), egress_proxy) for name in names]))


def dispatcher(dsn: Dsn = "", allow: Allow = None, egress_proxy: EgressProxy = None) -> None:
    """Run the Dispatcher: posts events to HTTP endpoints."""
    serve(dsn, "dispatcher", allow, egress_proxy)


def janitor(dsn: Dsn = "") -> None:
    """Run the Janitor: rotation, retention, clearing."""
    serve(dsn, "janitor")


def scheduler(dsn: Dsn = "") -> None:
    """Run the Scheduler: publishes what schedules say."""
    serve(dsn, "scheduler")


def ticker(dsn: Dsn = "") -> None:
    """Run the Ticker: names positions and wakes sleepers."""
    serve(dsn, "ticker")


def _delivers() -> bool:
    return all(find_spec(name) is not None for name in ("aiohttp", "cryptography"))


def _all_here() -> list[str]:
    return sorted(ROLES) if _delivers() else _EVERYWHERE


def _role(name: str, allow: Sequence[str], egress_proxy: str | None) -> Role:
    return Dispatcher(allow, egress_proxy) if name == "dispatcher" else ROLES[name]()


async def _serve(dsn: str, roles: Sequence[Role]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with await aconnect(dsn, max_size=len(roles) + 1) as broker:
        output.line(f"Serving {', '.join(role.name for role in roles)}.")
        await serve_roles(broker, roles, stop)
