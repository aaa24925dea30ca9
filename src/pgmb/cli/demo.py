"""pgmb demo: a shop in a database of its own, with traffic and failures, to look at."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import signal
from collections.abc import AsyncGenerator, Generator
from typing import Any

import psycopg
import typer
from psycopg import errors, sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgmb import App, Delivery, Reject, aconnect, schema
from pgmb._core.connecting import connect
from pgmb.cli import output
from pgmb.cli.options import Dsn
from pgmb.cli.serve import Host, Port, require
from pgmb.errors import PermissionDenied
from pgmb.services import Dispatcher, Http, HttpSettings, Janitor, Scheduler, Service, Ticker, serve

_LIMIT = 290
_ROLES = "select rolname from pg_roles where starts_with(rolname, 'pgmb_')"

_TOUR = """\
A shop runs in the new database {database}. Ctrl-C stops it and drops the database.

Dashboard  {url}/ui
API key    {key}

What to look at
  {url}/ui/queue?name=billing
      a queue: the bank does not always answer, and the event is retried
  {url}/ui/dead
      dead letters: orders above the limit. Redrive one, or all of them.
  {url}/ui/endpoint?name=partner
      a webhook that answers 503 now and then
  {url}/ui/events?topic=report.due
      a schedule publishes every five seconds. Open an event: what became of it?
  {url}/ui/workers
      the process that runs the handlers

In another terminal
  export PGMB_DSN='{dsn}'
  pgmb top
  pgmb tail
  pgmb doctor
"""


def register(app: typer.Typer) -> None:
    app.command()(demo)


def demo(dsn: Dsn = "", host: Host = "127.0.0.1", port: Port = 0) -> None:
    """Run a playground with traffic, failures, a webhook, a schedule and the dashboard, until interrupted.

    It lives in a new database, which is dropped in the end. The role needs the right to create databases.
    """
    require("http", "dispatcher")
    with _database(dsn) as (name, made), contextlib.suppress(KeyboardInterrupt):
        # Failures are what it shows: they need no log.
        logging.getLogger("pgmb").setLevel(logging.CRITICAL)
        schema.install(made)
        asyncio.run(_run(name, made, HttpSettings(host=host, port=port)))
    output.line(f"Dropped database {name}.")


@contextlib.contextmanager
def _database(dsn: str) -> Generator[tuple[str, str]]:
    """A new database, its name and address. It is dropped in the end, with the roles made for it."""
    name = f"pgmb_demo_{secrets.token_hex(4)}"
    with connect(dsn, "pgmb demo") as admin:
        before = {role for (role,) in admin.execute(_ROLES)}
        try:
            admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        except errors.InsufficientPrivilege as error:
            refused = PermissionDenied(f"role {admin.info.user} may not create databases")
            refused.advise(f"alter role {admin.info.user} createdb, or name another user in --dsn.")
            raise refused from error
    try:
        yield name, make_conninfo(dsn, dbname=name)
    finally:
        # Not the connection from before: the server may have been restarted meanwhile.
        with connect(dsn, "pgmb demo") as admin:
            admin.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))
            for (role,) in admin.execute(_ROLES).fetchall():
                if role not in before:
                    # Another database may have begun to use it.
                    with contextlib.suppress(psycopg.Error):
                        admin.execute(sql.SQL("drop role {}").format(sql.Identifier(role)))


async def _run(name: str, dsn: str, settings: HttpSettings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    http = Http(dsn, settings)
    url = http.bind()
    services: list[Service] = [Ticker(), Janitor(), Scheduler(), Dispatcher(["127.0.0.0/8"]), http]
    app = _shop(dsn)
    async with (
        await aconnect(dsn, max_size=len(services) + 2, fallback_application_name="pgmb demo") as broker,
        _partner() as partner,
    ):
        await broker.create_endpoint("partner", partner, ["order.*"], rps=20, retry_after=[1, 2, 5, 10])
        key = (await broker.create_api_key("demo", ["operate"])).key
        async with asyncio.TaskGroup() as group:
            group.create_task(serve(broker, services, stop))
            group.create_task(app.work(stop, grace=2))
            group.create_task(_trade(app, stop))
            # Without a password, which would stay on the screen.
            shown: dict[str, Any] = {**conninfo_to_dict(dsn), "password": None}
            output.line(_TOUR.format(database=name, dsn=make_conninfo(**shown), url=url, key=key))
    await app.aclose()


def _shop(dsn: str) -> App:
    app = App(dsn)

    @app.on("order.placed", queue="billing", retry=[1, 2, 4])
    async def charge(event: Delivery[dict[str, int]]) -> None:
        order = event.payload
        await asyncio.sleep(0.05)
        if order["total"] > _LIMIT:
            raise Reject(f"{order['total']} is above the limit of {_LIMIT}")
        if order["number"] % 5 == 0 and event.attempt <= order["number"] % 3:
            raise ConnectionError("the bank does not answer")
        await app.apublish("order.paid", order, key=event.key)

    @app.on("order.paid", queue="shipping")
    async def ship(order: dict[str, int]) -> None:
        await asyncio.sleep(0.1)

    @app.on("report.due", queue="reports")
    async def report(payload: dict[str, str]) -> None: ...

    app.every("*/5 * * * * *", "report.due", {"kind": "sales"}, name="sales report")
    return app


async def _trade(app: App, stop: asyncio.Event) -> None:
    """Customers: five orders a second, one in ten of them placed half a minute later."""
    for number in itertools.count(1):
        order = {"number": number, "total": 5 + number * 37 % 300}
        delay = 30 if number % 10 == 3 else None
        await app.apublish("order.placed", order, key=f"customer-{number % 40}", delay=delay)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 0.2)
        if stop.is_set():
            return


@contextlib.asynccontextmanager
async def _partner() -> AsyncGenerator[str]:
    """Somebody else's server, on loopback: answers what is posted to it, one request in ten with 503."""
    answers = itertools.cycle([*["200 OK"] * 9, "503 Over Capacity"])

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                _, found, rest = head.partition(b"\r\ncontent-length:")
                await reader.readexactly(int(rest.split(b"\r\n", 1)[0]) if found else 0)
                writer.write(f"HTTP/1.1 {next(answers)}\r\nContent-Length: 0\r\n\r\n".encode())

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hooks"
    finally:
        server.close()
