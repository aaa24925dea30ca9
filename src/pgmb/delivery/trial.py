"""One request to an endpoint, to see whether it answers: an event that is posted and in no log."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import msgspec
from psycopg.rows import dict_row

from pgmb.delivery.endpoint import Endpoint, Posted
from pgmb.delivery.request import build
from pgmb.delivery.signature import parse_secret
from pgmb.errors import EndpointNotFound, SecretKeyMissing, translated

if TYPE_CHECKING:
    from pgmb._async.broker import AsyncBroker
    from pgmb.delivery.client import Attempted, Poster
    from pgmb.delivery.sealing import Key

TOPIC: Final = "pgmb.test"

_ENDPOINT: Final = """
select id, name, url, body, batch, extract(epoch from timeout)::float as timeout, headers, gzip_above,
  keep_response, source, secrets
from pgmb.dispatched_endpoints() where name = %s::text"""
_LOG: Final = """
select pgmb.log_attempts(array[%s]::uuid[], '{null}', array[%s]::uuid[], array[%s], '{1}',
  array[%s]::integer[], array[%s]::real[], array[%s]::text[], array[%s]::text[], array[%s]::text[])"""


async def try_endpoint(broker: AsyncBroker, name: str, poster: Poster, key: Key | None) -> Attempted:
    """Post an event of topic pgmb.test, signed like any other, whatever the endpoint's state is.

    The attempt is written down.
    """
    with translated():
        async with broker.connection() as connection, connection.cursor(row_factory=dict_row) as cursor:
            await cursor.execute(_ENDPOINT, (name,))
            row = await cursor.fetchone()
    if row is None:
        missing = EndpointNotFound(f"endpoint {name!r} does not exist")
        missing.advise("pgmb endpoints list shows those that do.")
        raise missing
    endpoint = _opened(row, key)
    payload = msgspec.json.encode({"test": True, "endpoint": name}).decode()
    event = Posted(str(uuid4()), TOPIC, None, payload, None, datetime.now(UTC))
    request = build(endpoint, [event], 1, int(time.time()))
    attempted = await poster.post(request, endpoint.timeout, endpoint.keep_response)
    told = (attempted.status, attempted.latency, attempted.error_class, attempted.detail, attempted.response)
    async with broker.connection() as connection:
        await connection.execute(_LOG, (endpoint.id, event.id, TOPIC, *told))
    return attempted


def _opened(row: dict[str, Any], key: Key | None) -> Endpoint:
    sealed = row.pop("secrets")
    if sealed and key is None:
        missing = SecretKeyMissing("the endpoint has secrets, and there is no key to open them")
        missing.advise("Set PGMB_SECRET_KEY to the key that sealed them.")
        raise missing
    opened = [key.open(bytes(one), row["id"]) for one in sealed] if key is not None else []
    return Endpoint(**row, secrets=tuple(map(parse_secret, opened)))
