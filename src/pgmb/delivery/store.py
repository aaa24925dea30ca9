"""What a dispatcher reads and writes in the database. It posts with no transaction open."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from psycopg.rows import tuple_row

from pgmb.delivery.endpoint import Posted
from pgmb.errors import LeaseLost, translated

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from psycopg import AsyncConnection

    from pgmb.delivery.work import Failure, Report

_TIMEOUT: Final = "select set_config('statement_timeout', '10s', true)"
_RECEIVE: Final = """
select lease::text, seq, id::text, topic, key, payload, headers, published_at, attempt, endpoints::text[]
from pgmb.receive_deliveries(%s, %s, %s::interval)"""
_CLAIM: Final = """
select lease::text, delivery, endpoint::text, seq, id::text, topic, key, payload, headers, published_at,
  attempt
from pgmb.claim_deliveries(%s, %s::interval, %s, %s::uuid[], %s::integer[])"""
_SETTLE: Final = """
select pgmb.settle_deliveries(%s::uuid, %s::bigint[], %s::bigint[], %s::uuid[], %s::interval[],
  %s::text[], %s::boolean[], %s::boolean[])"""
_SETTLE_CLAIMED: Final = """
select pgmb.settle_claimed(%s::uuid, %s::bigint[], %s::bigint[], %s::interval[], %s::text[], %s::boolean[],
  %s::boolean[])"""
_LOG: Final = """
select pgmb.log_attempts(%s::uuid[], %s::bigint[], %s::uuid[], %s::text[], %s::integer[], %s::integer[],
  %s::real[], %s::text[], %s::text[], %s::text[])"""
_HEARTBEAT: Final = """
select pgmb.heartbeat(%s::uuid, %s, %s, %s::uuid[], %s::bigint[], %s::bigint[], %s::text[])::text[]"""
_ENDPOINTS: Final = "select * from pgmb.dispatched_endpoints(coalesce(%s::timestamptz, '-infinity'))"
_QUEUES: Final = "select queue, endpoint::text, stream from pgmb.dispatched_queues()"
_TAKE: Final = "select endpoint::text, given from pgmb.take_requests(%s::uuid[], %s::integer[])"
_PROBE: Final = """
select id::text from unnest(%s::uuid[], %s::interval[]) asked (id, busy_for)
where pgmb.probe_endpoint(id, busy_for)"""


class Feeding(NamedTuple):
    """A queue that feeds endpoints."""

    queue: str
    endpoint: str | None
    """The one that has it for itself."""
    stream: str


class Received(NamedTuple):
    """An event, under a lease, with the endpoints that it is for."""

    lease: str
    seq: int
    event: Posted
    attempt: int
    endpoints: list[str]


class Claimed(NamedTuple):
    """An event that waited for one endpoint, under a lease."""

    lease: str
    row: int
    endpoint: str
    seq: int
    event: Posted
    attempt: int


class Tried(NamedTuple):
    """An attempt, to be written down."""

    endpoint: str
    seq: int
    event: str
    topic: str
    attempt: int
    status: int | None
    seconds: float
    error: str | None
    detail: str | None
    response: str | None


class Did(NamedTuple):
    """What an endpoint did since the last heartbeat."""

    endpoint: str
    delivered: int
    failed: int
    error: str | None


class Store:
    """The calls of schema pgmb that a dispatcher makes, over one connection in autocommit mode."""

    def __init__(self, connection: AsyncConnection[Any], lease_for: float) -> None:
        self._connection = connection
        self._lease_for = timedelta(seconds=lease_for)

    async def receive(self, queue: str, most: int, timed: bool) -> list[Received]:
        """The next events of a queue. With an SQL condition it raises TimeoutRequired unless `timed`."""
        given = (queue, most, self._lease_for)
        if not timed:
            return _received(await self._rows(_RECEIVE, given))
        with translated():
            async with self._connection.transaction():
                await self._connection.execute(_TIMEOUT)
                return _received(await self._rows(_RECEIVE, given))

    async def claim(self, most: int, room: int, rooms: dict[str, int]) -> list[Claimed]:
        """What waits for endpoints: of each at most `room`, or what is given for it."""
        rows = await self._rows(_CLAIM, (most, self._lease_for, room, list(rooms), list(rooms.values())))
        return [Claimed(row[0], row[1], row[2], row[3], Posted(*row[4:10]), row[10]) for row in rows]

    async def settle(self, reports: Sequence[Report], tried: Sequence[Tried]) -> int:
        """Settle leases and write attempts down, in one transaction. Returns how many leases were lost."""
        try:
            async with self._connection.transaction():
                for report in reports:
                    await self._settle(report)
                await self._log(tried)
            return 0
        except LeaseLost:
            return await self._settle_apart(reports, tried)

    async def _settle_apart(self, reports: Sequence[Report], tried: Sequence[Tried]) -> int:
        lost = 0
        for report in reports:
            try:
                await self._settle(report)
            except LeaseLost:
                lost += 1
        await self._log(tried)
        return lost

    async def _settle(self, report: Report) -> None:
        names, endpoints, after, errors, tried, last = _columns(report.failures)
        if report.waited:
            await self._rows(
                _SETTLE_CLAIMED, (report.lease, report.done or [], names, after, errors, tried, last)
            )
        else:
            given = (report.lease, report.done, names, endpoints, after, errors, tried, last)
            await self._rows(_SETTLE, given)

    async def _log(self, tried: Sequence[Tried]) -> None:
        if tried:
            await self._rows(_LOG, tuple(list(column) for column in zip(*tried, strict=True)))

    async def extend(self, leases: Sequence[str], waited: Sequence[str]) -> None:
        """Keep leases for as long again. Those that were lost are found out when they are settled."""
        for lease in leases:
            try:
                await self._rows("select pgmb.extend(%s::uuid, %s::interval)", (lease, self._lease_for))
            except LeaseLost:
                continue
        if waited:
            await self._rows(
                "select pgmb.extend_claimed(%s::uuid[], %s::interval)", (list(waited), self._lease_for)
            )

    async def heartbeat(self, dispatcher: UUID, host: str, pid: int, did: Sequence[Did]) -> list[str]:
        """Say that this dispatcher lives, and what it did. Returns the ids of all that live."""
        columns = [list(column) for column in zip(*did, strict=True)] or [[], [], [], []]
        ((alive,),) = await self._rows(_HEARTBEAT, (dispatcher, host, pid, *columns))
        return list(alive)

    async def depart(self, dispatcher: UUID) -> None:
        await self._rows("select pgmb.depart(%s::uuid)", (dispatcher,))

    async def endpoints(self, since: datetime | None) -> list[tuple[Any, ...]]:
        return await self._rows(_ENDPOINTS, (since,))

    async def queues(self) -> list[Feeding]:
        """The queues that feed endpoints."""
        return [Feeding(*row) for row in await self._rows(_QUEUES, ())]

    async def take_requests(self, wanted: dict[str, int]) -> dict[str, int]:
        return dict(await self._rows(_TAKE, (list(wanted), list(wanted.values()))))

    async def trip(self, endpoint: str, reason: str) -> None:
        await self._rows("select pgmb.trip_endpoint(%s::uuid, %s)", (endpoint, reason))

    async def probe(self, busy_for: dict[str, float]) -> list[str]:
        """Which tripped endpoints this dispatcher, and no other, may try with one request."""
        spans = [timedelta(seconds=seconds) for seconds in busy_for.values()]
        return [endpoint for (endpoint,) in await self._rows(_PROBE, (list(busy_for), spans))]

    async def end_probe(self, endpoint: str, succeeded: bool | None, reason: str | None) -> None:
        await self._rows("select pgmb.end_probe(%s::uuid, %s, %s)", (endpoint, succeeded, reason))

    async def disable(self, endpoint: str, reason: str) -> None:
        await self._rows("select pgmb.disable_endpoint(%s::uuid, %s)", (endpoint, reason))

    async def _rows(self, statement: Any, parameters: tuple[Any, ...]) -> list[Any]:
        with translated():
            async with self._connection.cursor(row_factory=tuple_row) as cursor:
                await cursor.execute(statement, parameters)
                return await cursor.fetchall()


def _received(rows: Sequence[Any]) -> list[Received]:
    return [Received(row[0], row[1], Posted(*row[2:8]), row[8], row[9]) for row in rows]


def _columns(failures: Sequence[Failure]) -> list[list[Any]]:
    if not failures:
        return [[], [], [], [], [], []]
    names, endpoints, after, *rest = ([*column] for column in zip(*failures, strict=True))
    return [
        names,
        endpoints,
        [None if seconds is None else timedelta(seconds=seconds) for seconds in after],
        *rest,
    ]
