"""Sends the requests of the lanes, and turns each response into settlements and state changes."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from uuid import uuid4

import msgspec
from psycopg.rows import dict_row

from pgmb._core import chance
from pgmb.errors import EndpointNotFound, SecretKeyMissing, translated
from pgmb.webhooks.leases import DeliveryFailure, WebhookDelivery
from pgmb.webhooks.outcomes import CircuitBreaker, delay_after, is_ours
from pgmb.webhooks.request import Endpoint, WebhookEvent, build_request
from pgmb.webhooks.secrets import parse_secret
from pgmb.webhooks.store import AttemptRecord

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pgmb._async.broker import AsyncBroker
    from pgmb.webhooks.client import AttemptResult, WebhookClient
    from pgmb.webhooks.lanes import Lane
    from pgmb.webhooks.request import Serialiser
    from pgmb.webhooks.secrets import SealingKey
    from pgmb.webhooks.store import Store

logger = logging.getLogger("pgmb.webhooks")

_TOO_MANY_REQUESTS: Final = 429
_PAUSE_AFTER_OWN_FAULT: Final = 1.0
"""Seconds until a delivery is tried again that this process had no files, memory or addresses for."""
_RETRY_SPREAD: Final = 0.001
"""Seconds, at most, that are added to a retry at random."""

Decision: TypeAlias = "Callable[[Store], Awaitable[Any]]"


class Sender:
    """Runs requests concurrently, and keeps their results until the dispatcher has written them."""

    def __init__(
        self, client: WebhookClient, clock: Callable[[], float], serialiser: Serialiser | None = None
    ) -> None:
        self.wake = asyncio.Event()
        """Set when there are results to write."""
        self.attempts: list[AttemptRecord] = []
        self.decisions: list[tuple[Lane, Decision]] = []
        """State changes of endpoints, to be written in this order."""
        self._client = client
        self._clock = clock
        self._serialiser = serialiser
        self.alive_until = float("-inf")
        """By the clock of this process. Later, the others may count it as dead and use its share."""
        self._requests: set[asyncio.Task[None]] = set()

    def start(self, lane: Lane) -> None:
        """Start as many requests as the lane allows."""
        for _ in range(lane.startable):
            deliveries = self._next(lane)
            if deliveries is None:
                return
            request = asyncio.create_task(self._run(lane, deliveries))
            self._requests.add(request)
            request.add_done_callback(self._requests.discard)

    def _next(self, lane: Lane) -> list[WebhookDelivery] | None:
        """The deliveries of the lane's next request.

        None without a recent heartbeat. This is where a request starts: the process may have lost the
        database or stood still since it last talked to it. Deliveries of leases that others may hold by now
        are given back.
        """
        while (now := self._clock()) < self.alive_until:
            taken = lane.take()
            if taken is None or all(now < delivery.lease.valid_until for delivery in taken):
                return taken
            self._give_back(lane, taken)
        return None

    def park(self, lane: Lane, *, excess: bool = False) -> None:
        """Return a lane's pending deliveries to the database, so that their leases can end.

        `excess`: only those that it will not deliver soon.
        """
        for delivery in lane.excess() if excess else lane.clear():
            delivery.lease.failed(DeliveryFailure(delivery.item, lane.endpoint_id, 0.0, None, False, False))
            lane.has_backlog = True
            self.wake.set()

    async def stop(self, grace: float) -> None:
        """Wait `grace` seconds for requests in flight, then cancel the rest."""
        if self._requests:
            await asyncio.wait(self._requests, timeout=grace)
        for request in self._requests:
            request.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)

    async def _run(self, lane: Lane, first: list[WebhookDelivery]) -> None:
        """Send one request after another until the lane has no more for this task."""
        deliveries: list[WebhookDelivery] | None = first
        while deliveries is not None:
            endpoint = lane.endpoint
            try:
                events = [delivery.event for delivery in deliveries]
                request = build_request(
                    endpoint, events, deliveries[0].attempt, int(time.time()), self._serialiser
                )
                result = await self._client.post(request, endpoint.timeout, endpoint.keep_response)
            except asyncio.CancelledError:
                self._give_back(lane, deliveries)
                raise
            except Exception as error:
                # Most likely raised by a serialiser. It counts as a failed attempt of the message.
                logger.exception("endpoint %s: building the request failed", endpoint.name)
                if is_ours(error):
                    self._give_back(lane, deliveries, _PAUSE_AFTER_OWN_FAULT)
                else:
                    self._fail(lane, deliveries, f"{type(error).__name__}: {error}", ours=True)
            else:
                self._judge(lane, deliveries, result)
            deliveries = self._next(lane)

    def _judge(self, lane: Lane, deliveries: list[WebhookDelivery], result: AttemptResult) -> None:
        if result.kind == "unsent":
            logger.warning("endpoint %s: no request was sent: %s", lane.endpoint.name, result.detail)
            self._give_back(lane, deliveries, _PAUSE_AFTER_OWN_FAULT)
            return
        if result.kind != "delivered" or lane.logs_all:
            self._log_attempt(lane, deliveries, result)
        if result.kind == "delivered":
            self._delivered(lane, deliveries)
            return
        error = ": ".join(filter(None, (result.error_class, result.detail)))
        kind, wait = result.kind, result.retry_after
        if kind == "gone" and lane.is_worker:
            kind = "refused"
        if kind == "gone":
            lane.state = "disabled"
            logger.warning("endpoint %s: disabled: it answered 410 Gone", lane.endpoint.name)
            self._decide(lane, lambda store: store.disable(lane.endpoint_id, "410 Gone"))
        elif wait is not None and lane.state == "active":
            self._throttle(lane, wait, f"{error}: it asked for {wait:.0f} s")
        # 429 does not count towards the breaker: the endpoint works, and limits its rate.
        throttled = kind == "throttled" and (wait is not None or result.status == _TOO_MANY_REQUESTS)
        counts = kind in ("failed", "throttled") and not throttled
        self._fail(lane, deliveries, error, wait, counts=counts, refused=kind == "refused")

    def _delivered(self, lane: Lane, deliveries: list[WebhookDelivery]) -> None:
        lane.finish(deliveries, delivered=True)
        lane.breaker.succeeded()
        lane.error = None
        if lane.failing:
            lane.failing = False
            logger.info("endpoint %s: requests succeed again", lane.endpoint.name)
        for delivery in deliveries:
            delivery.lease.delivered(delivery.item)
            if delivery.lease.open == 0:
                self.wake.set()
        if lane.probing:
            self._end_probe(lane, True, None)

    def _fail(
        self,
        lane: Lane,
        deliveries: list[WebhookDelivery],
        error: str,
        min_delay: float | None = None,
        *,
        counts: bool = True,
        refused: bool = False,
        ours: bool = False,
    ) -> None:
        """Record a failed request. `counts`: towards the breaker. `refused`: the endpoint works.

        `ours`: nothing was sent, so it says nothing of the endpoint.
        """
        lane.error = error
        if not lane.failing:
            lane.failing = True
            logger.warning(
                "endpoint %s: event %s failed at attempt %d: %s",
                lane.endpoint.name,
                deliveries[0].event.id,
                deliveries[0].attempt,
                error,
            )
        behind = (
            lane.abandon(deliveries) if ours else lane.finish(deliveries, delivered=False, refused=refused)
        )
        after, last = self._next_try(lane, deliveries[0].attempt, min_delay)
        for delivery in deliveries:
            delivery.lease.failed(DeliveryFailure(delivery.item, lane.endpoint_id, after, error, True, last))
        for delivery in behind:
            delivery.lease.release(delivery.item)
        self.wake.set()
        if lane.probing:
            self._end_probe(lane, None if ours else refused, error, min_delay)
        elif counts and not ours:
            lane.breaker.failed(deliveries[0].event.id)
            if lane.breaker.tripped and lane.state == "active":
                lane.state = "tripped"
                logger.warning("endpoint %s: tripped: requests fail: %s", lane.endpoint.name, error)
                self._decide(lane, lambda store: store.trip(lane.endpoint_id, error))
        if not lane.open:
            self.park(lane)

    def _throttle(self, lane: Lane, wait: float, reason: str) -> None:
        lane.state = "throttled"
        logger.warning("endpoint %s: throttled: %s", lane.endpoint.name, reason)
        self._decide(lane, lambda store: store.throttle(lane.endpoint_id, wait, reason))

    def _decide(self, lane: Lane, decision: Decision) -> None:
        lane.undecided += 1
        self.decisions.append((lane, decision))

    def _next_try(self, lane: Lane, attempt: int, min_delay: float | None) -> tuple[float | None, bool]:
        """Seconds until the retry (None: the queue's schedule), and whether the delivery is given up."""
        schedule = lane.endpoint.retry_after
        if lane.state == "disabled" and lane.shares_queue:
            return None, True
        if schedule is None:
            return min_delay, False
        after = delay_after(schedule, attempt, chance.fraction)
        if after is None:
            return None, True
        # Batches that failed together must be due at different times, or they would be retried as one batch.
        return max(after, min_delay or 0.0) + chance.fraction() * _RETRY_SPREAD, False

    def _end_probe(
        self, lane: Lane, succeeded: bool | None, reason: str | None, wait: float | None = None
    ) -> None:
        lane.probing = False
        if succeeded:
            lane.state = "active"
            lane.breaker = CircuitBreaker(self._clock)
            lane.has_backlog = True
            logger.info("endpoint %s: active: a request succeeded", lane.endpoint.name)
        self._decide(lane, lambda store: store.end_probe(lane.endpoint_id, succeeded, reason, wait))
        self.wake.set()

    def _give_back(self, lane: Lane, deliveries: list[WebhookDelivery], after: float = 0.0) -> None:
        for delivery in [*deliveries, *lane.abandon(deliveries)]:
            delivery.lease.failed(DeliveryFailure(delivery.item, lane.endpoint_id, after, None, False, False))
        if lane.probing:
            self._end_probe(lane, None, None)
        self.wake.set()

    def _log_attempt(self, lane: Lane, deliveries: list[WebhookDelivery], result: AttemptResult) -> None:
        for delivery in deliveries:
            event = delivery.event
            self.attempts.append(
                AttemptRecord(
                    lane.endpoint_id,
                    delivery.seq,
                    event.id,
                    event.topic,
                    delivery.attempt,
                    result.status,
                    result.latency,
                    result.error_class,
                    result.detail,
                    result.response,
                )
            )


TEST_TOPIC: Final = "pgmb.test"

_TEST_ENDPOINT: Final = """
select id, name, url, body, batch, extract(epoch from timeout)::float as timeout, headers, gzip_above,
  keep_response, source, secrets
from pgmb.dispatched_endpoints() where name = %s::text"""
_LOG_TEST: Final = """
select pgmb.log_attempts(array[%s]::uuid[], '{null}', array[%s]::uuid[], array[%s], '{1}',
  array[%s]::integer[], array[%s]::real[], array[%s]::text[], array[%s]::text[], array[%s]::text[])"""


async def try_endpoint(
    broker: AsyncBroker, name: str, client: WebhookClient, key: SealingKey | None
) -> AttemptResult:
    """Post a signed test event of topic `pgmb.test`, whatever the endpoint's state, and log the attempt.

    The event is not stored in the log.
    """
    with translated():
        async with broker.own_connection() as connection, connection.cursor(row_factory=dict_row) as cursor:
            await cursor.execute(_TEST_ENDPOINT, (name,))
            row = await cursor.fetchone()
    if row is None:
        missing = EndpointNotFound(f"endpoint {name!r} does not exist")
        missing.advise("`pgmb endpoints list` shows the existing ones.")
        raise missing
    endpoint = _opened(row, key)
    payload = msgspec.json.encode({"test": True, "endpoint": name}).decode()
    event = WebhookEvent(str(uuid4()), TEST_TOPIC, None, payload, None, datetime.now(UTC))
    request = build_request(endpoint, [event], 1, int(time.time()))
    result = await client.post(request, endpoint.timeout, endpoint.keep_response)
    outcome = (result.status, result.latency, result.error_class, result.detail, result.response)
    async with broker.own_connection() as connection:
        await connection.execute(_LOG_TEST, (endpoint.id, event.id, TEST_TOPIC, *outcome))
    return result


def _opened(row: dict[str, Any], key: SealingKey | None) -> Endpoint:
    sealed = row.pop("secrets")
    if sealed and key is None:
        missing = SecretKeyMissing("the endpoint has secrets, and no key is set to open them")
        missing.advise("Set PGMB_SECRET_KEY to the key that encrypted them.")
        raise missing
    opened = [key.open(bytes(one), row["id"]) for one in sealed] if key is not None else []
    return Endpoint(**row, secrets=tuple(map(parse_secret, opened)))
