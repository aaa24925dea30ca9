"""Who asks: keys, sessions and tickets, looked up in the database and remembered for a moment."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Generator, Iterable
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeAlias

import psycopg
from psycopg_pool import PoolTimeout
from starlette.requests import HTTPConnection

from pgmb._async.broker import AsyncBroker
from pgmb.errors import PgmbError
from pgmb.server import tokens
from pgmb.server.asking import rows
from pgmb.server.problems import Problem, forbidden, unauthorised
from pgmb.server.remembered import Remembered
from pgmb.server.scopes import Principal, Verb
from pgmb.server.tasks import end
from pgmb.server.watching import KEY_NAME

logger = logging.getLogger("pgmb.server")

COOKIE: Final = "pgmb_session"
SWEEP_EVERY: Final = 2.0
"""Seconds between two looks at the keys of requests that stay."""
_GOOD_KEYS: Final = (
    "select k.id from pgmb.api_keys k"
    " where k.id = any (%s) and (k.expires_at is null or k.expires_at > clock_timestamp())"
)
_GOOD_SESSIONS: Final = (
    "select s.digest from unnest(%s::bytea[]) s (digest)"
    " where exists (select from pgmb.find_session(s.digest))"
)

_REMEMBERED_FOR: Final = 5.0
"""So long a key that was taken back may still work."""
_MOST_REMEMBERED: Final = 10_000
_Look: TypeAlias = Callable[[str], Coroutine[Any, Any, Principal | None]]

_LONGEST: Final = 200
"""Characters of what is looked at: nothing longer is one of ours."""


class Access:
    """Finds out who asks."""

    def __init__(self, broker: AsyncBroker, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._broker = broker
        self._watches: set[tuple[Principal, Callable[[], None]]] = set()
        self._sweeping: asyncio.Task[None] | None = None
        # Many may ask for the same at once, as readers that are all checked do: one look tells all.
        self._known: Remembered[tuple[str, bytes], Principal | None] = Remembered(
            _MOST_REMEMBERED, _REMEMBERED_FOR, clock
        )

    async def principal(self, connection: HTTPConnection, *, ticket: bool = False) -> Principal | None:
        """Who asks: by `Authorization: Bearer`, by a session's cookie, or, where it is good, a ticket."""
        found = await self._found(connection, ticket)
        if found is not None:
            connection.scope[KEY_NAME] = found.name
        return found

    async def _found(self, connection: HTTPConnection, ticket: bool) -> Principal | None:
        scheme, _, given = connection.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return await self._remembered(tokens.KEY, given.strip(), self._key)
        session = connection.cookies.get(COOKIE)
        if session is not None:
            return await self._remembered(tokens.SESSION, session, self._session)
        if ticket and (named := connection.query_params.get("ticket")):
            return await self._ticket(named)
        return None

    async def need(
        self, connection: HTTPConnection, verb: Verb, name: str | None = None, *, ticket: bool = False
    ) -> Principal:
        """Who asks, if it may do this."""
        principal = await self.principal(connection, ticket=ticket)
        if principal is None:
            raise unauthorised()
        if not principal.may(verb, name):
            raise forbidden(verb, name)
        return principal

    async def login(self, key: str, lasts: timedelta = timedelta(hours=12)) -> tuple[str, Principal] | None:
        """A session for a key's holder: what to put into the cookie. None if it is no key."""
        holder = None if _odd(key) else await self._key(key)
        if holder is None:
            return None
        session = tokens.generate(tokens.SESSION)
        if not await self._give(holder, "session", session, holder.scopes, lasts):
            return None
        return session, _of_session(session, holder.key, holder.name, holder.scopes)

    async def logout(self, session: str) -> None:
        """End a session, here at once and elsewhere within seconds."""
        digest = tokens.digest(session)
        self._known.forget((tokens.SESSION, digest))
        await rows(self._broker, "select pgmb.end_session(%s)", (digest,))

    async def ticket(self, holder: Principal, scopes: Iterable[str], lasts: timedelta) -> str:
        """A ticket, good for one request: for what cannot send a header, as a browser's EventSource."""
        wanted = frozenset(scopes)
        if not holder.may_all(wanted):
            raise forbidden("the scopes asked for")
        text = tokens.generate(tokens.TICKET)
        if not await self._give(holder, "ticket", text, wanted, lasts):
            raise unauthorised()
        return text

    @contextmanager
    def watching(self, principal: Principal, revoked: Callable[[], None]) -> Generator[None]:
        """While a request lasts: `revoked` is called once its key or session is taken back or over."""
        watch = (principal, revoked)
        self._watches.add(watch)
        if self._sweeping is None or self._sweeping.done():
            self._sweeping = asyncio.create_task(self._sweep(), name="pgmb access")
        try:
            yield
        finally:
            self._watches.discard(watch)

    async def close(self) -> None:
        if self._sweeping is not None:
            await end(self._sweeping)

    async def _sweep(self) -> None:
        while self._watches:
            await asyncio.sleep(SWEEP_EVERY)
            keys = {principal.key for principal, _ in self._watches}
            sessions = {principal.session for principal, _ in self._watches if principal.session is not None}
            try:
                good = {one for (one,) in await rows(self._broker, _GOOD_KEYS, (list(keys),))}
                if sessions:
                    found = await rows(self._broker, _GOOD_SESSIONS, (list(sessions),))
                    good |= {bytes(one) for (one,) in found}
            except (psycopg.Error, PoolTimeout, PgmbError) as error:
                # Nothing is read from a database that does not answer.
                logger.info("cannot check the keys of open requests: %s", error)
                continue
            for principal, revoked in list(self._watches):
                asked = principal.key in keys and (principal.session is None or principal.session in sessions)
                if asked and not {principal.key, principal.session or principal.key} <= good:
                    revoked()

    def check_csrf(self, principal: Principal, given: str | None) -> None:
        """Refuses a change that a session did not ask for itself. Keys in a header need no such proof."""
        if principal.csrf is not None and (given is None or not tokens.same(principal.csrf, given)):
            raise Problem(403, "csrf", "the form is not of this session: load the page again")

    async def _remembered(self, kind: str, text: str, look: _Look) -> Principal | None:
        if _odd(text):
            return None
        # By what it was given as, too: a key is none in a cookie, where forms need a proof.
        return await self._known.get((kind, tokens.digest(text)), partial(look, text))

    async def _key(self, text: str) -> Principal | None:
        if not text.startswith(tokens.KEY):
            return None
        found = await rows(
            self._broker, "select id, name, scopes from pgmb.find_api_key(%s)", (tokens.digest(text),)
        )
        return Principal(found[0][0], found[0][1], frozenset(found[0][2])) if found else None

    async def _session(self, text: str) -> Principal | None:
        if not text.startswith(tokens.SESSION):
            return None
        found = await rows(
            self._broker, "select api_key, name, scopes from pgmb.find_session(%s)", (tokens.digest(text),)
        )
        if not found:
            return None
        key, name, scopes = found[0]
        return _of_session(text, key, name, frozenset(scopes))

    async def _ticket(self, text: str) -> Principal | None:
        if _odd(text) or not text.startswith(tokens.TICKET):
            return None
        found = await rows(
            self._broker, "select api_key, name, scopes from pgmb.take_ticket(%s)", (tokens.digest(text),)
        )
        return Principal(found[0][0], found[0][1], frozenset(found[0][2]), "ticket") if found else None

    async def _give(
        self, holder: Principal, kind: str, text: str, scopes: Iterable[str], lasts: timedelta
    ) -> bool:
        found = await rows(
            self._broker,
            "select pgmb.give_pass(%s, %s, %s, %s, %s)",
            (holder.key, kind, tokens.digest(text), sorted(scopes), lasts),
        )
        return bool(found[0][0])


def _of_session(text: str, key: int, name: str, scopes: frozenset[str]) -> Principal:
    return Principal(key, name, scopes, "session", tokens.csrf_of(text), tokens.digest(text))


def _odd(text: str) -> bool:
    """Whether it cannot be one of ours: then nobody needs to look."""
    return not text or len(text) > _LONGEST or not text.isascii()
