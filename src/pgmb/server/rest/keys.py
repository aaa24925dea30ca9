"""Operations on API keys and tickets."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Final

import msgspec

from pgmb.errors import NotFound
from pgmb.server.problems import Problem, forbidden
from pgmb.server.rest.operation import Call, Need, Operations
from pgmb.server.rest.schemas import Given, Name, Time
from pgmb.types import ApiKey

operations = Operations("keys")

OPERATE: Final = Need("operate")

Scope = Annotated[
    str,
    msgspec.Meta(
        max_length=200,
        pattern=r"^(inspect|operate|(publish|read|consume):[^\x00-\x1f\x7f]+)$",
        description="`publish:STREAM`, `read:STREAM`, `consume:QUEUE`, each with `*` for all; `inspect`;"
        " `operate`.",
    ),
]
Scopes = Annotated[list[Scope], msgspec.Meta(min_length=1, max_length=1000)]


class Keys(msgspec.Struct):
    keys: list[ApiKey]


class CreateKey(Given):
    name: Name
    scopes: Scopes
    expires_at: Time | None = None


class NewKeyDocument(msgspec.Struct):
    """The key, shown only once: the database stores its digest."""

    name: str
    key: str


class AskTicket(Given):
    scopes: Scopes
    lasts: Annotated[float, msgspec.Meta(gt=0, le=60)] = 60
    """Seconds."""


class Ticket(msgspec.Struct):
    """Valid for one request, as `?ticket=`."""

    ticket: str


@operations.add("GET", "/v1/keys", OPERATE)
async def list_keys(call: Call) -> Keys:
    """List the keys, without their secrets."""
    return Keys(await call.broker.api_keys())


@operations.add("POST", "/v1/keys", OPERATE)
async def create_key(call: Call, body: CreateKey) -> NewKeyDocument:
    """Create a key. Its scopes and expiry may not exceed those of the creating key."""
    if not call.principal.may_all(body.scopes):
        raise forbidden("the scopes asked for")
    async with call.changing() as change:
        if change.ends is not None and (body.expires_at is None or body.expires_at > change.ends):
            raise Problem(403, "forbidden", "a key cannot expire later than the key that creates it")
        made = await call.broker.create_api_key(
            body.name, body.scopes, expires_at=body.expires_at, conn=change.conn
        )
        await change.record("create_api_key", body.name, scopes=body.scopes, expires_at=body.expires_at)
    return NewKeyDocument(made.name, made.key)


@operations.add("DELETE", "/v1/keys/{key}", OPERATE)
async def drop_key(call: Call, key: Name) -> None:
    """Revoke a key with its sessions and tickets, within seconds."""
    async with call.changing() as change:
        if not await call.broker.drop_api_key(key, conn=change.conn):
            raise NotFound("there is no such key")
        await change.record("drop_api_key", key)


@operations.add("POST", "/v1/tickets")
async def create_ticket(call: Call, body: AskTicket) -> Ticket:
    """Create a ticket for one request, for clients that cannot send headers, such as EventSource."""
    lasts = timedelta(seconds=body.lasts)
    return Ticket(await call.context.access.ticket(call.principal, body.scopes, lasts))
