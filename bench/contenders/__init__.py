"""The contenders by name."""

from __future__ import annotations

from bench.contender import Contender
from bench.contenders.bare import BareLog, BareTable
from bench.contenders.broker import Pgmb, PgmbAckApart, PgmbIdsBySql
from bench.contenders.pgmq import Pgmq, PgmqAsyncRead
from bench.contenders.skip_locked import SkipLocked

_ALL: list[Contender] = [
    Pgmb(),
    PgmbAckApart(),
    PgmbIdsBySql(),
    BareLog(),
    BareTable(),
    SkipLocked(),
    Pgmq(),
    PgmqAsyncRead(),
]


def contender(name: str) -> Contender:
    return {known.name: known for known in _ALL}[name]
