"""The contenders by name."""

from __future__ import annotations

from bench.contender import Contender
from bench.contenders.bare import BareLog, BareTable
from bench.contenders.broker import (
    Pgmb,
    PgmbAckApart,
    PgmbAckApartBefore,
    PgmbBefore,
    PgmbByClient,
    PgmbIdsBySql,
    PgmbNewLog,
)
from bench.contenders.compat import Compat, CompatArchive
from bench.contenders.pgmq import Pgmq, PgmqArchive, PgmqAsyncRead
from bench.contenders.skip_locked import SkipLocked

_ALL: list[Contender] = [
    Pgmb(),
    PgmbByClient(),
    PgmbAckApart(),
    PgmbBefore(),
    PgmbAckApartBefore(),
    PgmbIdsBySql(),
    PgmbNewLog(),
    BareLog(),
    BareTable(),
    SkipLocked(),
    Pgmq(),
    PgmqAsyncRead(),
    PgmqArchive(),
    Compat(),
    CompatArchive(),
]


def contender(name: str) -> Contender:
    return {known.name: known for known in _ALL}[name]
