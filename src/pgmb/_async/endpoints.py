"""Endpoints: HTTP destinations that a Dispatcher posts events to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

from pgmb._async.calls import AsyncCalls
from pgmb._core import endpoints, wire
from pgmb._core.endpoints import AUTO, GENERATE
from pgmb._core.statements import call
from pgmb.errors import EndpointNotFound, TimeoutRequired
from pgmb.outbox import AsyncConnectionLike
from pgmb.types import Attempt, AttemptLog, Duration, EndpointBody, EndpointStatus, NewEndpoint


class AsyncEndpoints(AsyncCalls):
    async def create_endpoint(
        self,
        name: str,
        url: str,
        patterns: Iterable[str] = ("#",),
        *,
        equals: Mapping[str, Any] | None = None,
        filter: str | None = None,
        condition: str | None = None,
        params: Mapping[str, Any] | None = None,
        stream: str = "main",
        ordered: bool = False,
        batch: int | None = None,
        body: EndpointBody | None = None,
        rps: int | None = None,
        max_in_flight: int | None = None,
        timeout: Duration | None = None,
        headers: Mapping[str, str] | None = None,
        gzip_above: int | None = None,
        retry_after: Iterable[Duration] | None = None,
        log: AttemptLog | None = None,
        keep_response: bool | None = None,
        description: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        queue: str | None = None,
        secret: str | None = AUTO,
        conn: AsyncConnectionLike | None = None,
    ) -> NewEndpoint:
        """Register an endpoint, to which a Dispatcher posts events that match, from now on.

        A name that is registered gets these settings, and keeps its id, state and secrets. Patterns and
        filter: see `create_queue`. `ordered`: events of one key are posted one after the other. `batch`: so
        many at most in a request. `rps` and `max_in_flight` limit requests over all dispatchers.
        `retry_after`: when to try again after each failure, then it is a dead letter. `log`: which attempts
        are written down. `queue`: shared with others, named after the stream unless it is named here.

        `secret` is what requests are signed with: `whsec_…`, `whsk_…`, "generate" for a new one, None for
        none. By default a new one is made where PGMB_SECRET_KEY says what to seal it with. The result shows
        it this once; an endpoint that has one keeps it, and nothing is shown.
        """
        key = endpoints.sealing_key() if secret in (None, AUTO) else endpoints.required_key()
        plain = endpoints.new_secret(secret, key)
        # Together: nothing is posted before it can be signed.
        async with self._transaction(conn) as own:
            meant, stored = uuid4(), headers
            if headers and key is not None:
                # Sealed for one endpoint, and before the first statement: what a statement has is logged.
                found = await self._rows(endpoints.endpoint_id(name), own)
                meant = wire.uuid(found[0][0]) if found else meant
                stored = endpoints.sealed_headers(key, meant, headers)
            statement = call(
                "create_endpoint",
                name=name,
                url=url,
                patterns=[patterns] if isinstance(patterns, str) else list(patterns),
                equals=equals,
                filter=filter,
                condition=condition,
                params=params,
                stream=stream,
                ordered=ordered,
                batch=batch,
                body=body,
                rps=rps,
                max_in_flight=max_in_flight,
                timeout=timeout,
                headers=stored,
                gzip_above=gzip_above,
                retry_after=retry_after,
                log=log,
                keep_response=keep_response,
                description=description,
                metadata=metadata,
                queue=queue,
                id=meant,
            )
            id = wire.uuid(await self._value(statement, own))
            if headers and key is not None and id != meant:
                # Another session created it meanwhile.
                stored = endpoints.sealed_headers(key, id, headers)
                await self._value(call("alter_endpoint", name=name, headers=stored), own)
            if plain is None or key is None:
                return NewEndpoint(id, None)
            sealed = await self._value(endpoints.sealed_secrets(name), own)
            made = secret in (AUTO, GENERATE)
            if (sealed and made) or endpoints.knows(key, id, sealed, plain):
                return NewEndpoint(id, None)
            await self._value(call("add_endpoint_secret", name=name, sealed=key.seal(plain, id)), own)
        return NewEndpoint(id, plain, endpoints.public_key(plain))

    async def alter_endpoint(
        self,
        name: str,
        *,
        url: str | None = None,
        batch: int | None = None,
        body: EndpointBody | None = None,
        rps: int | None = None,
        max_in_flight: int | None = None,
        timeout: Duration | None = None,
        headers: Mapping[str, str] | None = None,
        gzip_above: int | None = None,
        retry_after: Iterable[Duration] | None = None,
        log: AttemptLog | None = None,
        keep_response: bool | None = None,
        description: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        conn: AsyncConnectionLike | None = None,
    ) -> None:
        """Change settings of an endpoint. None leaves one; `rps=0` and `gzip_above=-1` take those away."""
        if headers and (key := endpoints.sealing_key()):
            found = await self._rows(endpoints.endpoint_id(name), conn)
            headers = endpoints.sealed_headers(key, wire.uuid(found[0][0]), headers) if found else {}
        await self._value(
            call(
                "alter_endpoint",
                name=name,
                url=url,
                batch=batch,
                body=body,
                rps=rps,
                max_in_flight=max_in_flight,
                timeout=timeout,
                headers=headers,
                gzip_above=gzip_above,
                retry_after=retry_after,
                log=log,
                keep_response=keep_response,
                description=description,
                metadata=metadata,
            ),
            conn,
        )

    async def bind_endpoint(
        self,
        name: str,
        patterns: Iterable[str],
        *,
        equals: Mapping[str, Any] | None = None,
        filter: str | None = None,
        condition: str | None = None,
        params: Mapping[str, Any] | None = None,
        conn: AsyncConnectionLike | None = None,
    ) -> None:
        """Replace an endpoint's patterns and filter. What is not given is taken away."""
        await self._value(
            call(
                "bind_endpoint",
                name=name,
                patterns=[patterns] if isinstance(patterns, str) else list(patterns),
                equals=equals,
                filter=filter,
                condition=condition,
                params=params,
            ),
            conn,
        )

    async def rotate_secret(
        self,
        name: str,
        secret: str = GENERATE,
        *,
        overlap: Duration | None = None,
        conn: AsyncConnectionLike | None = None,
    ) -> str:
        """Sign with a new secret from now on, and for `overlap`, by default a day, with the former too.

        Returns it: it is shown this once.
        """
        key = endpoints.required_key()
        plain = endpoints.new_secret(secret, key) or ""
        async with self._transaction(conn) as own:
            id = (await self.endpoint(name, conn=own)).id
            sealed = key.seal(plain, id)
            await self._value(call("add_endpoint_secret", name=name, sealed=sealed, overlap=overlap), own)
        return plain

    async def drop_endpoint(self, name: str, *, conn: AsyncConnectionLike | None = None) -> bool:
        """Drop an endpoint with its waiting deliveries, attempts and dead letters. True if there was one."""
        return bool(await self._value(call("drop_endpoint", name=name), conn))

    async def pause_endpoint(
        self, name: str, reason: str | None = None, *, conn: AsyncConnectionLike | None = None
    ) -> bool:
        """Have events wait for an endpoint until `resume_endpoint`. True if that changed anything."""
        return await self._set_state(name, "paused", reason, conn)

    async def resume_endpoint(self, name: str, *, conn: AsyncConnectionLike | None = None) -> bool:
        """Post to an endpoint again, whatever its state. True if that changed anything."""
        return await self._set_state(name, "active", None, conn)

    async def disable_endpoint(
        self, name: str, reason: str | None = None, *, conn: AsyncConnectionLike | None = None
    ) -> bool:
        """Have an endpoint get nothing more until `resume_endpoint`. True if that changed anything.

        What comes meanwhile does not wait for it, unless it has a queue of its own.
        """
        return await self._set_state(name, "disabled", reason, conn)

    async def _set_state(
        self, name: str, state: str, reason: str | None, conn: AsyncConnectionLike | None
    ) -> bool:
        statement = call("set_endpoint_state", name=name, state=state, reason=reason)
        return bool(await self._value(statement, conn))

    async def endpoints(self, *, conn: AsyncConnectionLike | None = None) -> list[EndpointStatus]:
        """Every endpoint, by name: what it asks for, how it is, what it did."""
        return [EndpointStatus.of(row) for row in await self._rows(endpoints.ENDPOINTS, conn)]

    async def endpoint(self, name: str, *, conn: AsyncConnectionLike | None = None) -> EndpointStatus:
        """One endpoint."""
        rows = await self._rows(endpoints.endpoint(name), conn)
        if not rows:
            missing = EndpointNotFound(f"endpoint {name!r} does not exist")
            missing.advise("Create it with create_endpoint.")
            raise missing
        return EndpointStatus.of(rows[0])

    async def attempts(
        self, name: str, max: int = 100, *, conn: AsyncConnectionLike | None = None
    ) -> list[Attempt]:
        """What was tried, the newest first: failures, or everything, as the endpoint's `log` says."""
        id = (await self.endpoint(name, conn=conn)).id
        return [Attempt.of(row) for row in await self._rows(endpoints.attempts(id, max), conn)]

    async def resend(
        self, endpoint: str, ids: Iterable[UUID | str], *, conn: AsyncConnectionLike | None = None
    ) -> int:
        """Send events of the log to an endpoint again, by id. Returns how many of them were found."""
        return int(await self._value(call("resend", endpoint=endpoint, ids=endpoints.uuids(ids)), conn))

    async def replay(
        self,
        endpoint: str,
        since: datetime | None = None,
        until: datetime | None = None,
        *,
        topic: str | None = None,
        filter: str | None = None,
        max: int | None = None,
        conn: AsyncConnectionLike | None = None,
    ) -> int:
        """Send an endpoint what it asks for of the log again: published from `since` to before `until`.

        By default all that is kept. Narrowed by a topic pattern and a jsonpath filter; at most `max`, by
        default 10,000, the oldest first. Returns how many.
        """
        statement = call(
            "replay",
            endpoint=endpoint,
            since=endpoints.beginning(since),
            until=until,
            topic=topic,
            filter=filter,
            max=max,
        )
        try:
            return int(await self._value(statement, conn))
        except TimeoutRequired:
            if conn is not None:
                raise
            return int((await self._timed_rows(statement, None))[0][0])

    async def redrive_failed(
        self, endpoint: str, since: datetime | None = None, *, conn: AsyncConnectionLike | None = None
    ) -> int:
        """Send an endpoint its dead letters since then again, and retry its waiting events at once.

        Ends throttling and tripping. Returns how many events.
        """
        return int(await self._value(call("redrive_failed", endpoint=endpoint, since=since), conn))
