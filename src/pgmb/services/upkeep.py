"""Ticker, janitor and scheduler in a process of their own, which no handler can hold up.

Run as a module, `python -m pgmb.services.upkeep`, by a supervisor.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from datetime import timedelta
from uuid import UUID, uuid4

import psycopg
from psycopg_pool import PoolTimeout

from pgmb._async.broker import AsyncBroker, aconnect
from pgmb._core import logs
from pgmb.errors import PermissionDenied, PgmbError
from pgmb.services.janitor import Janitor
from pgmb.services.leadership import Leadership
from pgmb.services.parent import Parent
from pgmb.services.scheduler import Scheduler
from pgmb.services.service import Service, serve
from pgmb.services.supervisor import EXIT_WITHOUT_RESTART, Child
from pgmb.services.ticker import Ticker

logger = logging.getLogger("pgmb.services")

_DSN = "PGMB_UPKEEP_DSN"
_PROCESS = "PGMB_UPKEEP_PROCESS"
_PROGRAM = "pgmb work"
_FRESH = timedelta(minutes=1)
# The supervisor ends it sooner; this is for a process whose supervisor is gone.
_END_WITHIN_SECONDS = 15.0


def upkeep(dsn: str, environment: Mapping[str, str]) -> Child:
    """The process as a child of a supervisor. Its successor, after a crash, goes on leading at once."""
    return Child(
        "upkeep",
        [sys.executable, "-m", "pgmb.services.upkeep"],
        # Not on the command line, where everybody on the machine could read a password.
        {**environment, _DSN: dsn, _PROCESS: str(uuid4())},
        background=True,
    )


def main() -> None:
    logs.configure(text="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("psycopg.pool").addHandler(logging.NullHandler())
    parent = Parent.of_environment()
    dsn, process = os.environ.pop(_DSN, ""), os.environ.pop(_PROCESS, None)
    sys.exit(asyncio.run(_run(dsn, None if process is None else UUID(process), parent)))


async def _run(dsn: str, process: UUID | None, parent: Parent | None) -> int:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def end() -> None:
        stop.set()
        last = threading.Timer(_END_WITHIN_SECONDS, os._exit, [1])
        last.daemon = True
        last.start()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    reporting = None
    if parent is not None:
        parent.when_gone(end)
        reporting = asyncio.create_task(parent.keep_reporting())
    services: list[Service] = [Ticker(), Janitor(), Scheduler()]
    leadership = Leadership([service.name for service in services], _PROGRAM, process)
    try:
        # A connection for each service would be idle most of the time.
        async with await aconnect(
            dsn, max_size=3, max_wait=5.0, fallback_application_name="pgmb upkeep"
        ) as broker:
            if not await _allowed(broker, leadership):
                return EXIT_WITHOUT_RESTART
            await serve(broker, services, stop, leadership=leadership)
    except (psycopg.Error, PoolTimeout, PgmbError) as error:
        logger.error("upkeep: %s", str(error).strip())
        return 1
    finally:
        if reporting is not None:
            reporting.cancel()
    return 0


async def _allowed(broker: AsyncBroker, leadership: Leadership) -> bool:
    """Whether the role may do the upkeep. If not, says once who does it, or that nobody does."""
    try:
        await leadership.turn(broker)
    except PermissionDenied:
        async with broker.own_connection() as conn:
            ((role, age),) = await (
                await conn.execute("select current_user, maintained_age from pgmb.describe_broker()")
            ).fetchall()
        missing = f"role {role} may not do the upkeep, which needs pgmb_admin"
        if age is not None and age < _FRESH:
            logger.info(
                "%s; another process does it (pgmb.maintain() ran %.0f s ago)", missing, age.total_seconds()
            )
        else:
            logger.warning(
                "%s, and no other process does it: segments and claims pile up. Run pgmb serve, or call"
                " pgmb.maintain() every few seconds, as a role with pgmb_admin",
                missing,
            )
        return False
    except (psycopg.Error, PoolTimeout, PgmbError) as error:
        logger.warning("upkeep: %s", str(error).strip())
    return True


if __name__ == "__main__":
    main()
