"""Who sends a request, and what it may do: API keys, sessions, tickets and their scopes.

Credentials are looked up in the database and cached for seconds.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Generator, Iterable
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import msgspec
import psycopg
from psycopg_pool import PoolTimeout
from starlette.requests import HTTPConnection

from pgmb._async.broker import AsyncBroker
from pgmb._core.keys import KEY, digest, generate
from pgmb.errors import PgmbError
from pgmb.server.database import rows
from pgmb.server.instrumentation import KEY_NAME
from pgmb.server.limits import Limits, Rates
from pgmb.server.problems import Problem, forbidden, unauthorised
from pgmb.server.tasks import SharedCache, cancel_and_wait

Verb: TypeAlias = Literal["publish", "read", "consume", "inspect", "operate"]

_ANY_NAME: Final = "*"


def covers(scopes: Iterable[str], verb: Verb, name: str | None = None) -> bool:
    """Whether scopes allow an action. `operate` allows everything, `inspect` reading everything."""
    held = set(scopes)
    if "operate" in held or verb in held:
        return True
    if verb == "read" and "inspect" in held:
        return True
    return name is not None and (f"{verb}:{name}" in held or f"{verb}:{_ANY_NAME}" in held)


class Principal(msgspec.Struct, frozen=True):
    """The client: an API key, or an access token (session or ticket) that was issued for it."""

    key: int
    name: str
    scopes: frozenset[str]
    kind: Literal["key", "session", "ticket"] = "key"
    csrf: str | None = None
    """The token that this session's forms must contain."""
    session: bytes | None = None
    """The digest of the session."""

    @property
    def actor(self) -> str:
        """Its name in the audit log."""
        return f"key:{self.name}"

    def may(self, verb: Verb, name: str | None = None) -> bool:
        return covers(self.scopes, verb, name)

    def may_all(self, scopes: Iterable[str]) -> bool:
        """Whether it may grant these scopes to others."""
        for scope in scopes:
            verb, _, name = scope.partition(":")
            if not covers(self.scopes, verb, name or None):  # type: ignore[arg-type]
                return False
        return True


SESSION: Final = "pgmb_session_"
TICKET: Final = "pgmb_ticket_"


def csrf_of(session: str) -> str:
    """The CSRF token of a session: forms must contain it, and other sites cannot know it."""
    derived = hashlib.sha256(b"pgmb csrf " + session.encode("utf-8", "surrogateescape")).digest()
    return base64.urlsafe_b64encode(derived[:24]).decode()


def is_same(one: str, other: str) -> bool:
    """Compare in constant time."""
    return secrets.compare_digest(one.encode("utf-8", "replace"), other.encode("utf-8", "replace"))


logger = logging.getLogger("pgmb.server")

COOKIE: Final = "pgmb_session"
RECHECK_EVERY: Final = 2.0
"""Seconds between checks of the credentials of long requests."""
_GOOD_KEYS: Final = (
    "select k.id from pgmb.api_keys k"
    " where k.id = any (%s) and (k.expires_at is null or k.expires_at > statement_timestamp())"
)
_GOOD_SESSIONS: Final = (
    "select s.digest from unnest(%s::bytea[]) s (digest)"
    " where exists (select from pgmb.find_session(s.digest))"
)

_CACHED_SECONDS: Final = 5.0
"""A revoked key may still work this long."""
_MOST_CACHED: Final = 10_000
_Lookup: TypeAlias = Callable[[str], Coroutine[Any, Any, Principal | None]]

_LONGEST_CREDENTIAL: Final = 200
"""Characters. Longer texts are no credentials of pgmb and are not looked up."""


class Access:
    """Authenticates and authorizes requests, and issues sessions and tickets."""

    def __init__(
        self,
        broker: AsyncBroker,
        *,
        rates: Rates | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._broker = broker
        self._rates = rates or Rates(Limits().requests_per_second, Limits().burst)
        self._watches: set[tuple[Principal, Callable[[], None]]] = set()
        self._checking: asyncio.Task[None] | None = None
        # Many readers are checked at the same time: they share one lookup.
        self._cache: SharedCache[tuple[str, bytes], Principal | None] = SharedCache(
            _MOST_CACHED, _CACHED_SECONDS, clock
        )

    async def principal(self, connection: HTTPConnection, *, ticket: bool = False) -> Principal | None:
        """The client, by `Authorization: Bearer`, session cookie or, if allowed, ticket.

        Every request counts: for its key, or for its address if it has none. One with a credential that this
        process does not know counts for the address before it is looked up. Raises Problem 429.
        """
        kind, text = _credential(connection, ticket)
        known = self._cache.latest((kind, digest(text))) if text else None
        if known is None:
            self.count_address(connection)
        found = await self._found(kind, text) if text else None
        if found is None:
            if known is not None:
                self.count_address(connection)
            return None
        if known is None:
            self._rates.give_back(_address(connection))
        self._rates.take(found.key)
        connection.scope[KEY_NAME] = found.name
        return found

    def count_address(self, connection: HTTPConnection) -> None:
        """Count a request without a key. Raises Problem 429 above the rate."""
        self._rates.take(_address(connection))

    async def _found(self, kind: str, text: str) -> Principal | None:
        match kind:
            case "key":
                return await self._cached(kind, text, self._key)
            case "session":
                return await self._cached(kind, text, self._session)
            case _:
                return await self._ticket(text)

    async def need(
        self, connection: HTTPConnection, verb: Verb, name: str | None = None, *, ticket: bool = False
    ) -> Principal:
        """The client. Raises Problem 401 or 403 unless it may do this."""
        principal = await self.principal(connection, ticket=ticket)
        if principal is None:
            raise unauthorised()
        if not principal.may(verb, name):
            raise forbidden(verb, name)
        return principal

    async def login(self, key: str, lasts: timedelta = timedelta(hours=12)) -> tuple[str, Principal] | None:
        """Exchange a key for a session, to be stored in the cookie. None if the key is not valid."""
        holder = None if _is_malformed(key) else await self._key(key)
        if holder is None:
            return None
        session = generate(SESSION)
        if not await self._issue(holder, "session", session, holder.scopes, lasts):
            return None
        return session, _session_principal(session, holder.key, holder.name, holder.scopes)

    async def logout(self, session: str) -> None:
        """End a session: in this process at once, in others within seconds."""
        ended = digest(session)
        self._cache.forget(("session", ended))
        await rows(self._broker, "select pgmb.end_session(%s)", (ended,))

    async def ticket(self, holder: Principal, scopes: Iterable[str], lasts: timedelta) -> str:
        """Issue a ticket for one request, for clients that cannot send headers, such as EventSource."""
        wanted = frozenset(scopes)
        if not holder.may_all(wanted):
            raise forbidden("the scopes asked for")
        text = generate(TICKET)
        if not await self._issue(holder, "ticket", text, wanted, lasts):
            raise unauthorised()
        return text

    @contextmanager
    def watching(self, principal: Principal, revoked: Callable[[], None]) -> Generator[None]:
        """Call `revoked` if the key or session of a request is revoked or expires during it."""
        watch = (principal, revoked)
        self._watches.add(watch)
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check_watched(), name="pgmb access")
        try:
            yield
        finally:
            self._watches.discard(watch)

    async def close(self) -> None:
        if self._checking is not None:
            await cancel_and_wait(self._checking)

    async def _check_watched(self) -> None:
        while self._watches:
            await asyncio.sleep(RECHECK_EVERY)
            keys = {principal.key for principal, _ in self._watches}
            sessions = {principal.session for principal, _ in self._watches if principal.session is not None}
            try:
                good = {one for (one,) in await rows(self._broker, _GOOD_KEYS, (list(keys),))}
                if sessions:
                    found = await rows(self._broker, _GOOD_SESSIONS, (list(sessions),))
                    good |= {bytes(one) for (one,) in found}
            except (psycopg.Error, PoolTimeout, PgmbError) as error:
                # While the database does not answer, no events are read either.
                logger.info("cannot check the keys of open requests: %s", error)
                continue
            for principal, revoked in list(self._watches):
                asked = principal.key in keys and (principal.session is None or principal.session in sessions)
                if asked and not {principal.key, principal.session or principal.key} <= good:
                    revoked()

    def check_csrf(self, principal: Principal, given: str | None) -> None:
        """Raise Problem 403 unless a session's CSRF token matches. Keys in a header need none."""
        if principal.csrf is not None and (given is None or not is_same(principal.csrf, given)):
            raise Problem(403, "csrf", "the form belongs to another session: reload the page")

    async def _cached(self, kind: str, text: str, lookup: _Lookup) -> Principal | None:
        if _is_malformed(text):
            return None
        # Cached by kind too: a key must not work as a session cookie, or forms would need no CSRF token.
        return await self._cache.get((kind, digest(text)), partial(lookup, text))

    async def _key(self, text: str) -> Principal | None:
        if not text.startswith(KEY):
            return None
        found = await rows(
            self._broker, "select id, name, scopes from pgmb.find_api_key(%s)", (digest(text),)
        )
        return Principal(found[0][0], found[0][1], frozenset(found[0][2])) if found else None

    async def _session(self, text: str) -> Principal | None:
        if not text.startswith(SESSION):
            return None
        found = await rows(
            self._broker, "select api_key, name, scopes from pgmb.find_session(%s)", (digest(text),)
        )
        if not found:
            return None
        key, name, scopes = found[0]
        return _session_principal(text, key, name, frozenset(scopes))

    async def _ticket(self, text: str) -> Principal | None:
        if _is_malformed(text) or not text.startswith(TICKET):
            return None
        found = await rows(
            self._broker, "select api_key, name, scopes from pgmb.take_ticket(%s)", (digest(text),)
        )
        return Principal(found[0][0], found[0][1], frozenset(found[0][2]), "ticket") if found else None

    async def _issue(
        self, holder: Principal, kind: str, text: str, scopes: Iterable[str], lasts: timedelta
    ) -> bool:
        found = await rows(
            self._broker,
            "select pgmb.create_access_token(%s, %s, %s, %s, %s)",
            (holder.key, kind, digest(text), sorted(scopes), lasts),
        )
        return bool(found[0][0])


def _credential(connection: HTTPConnection, ticket: bool) -> tuple[str, str]:
    """The kind and the text of a request's credential; the text is empty if there is none."""
    scheme, _, given = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return "key", given.strip()
    session = connection.cookies.get(COOKIE)
    if session is not None:
        return "session", session
    return "ticket", connection.query_params.get("ticket", "") if ticket else ""


def _address(connection: HTTPConnection) -> str:
    return "" if connection.client is None else connection.client.host


def _session_principal(text: str, key: int, name: str, scopes: frozenset[str]) -> Principal:
    return Principal(key, name, scopes, "session", csrf_of(text), digest(text))


def _is_malformed(text: str) -> bool:
    """Whether a text cannot be a credential of pgmb, and needs no lookup."""
    return not text or len(text) > _LONGEST_CREDENTIAL or not text.isascii()
