"""Background roles: what keeps a broker in order. Publishing and receiving need none of them."""

from __future__ import annotations

from pgmb.roles.dispatcher import Dispatcher
from pgmb.roles.http import Http
from pgmb.roles.http_settings import HttpSettings
from pgmb.roles.janitor import Janitor
from pgmb.roles.role import Role, serve
from pgmb.roles.scheduler import Scheduler
from pgmb.roles.ticker import Ticker

ROLES: dict[str, type[Dispatcher] | type[Http] | type[Janitor] | type[Scheduler] | type[Ticker]] = {
    "dispatcher": Dispatcher,
    "http": Http,
    "janitor": Janitor,
    "scheduler": Scheduler,
    "ticker": Ticker,
}

__all__ = ["ROLES", "Dispatcher", "Http", "HttpSettings", "Janitor", "Role", "Scheduler", "Ticker", "serve"]
