"""Operations on endpoints: HTTP destinations that a Dispatcher posts events to."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from pgmb._core import endpoints as asked
from pgmb._core.masking import masked_url
from pgmb.server.access import Principal
from pgmb.server.changes import audited
from pgmb.server.problems import invalid
from pgmb.server.rest.operation import Call, Need, Operations
from pgmb.server.rest.schemas import (
    Changed,
    Counted,
    Dropped,
    Duration,
    Given,
    Ids,
    Integer,
    Name,
    Nothing,
    Object,
    Page,
    Patterns,
    StreamName,
    Text,
    Time,
    Topic,
)
from pgmb.types import Attempt, AttemptLog, EndpointBody, EndpointStatus, NewEndpoint

operations = Operations("endpoints")

INSPECT: Final = Need("inspect")
OPERATE: Final = Need("operate")
_ENDPOINT: Final = "/v1/endpoints/{endpoint}"
_HIDDEN: Final = ("name", "secret", "headers")
"""Left out of the audit log: headers often hold passwords."""

Url = Annotated[str, msgspec.Meta(max_length=2000, pattern=r"^[^\x00]*$")]
Headers = dict[str, Text]
Durations = Annotated[list[Duration], msgspec.Meta(max_length=1000)]


class Endpoints(msgspec.Struct):
    endpoints: list[EndpointStatus]


class Attempts(msgspec.Struct):
    """The newest first."""

    attempts: list[Attempt]


class Posting(Given):
    """How events are posted. Omitted settings keep their value or default."""

    batch: Integer | None = None
    body: EndpointBody | None = None
    rps: Integer | None = None
    max_in_flight: Integer | None = None
    timeout: Duration | None = None
    headers: Headers | None = None
    gzip_above: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    retry_after: Durations | None = None
    log: AttemptLog | None = None
    keep_response: bool | None = None
    description: Text | None = None
    metadata: Object | None = None


class AlterEndpoint(Posting):
    url: Url | None = None


class BindEndpoint(Given):
    """Omitted settings are removed."""

    patterns: Patterns
    equals: Object | None = None
    filter: Text | None = None
    params: Object | None = None


class CreateEndpoint(Posting, kw_only=True):
    name: Name
    url: Url
    patterns: Patterns = msgspec.field(default_factory=lambda: ["#"])
    equals: Object | None = None
    filter: Text | None = None
    params: Object | None = None
    stream: StreamName = "main"
    ordered: bool = False
    queue: Name | None = None
    secret: Text | None = asked.AUTO
    """`whsec_…`, `whsk_…`, `generate` for a new one, null for none; `auto`: new if a sealing key is set."""


class Rotate(Given):
    secret: Text = asked.GENERATE
    overlap: Duration | None = None


class Rotated(msgspec.Struct):
    """The new secret, shown only once."""

    secret: str
    public_key: str | None


class Reason(Given):
    reason: Text | None = None


class Resend(Given):
    ids: Ids


class Replay(Given):
    since: Time | None = None
    until: Time | None = None
    topic: Topic | None = None
    filter: Text | None = None
    max: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None


class RedriveFailed(Given):
    since: Time | None = None


class AttemptsQuery(Given):
    max: Page = 100


def shown(endpoint: EndpointStatus, principal: Principal | None) -> EndpointStatus:
    """An endpoint as a key may see it. Urls, which often hold tokens, are masked."""
    if principal is not None and principal.may("operate"):
        return endpoint
    return msgspec.structs.replace(endpoint, url=masked_url(endpoint.url))


def _audited(body: CreateEndpoint | AlterEndpoint) -> dict[str, Any]:
    url = None if body.url is None else masked_url(body.url)
    return {**audited(body, *_HIDDEN), "url": url}


@operations.add("GET", "/v1/endpoints", INSPECT)
async def list_endpoints(call: Call) -> Endpoints:
    """List the endpoints with their topics, state and counts."""
    return Endpoints([shown(one, call.principal) for one in await call.broker.endpoints()])


@operations.add("GET", _ENDPOINT, INSPECT)
async def show_endpoint(call: Call, endpoint: Name) -> EndpointStatus:
    """Get an endpoint. Its url is masked for keys without the scope `operate`."""
    return shown(await call.broker.endpoint(endpoint), call.principal)


@operations.add("POST", "/v1/endpoints", OPERATE)
async def create_endpoint(call: Call, body: CreateEndpoint) -> NewEndpoint:
    """Register an endpoint, to which events that match are posted from now on.

    A name that is registered gets these settings, and keeps its state and secrets. The answer shows a secret
    that was made, this once.
    """
    async with call.changing() as change:
        made = await call.broker.create_endpoint(**audited(body), conn=change.conn)
        await change.record("create_endpoint", body.name, **_audited(body))
    return made


@operations.add("PATCH", _ENDPOINT, OPERATE)
async def alter_endpoint(call: Call, endpoint: Name, body: AlterEndpoint) -> None:
    """Change an endpoint's settings; omitted ones stay. `rps` 0 and `gzip_above` -1 remove these limits."""
    given = {name: value for name, value in audited(body).items() if value is not None}
    if not given:
        raise invalid("nothing to change: no setting was given")
    async with call.changing() as change:
        await call.broker.alter_endpoint(endpoint, **given, conn=change.conn)
        await change.record("alter_endpoint", endpoint, **_audited(body))


@operations.add("POST", f"{_ENDPOINT}/bind", OPERATE)
async def bind_endpoint(call: Call, endpoint: Name, body: BindEndpoint) -> None:
    """Replace an endpoint's patterns and filter."""
    async with call.changing() as change:
        await call.broker.bind_endpoint(endpoint, **audited(body), conn=change.conn)
        await change.record("bind_endpoint", endpoint, **audited(body))


@operations.add("DELETE", _ENDPOINT, OPERATE)
async def drop_endpoint(call: Call, endpoint: Name) -> Dropped:
    """Drop an endpoint with its waiting events, attempts and dead letters."""
    async with call.changing() as change:
        dropped = await call.broker.drop_endpoint(endpoint, conn=change.conn)
        if dropped:
            await change.record("drop_endpoint", endpoint)
    return Dropped(dropped)


@operations.add("POST", f"{_ENDPOINT}/pause", OPERATE)
async def pause_endpoint(call: Call, endpoint: Name, body: Reason) -> Changed:
    """Pause an endpoint. Its events wait until it is resumed."""
    async with call.changing() as change:
        changed = await call.broker.pause_endpoint(endpoint, body.reason, conn=change.conn)
        await change.record("pause_endpoint", endpoint, reason=body.reason)
    return Changed(changed)


@operations.add("POST", f"{_ENDPOINT}/resume", OPERATE)
async def resume_endpoint(call: Call, endpoint: Name, body: Nothing) -> Changed:
    """Resume an endpoint that was paused, throttled, tripped or disabled."""
    async with call.changing() as change:
        changed = await call.broker.resume_endpoint(endpoint, conn=change.conn)
        await change.record("resume_endpoint", endpoint)
    return Changed(changed)


@operations.add("POST", f"{_ENDPOINT}/disable", OPERATE)
async def disable_endpoint(call: Call, endpoint: Name, body: Reason) -> Changed:
    """Disable an endpoint. It gets no events until it is resumed."""
    async with call.changing() as change:
        changed = await call.broker.disable_endpoint(endpoint, body.reason, conn=change.conn)
        await change.record("disable_endpoint", endpoint, reason=body.reason)
    return Changed(changed)


@operations.add("POST", f"{_ENDPOINT}/rotate_secret", OPERATE)
async def rotate_secret(call: Call, endpoint: Name, body: Rotate) -> Rotated:
    """Rotate the secret. For `overlap`, by default a day, requests are signed with the old one too."""
    async with call.changing() as change:
        secret = await call.broker.rotate_secret(
            endpoint, body.secret, overlap=body.overlap, conn=change.conn
        )
        await change.record("rotate_secret", endpoint, overlap=body.overlap)
    return Rotated(secret, asked.public_key(secret))


@operations.add("GET", f"{_ENDPOINT}/attempts", INSPECT)
async def list_attempts(call: Call, endpoint: Name, query: AttemptsQuery) -> Attempts:
    """List attempts: failures, or all, depending on the endpoint's `log`."""
    return Attempts(await call.broker.attempts(endpoint, query.max))


@operations.add("POST", f"{_ENDPOINT}/resend", OPERATE)
async def resend(call: Call, endpoint: Name, body: Resend) -> Counted:
    """Resend events of the log to an endpoint, by id. Returns how many were found."""
    async with call.changing() as change:
        count = await call.broker.resend(endpoint, body.ids, conn=change.conn)
        await change.record("resend", endpoint, count=count)
    return Counted(count)


@operations.add("POST", f"{_ENDPOINT}/replay", OPERATE)
async def replay(call: Call, endpoint: Name, body: Replay) -> Counted:
    """Resend matching events of the log to an endpoint, the oldest first, by default at most 10,000."""
    async with call.changing() as change:
        # An endpoint with an SQL condition requires a statement timeout.
        await change.conn.execute("select set_config('statement_timeout', '60s', true)")
        count = await call.broker.replay(endpoint, **audited(body), conn=change.conn)
        await change.record("replay", endpoint, **audited(body), count=count)
    return Counted(count)


@operations.add("POST", f"{_ENDPOINT}/redrive", OPERATE)
async def redrive_failed(call: Call, endpoint: Name, body: RedriveFailed) -> Counted:
    """Redrive an endpoint's dead letters, and retry its waiting events at once."""
    async with call.changing() as change:
        count = await call.broker.redrive_failed(endpoint, body.since, conn=change.conn)
        await change.record("redrive_failed", endpoint, since=body.since, count=count)
    return Counted(count)
