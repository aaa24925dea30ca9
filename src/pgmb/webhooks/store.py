"""The SQL calls of a dispatcher, and the rows that they take and return."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from psycopg.rows import tuple_row

from pgmb.errors import LeaseLost, translated
from pgmb.webhooks.request import WebhookEvent

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from psycopg import AsyncConnection

    from pgmb.webhooks.leases import DeliveryFailure, Settlement

_TIMEOUT: Final = "select set_config('statement_timeout', '10s', true)"
_RECEIVE: Final = """
select lease::text, seq, id::text, topic, key, payload, headers, published_at, attempt, endpoints::text[],
  more
from pgmb.receive_deliveries(%s, %s, %s::interval)"""
_CLAIM: Final = """
select lease::text, delivery, endpoint::text, seq, id::text, topic, key, payload, headers, published_at,
  attempt
from pgmb.claim_deliveries(%s, %s::interval, %s, %s::uuid[], %s::integer[])"""
_CLAIM_PROBE: Final = """
select lease::text, delivery, recipient::text, seq, id::text, topic, key, payload, headers, published_at,
  attempt
from pgmb.claim_probe(%s::uuid, %s, %s::interval)"""
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
select pgmb.heartbeat(%s::uuid, %s, %s, %s::uuid[], %s::bigint[], %s::bigint[], %s::text[],
  backends => %s::integer[], refused => %s::bigint[])::text[]"""
_ENDPOINTS: Final = """
select id, name, url, body, batch, timeout, headers, gzip_above, rps, max_in_flight, retry_after, log,
  keep_response, state, ordered, source, secrets, queue, changed_at, worker
from pgmb.dispatched_endpoints(coalesce(%s::timestamptz, '-infinity'))"""
_QUEUES: Final = "select queue, endpoint::text, stream, statement_timestamp() from pgmb.dispatched_queues()"
_TAKE: Final = "select endpoint::text, given from pgmb.take_requests(%s::uuid[], %s::integer[])"
_PROBE: Final = """
select id::text from unnest(%s::uuid[], %s::interval[]) asked (id, busy_for)
where pgmb.probe_endpoint(id, busy_for)"""


class Received(NamedTuple):
    """The events of one receive."""

    events: list[ReceivedEvent]
    more: bool
    """Whether the queue may have more. Without events, it passed over some that are for no endpoint."""


class SourceQueue(NamedTuple):
    """A queue that feeds endpoints."""

    queue: str
    endpoint: str | None
    """The only endpoint that it feeds; None if several share it."""
    stream: str


class EndpointRow(NamedTuple):
    """An endpoint as `pgmb.dispatched_endpoints` returns it, its secrets still sealed."""

    id: UUID
    name: str
    url: str
    body: Literal["payload", "cloudevents"]
    batch: int
    timeout: timedelta
    headers: dict[str, str]
    gzip_above: int | None
    rps: int | None
    max_in_flight: int
    retry_after: list[timedelta] | None
    log: str
    keep_response: bool
    state: str
    ordered: bool
    source: str
    secrets: list[bytes]
    queue: str
    changed_at: datetime
    worker: bool


class ReceivedEvent(NamedTuple):
    """An event of a queue, under a lease, and the endpoints that it is for."""

    lease: str
    seq: int
    event: WebhookEvent
    attempt: int
    endpoints: list[str]


class ClaimedEvent(NamedTuple):
    """A row of `pgmb.delivery`, under a lease: an event for one endpoint."""

    lease: str
    row: int
    endpoint: str
    seq: int
    event: WebhookEvent
    attempt: int


class AttemptRecord(NamedTuple):
    """An attempt to log."""

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


class EndpointCounts(NamedTuple):
    """An endpoint's counts since the last heartbeat."""

    endpoint: str
    delivered: int
    failed: int
    error: str | None
    refused: int


class Store:
    """A dispatcher's SQL calls, over one connection in autocommit mode."""

    def __init__(self, connection: AsyncConnection[Any], lease_for: float) -> None:
        self._connection = connection
        self._lease_for = timedelta(seconds=lease_for)

    @property
    def lost(self) -> bool:
        """Whether the connection is of no use any more."""
        return self._connection.closed

    async def bury_unreadable(self, queue: str, error: str, attempts: int) -> int | None:
        """Give up the next event of a queue if it cannot be read. Returns its number."""
        ((number,),) = await self._rows(
            "select pgmb.bury_unreadable(%s, %s, %s::integer)", (queue, error, attempts)
        )
        return None if number is None else int(number)

    async def receive(self, queue: str, most: int, timed: bool) -> Received:
        """Lease the next events of a queue. Raises TimeoutRequired for SQL conditions unless `timed`."""
        given = (queue, most, self._lease_for)
        if not timed:
            return _received(await self._rows(_RECEIVE, given))
        with translated():
            async with self._connection.transaction():
                await self._connection.execute(_TIMEOUT)
                return _received(await self._rows(_RECEIVE, given))

    async def claim(self, most: int, room: int, rooms: dict[str, int]) -> list[ClaimedEvent]:
        """Lease waiting deliveries: at most `room` per endpoint, or its entry in `rooms`."""
        given = (most, self._lease_for, room, list(rooms), list(rooms.values()))
        return _claimed(await self._rows(_CLAIM, given))

    async def claim_probe(self, endpoint: str, *, fresh: bool) -> list[ClaimedEvent]:
        """Lease one waiting delivery of an endpoint, due or not. `fresh`: only one that has not failed."""
        return _claimed(await self._rows(_CLAIM_PROBE, (endpoint, fresh, self._lease_for)))

    async def hasten_retry(self, endpoint: str) -> bool:
        """Make one retry in an endpoint's own queues due now. False if none waits."""
        ((found,),) = await self._rows("select pgmb.hasten_retry(%s::uuid)", (endpoint,))
        return bool(found)

    async def settle(self, reports: Sequence[Settlement], attempts: Sequence[AttemptRecord]) -> int:
        """Settle leases and log attempts in one transaction. Returns how many leases had expired."""
        try:
            async with self._connection.transaction():
                for report in reports:
                    await self._settle(report)
                await self._log(attempts)
            return 0
        except LeaseLost:
            return await self._settle_apart(reports, attempts)

    async def _settle_apart(self, reports: Sequence[Settlement], attempts: Sequence[AttemptRecord]) -> int:
        lost = 0
        for report in reports:
            try:
                await self._settle(report)
            except LeaseLost:
                lost += 1
        await self._log(attempts)
        return lost

    async def _settle(self, report: Settlement) -> None:
        items, endpoints, after, errors, attempted, last = _columns(report.failures)
        if report.claimed:
            await self._rows(
                _SETTLE_CLAIMED, (report.lease, report.done or [], items, after, errors, attempted, last)
            )
        else:
            given = (report.lease, report.done, items, endpoints, after, errors, attempted, last)
            await self._rows(_SETTLE, given)

    async def _log(self, attempts: Sequence[AttemptRecord]) -> None:
        if attempts:
            await self._rows(_LOG, tuple(list(column) for column in zip(*attempts, strict=True)))

    async def extend(self, leases: Sequence[str], claimed: Sequence[str]) -> set[str]:
        """Renew leases. Returns those that this dispatcher still holds."""
        held: set[str] = set()
        for lease in leases:
            try:
                await self._rows("select pgmb.extend(%s::uuid, %s::interval)", (lease, self._lease_for))
            except LeaseLost:
                continue
            held.add(lease)
        if claimed:
            given = (list(claimed), self._lease_for)
            rows = await self._rows("select pgmb.extend_claimed(%s::uuid[], %s::interval)::text", given)
            held.update(lease for (lease,) in rows)
        return held

    async def heartbeat(
        self,
        dispatcher: UUID,
        host: str,
        pid: int,
        counts: Sequence[EndpointCounts],
        backends: Sequence[int],
    ) -> list[str]:
        """Report this dispatcher alive, with its counts and the server processes of its connections.

        Returns the ids of all live dispatchers.
        """
        *columns, refused = [list(column) for column in zip(*counts, strict=True)] or [[], [], [], [], []]
        given = (dispatcher, host, pid, *columns, list(backends), refused)
        ((alive,),) = await self._rows(_HEARTBEAT, given)
        return list(alive)

    async def depart(self, dispatcher: UUID) -> None:
        await self._rows("select pgmb.depart(%s::uuid)", (dispatcher,))

    async def endpoints(self, since: datetime | None) -> list[EndpointRow]:
        """The endpoints that changed since a time; None: all."""
        return [EndpointRow(*row) for row in await self._rows(_ENDPOINTS, (since,))]

    async def queues(self) -> tuple[list[SourceQueue], datetime | None]:
        """The queues that feed endpoints, and the database's clock if there are any."""
        rows = await self._rows(_QUEUES, ())
        return [SourceQueue(*row[:-1]) for row in rows], rows[0][-1] if rows else None

    async def take_requests(self, wanted: dict[str, int]) -> dict[str, int]:
        return dict(await self._rows(_TAKE, (list(wanted), list(wanted.values()))))

    async def trip(self, endpoint: str, reason: str) -> None:
        await self._rows("select pgmb.trip_endpoint(%s::uuid, %s)", (endpoint, reason))

    async def throttle(self, endpoint: str, seconds: float, reason: str) -> None:
        await self._rows(
            "select pgmb.throttle_endpoint(%s::uuid, %s, %s)", (endpoint, timedelta(seconds=seconds), reason)
        )

    async def probe(self, busy_for: dict[str, float]) -> list[str]:
        """The throttled and tripped endpoints that this dispatcher may probe. No other may meanwhile."""
        spans = [timedelta(seconds=seconds) for seconds in busy_for.values()]
        return [endpoint for (endpoint,) in await self._rows(_PROBE, (list(busy_for), spans))]

    async def end_probe(
        self, endpoint: str, succeeded: bool | None, reason: str | None, wait: float | None = None
    ) -> None:
        await self._rows(
            "select pgmb.end_probe(%s::uuid, %s, %s, wait => %s)",
            (endpoint, succeeded, reason, None if wait is None else timedelta(seconds=wait)),
        )

    async def disable(self, endpoint: str, reason: str) -> None:
        await self._rows("select pgmb.disable_endpoint(%s::uuid, %s)", (endpoint, reason))

    async def _rows(self, statement: Any, parameters: tuple[Any, ...]) -> list[Any]:
        with translated():
            async with self._connection.cursor(row_factory=tuple_row) as cursor:
                await cursor.execute(statement, parameters)
                return await cursor.fetchall()


def _received(rows: Sequence[Any]) -> Received:
    events = [
        ReceivedEvent(lease, seq, WebhookEvent(*event), attempt, endpoints)
        for lease, seq, *event, attempt, endpoints, _ in rows
        if lease is not None
    ]
    return Received(events, more=bool(rows) and rows[-1][-1])


def _claimed(rows: Sequence[Any]) -> list[ClaimedEvent]:
    return [
        ClaimedEvent(lease, row, endpoint, seq, WebhookEvent(*event), attempt)
        for lease, row, endpoint, seq, *event, attempt in rows
    ]


def _columns(failures: Sequence[DeliveryFailure]) -> list[list[Any]]:
    if not failures:
        return [[], [], [], [], [], []]
    items, endpoints, after, *rest = ([*column] for column in zip(*failures, strict=True))
    return [
        items,
        endpoints,
        [None if seconds is None else timedelta(seconds=seconds) for seconds in after],
        *rest,
    ]
