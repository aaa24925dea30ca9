"""The routes of server-sent events: by keys and scopes, or by an application's own rules."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from pgmb._async.broker import AsyncBroker
from pgmb.server.application import Application
from pgmb.server.context import Context
from pgmb.server.limits import Limits
from pgmb.server.problems import Problem, invalid
from pgmb.server.sse.hub import Hub
from pgmb.server.sse.serving import Serving, Subscription

Value = TypeVar("Value")
Decision: TypeAlias = Callable[[Request], "Value | Awaitable[Value]"]

_PRINCIPAL: Final = "pgmb.principal"
_KNOWN: Final = {"topic", "equals", "filter", "params", "event", "ticket", "last_event_id"}


def routes(context: Context) -> list[BaseRoute]:
    """`GET /v1/streams/{stream}/events`, for keys, sessions and tickets with the scope read."""
    hub = Hub(context)

    async def ask(request: Request) -> Subscription:
        stream = request.path_params["stream"]
        request.scope[_PRINCIPAL] = await context.access.need(request, "read", stream, ticket=True)
        return _asked(request, stream)

    def watch(request: Request, revoked: Callable[[], None]) -> AbstractContextManager[None]:
        # A ticket was good for one request, which is this one: what counts is the key it was handed out for.
        return context.access.watching(request.scope[_PRINCIPAL], revoked)

    serving = Serving(context, hub, ask, watch=watch)
    return [Route("/v1/streams/{stream}/events", serving, methods=["GET"], name="events")]


def create_sse_app(
    dsn: str = "",
    *,
    authorize: Decision[bool],
    subscription: Decision[Subscription | None],
    broker: AsyncBroker | None = None,
    limits: Limits | None = None,
) -> Application:
    """Server-sent events at `/`, by an application's own rules, to be mounted into it.

    `authorize` says whether a request may see anything, `subscription` what, from the request alone: None has
    the client stop for good. Both may be async and may raise Starlette's HTTPException. While a client stays,
    `authorize` is asked again now and then.
    """

    def part(context: Context) -> list[BaseRoute]:
        async def ask(request: Request) -> Subscription | None:
            if not await _decided(authorize(request)):
                raise Problem(401, "unauthorised", "not allowed")
            return await _decided(subscription(request))

        async def check(request: Request) -> bool:
            return bool(await _decided(authorize(request)))

        return [Route("/", Serving(context, Hub(context), ask, check), methods=["GET"], name="events")]

    return Application(dsn, parts=[part], broker=broker, limits=limits)


async def _decided(said: Value | Awaitable[Value]) -> Value:
    if inspect.isawaitable(said):
        return await said
    return said


def _asked(request: Request, stream: str) -> Subscription:
    query = request.query_params
    if odd := set(query) - _KNOWN:
        raise invalid(f"not a parameter: {', '.join(sorted(odd))}", f"Known are {', '.join(sorted(_KNOWN))}.")
    event = query.get("event", "message")
    if event not in ("message", "topic"):
        raise invalid("event is message or topic")
    return Subscription(
        stream=stream,
        topics=tuple(query.getlist("topic")),
        equals=_object(query.get("equals"), "equals"),
        filter=query.get("filter"),
        params=_object(query.get("params"), "params"),
        named=event == "topic",
    )


def _object(text: str | None, name: str) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise invalid(f"{name} is a JSON object", str(error)) from error
