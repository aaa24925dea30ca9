"""Background services: maintenance, schedules, webhooks, HTTP. Publishing and receiving work without them."""

from __future__ import annotations

from pgmb.services.dispatcher import Dispatcher
from pgmb.services.http import Http
from pgmb.services.http_settings import HttpSettings
from pgmb.services.janitor import Janitor
from pgmb.services.leadership import Leadership
from pgmb.services.scheduler import Scheduler
from pgmb.services.service import Service, Turns, serve
from pgmb.services.ticker import Ticker

SERVICES: dict[str, type[Dispatcher] | type[Http] | type[Janitor] | type[Scheduler] | type[Ticker]] = {
    "dispatcher": Dispatcher,
    "http": Http,
    "janitor": Janitor,
    "scheduler": Scheduler,
    "ticker": Ticker,
}

__all__ = [
    "SERVICES",
    "Dispatcher",
    "Http",
    "HttpSettings",
    "Janitor",
    "Leadership",
    "Scheduler",
    "Service",
    "Ticker",
    "Turns",
    "serve",
]
