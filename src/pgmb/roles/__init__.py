"""Background roles: what keeps a broker in order. Publishing and receiving need none of them."""

from __future__ import annotations

from pgmb.roles.janitor import Janitor
from pgmb.roles.role import Role, serve
from pgmb.roles.ticker import Ticker

ROLES: dict[str, type[Janitor] | type[Ticker]] = {"janitor": Janitor, "ticker": Ticker}

__all__ = ["ROLES", "Janitor", "Role", "Ticker", "serve"]
