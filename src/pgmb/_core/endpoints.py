"""Statements of endpoints, and the secrets that sign their requests."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final
from uuid import UUID

from pgmb._core import wire
from pgmb._core.statements import Statement
from pgmb.errors import PgmbError, SecretKeyMissing

if TYPE_CHECKING:
    from pgmb.webhooks.secrets import SealingKey

AUTO: Final = "auto"
GENERATE: Final = "generate"

_KEY: Final = ("PGMB_SECRET_KEY", "PGMB_SECRET_KEY_FILE")

_ENDPOINTS: Final = (
    "select id, name, url, state, reason, queue, stream, patterns, equals, filter, condition, params,"
    " ordered, batch, body, rps, max_in_flight, timeout, headers, retry_after, gzip_above, log,"
    " keep_response, description, metadata, secrets, delivered, failed, error, waiting, oldest_age,"
    " at_least, delivered_at, failed_at, failing_since, probe_at, created_at, changed_at from pgmb.endpoints"
)
_ATTEMPTS: Final = (
    "select a.id, a.at, a.seq, a.event_id, a.topic, a.attempt, a.status, a.seconds, a.error, a.detail,"
    " a.response from pgmb.attempt a where a.endpoint = %s::uuid order by a.id desc limit %s::bigint"
)

ENDPOINTS: Final = Statement(_ENDPOINTS + " order by name", ())


def endpoint_id(name: str) -> Statement:
    return Statement("select id from pgmb.endpoints where name = %s::text", (name,))


def endpoint(name: str) -> Statement:
    return Statement(_ENDPOINTS + " where name = %s::text", (name,))


def attempts(endpoint: UUID, most: int) -> Statement:
    return Statement(_ATTEMPTS, (endpoint, most))


def sealed_secrets(name: str) -> Statement:
    return Statement("select secrets from pgmb.dispatched_endpoints() where name = %s::text", (name,))


def beginning(since: datetime | None) -> datetime | str:
    """The time that a replay begins at: without one, that of all that is kept."""
    return "-infinity" if since is None else since


def uuids(ids: Iterable[UUID | str]) -> wire.UuidArray:
    return wire.UuidArray([(id if isinstance(id, UUID) else UUID(id)).bytes for id in ids])


def sealing_key() -> SealingKey | None:
    """The key of the environment, where there is one."""
    if not any(os.environ.get(name) for name in _KEY):
        return None
    from pgmb.webhooks.secrets import SealingKey

    return SealingKey.from_environment()


def required_key() -> SealingKey:
    key = sealing_key()
    if key is None:
        missing = SecretKeyMissing("there is no key to seal secrets with")
        missing.advise("Set PGMB_SECRET_KEY. `pgmb endpoints key` creates one.")
        raise missing
    return key


def new_secret(asked: str | None, key: SealingKey | None) -> str | None:
    """The text that is meant, checked: one that was given, a new one, or none."""
    if asked is None or (asked == AUTO and key is None):
        return None
    from pgmb.webhooks.secrets import generate_secret, parse_secret

    if asked in (AUTO, GENERATE):
        return generate_secret()
    parse_secret(asked)
    return asked


def sealed_headers(key: SealingKey, endpoint: UUID, headers: Mapping[str, str]) -> dict[str, str]:
    """An endpoint's headers as they are stored. Checked here: the database cannot check a sealed value."""
    from pgmb.webhooks.request import check_headers
    from pgmb.webhooks.secrets import seal_headers

    check_headers(headers)
    return seal_headers(key, endpoint, headers)


def public_key(secret: str | None) -> str | None:
    """What receivers check with where that is not the secret itself."""
    if secret is None:
        return None
    from pgmb.webhooks.secrets import parse_secret

    return parse_secret(secret).public


def knows(key: SealingKey, endpoint: UUID, sealed: Sequence[bytes], secret: str) -> bool:
    """Whether one of the sealed secrets is this one."""

    def opened(one: bytes) -> str | None:
        try:
            return key.open(bytes(one), endpoint)
        except PgmbError:
            return None

    return any(opened(one) == secret for one in sealed)
