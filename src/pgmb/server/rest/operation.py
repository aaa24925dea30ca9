"""Declared operations: their scopes, parameters and responses. Routes and OpenAPI are generated from them.

An operation is a function. Its parameters declare its input: path parameters by name, `query` and `body` as
structs. Its return type is the response, and its docstring the description.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, get_type_hints

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pgmb._async.broker import AsyncBroker
from pgmb.server.access import Principal, Verb
from pgmb.server.application import Context
from pgmb.server.changes import Change, changing
from pgmb.server.problems import forbidden, unauthorised
from pgmb.server.rest.parsing import JSON, body_bytes, json_body, path_value, query_values
from pgmb.server.rest.service import Service

_READS: Final = ("GET", "HEAD")


class Need(msgspec.Struct, frozen=True):
    """A scope that allows an operation: a verb, and the path parameter that it applies to."""

    verb: Verb
    of: str | None = None
    some: bool = False
    """Whether any scope of the verb suffices. The response then contains only what the scope covers."""

    def met_by(self, principal: Principal, path: Mapping[str, str]) -> bool:
        if self.some and any(scope.startswith(f"{self.verb}:") for scope in principal.scopes):
            return True
        return principal.may(self.verb, None if self.of is None else path[self.of])

    def __str__(self) -> str:
        if self.of is None:
            return f"{self.verb}:…" if self.some else self.verb
        return f"{self.verb}:{{{self.of}}}"


class Call:
    """An authorized request within its rate limit."""

    def __init__(self, service: Service, request: Request, principal: Principal | None) -> None:
        self.service = service
        self.request = request
        self._principal = principal

    @property
    def context(self) -> Context:
        return self.service.context

    @property
    def broker(self) -> AsyncBroker:
        return self.context.broker

    @property
    def principal(self) -> Principal:
        if self._principal is None:
            raise unauthorised()
        return self._principal

    def changing(self) -> AbstractAsyncContextManager[Change]:
        """A transaction for a change, with an audit entry for the key."""
        return changing(self.broker, self.principal)


Run: TypeAlias = Callable[..., Awaitable[Any]]


@dataclass(frozen=True)
class Operation:
    """One method of a path."""

    method: str
    path: str
    run: Run
    needs: tuple[Need, ...] | None
    """Any of them suffices. Empty: any key. None: public."""
    tag: str
    media: Mapping[str, Sequence[Any]]
    """Content types and schemas of a body that the operation parses itself."""
    problems: tuple[int, ...]
    """Error statuses in addition to the usual ones."""
    parameters: Mapping[str, Any] = field(init=False)
    query: type[msgspec.Struct] | None = field(init=False)
    body: Any = field(init=False)
    answer: Any = field(init=False)
    decoder: msgspec.json.Decoder[Any] | None = field(init=False)

    def __post_init__(self) -> None:
        hints = get_type_hints(self.run, include_extras=True)
        answer = hints.pop("return")
        hints.pop("call")
        query, body = hints.pop("query", None), hints.pop("body", None)
        declared = {
            "parameters": hints,
            "query": query,
            "body": body,
            "answer": None if answer is type(None) else answer,
            "decoder": msgspec.json.Decoder(body) if body not in (None, bytes) else None,
        }
        for name, value in declared.items():
            object.__setattr__(self, name, value)

    @property
    def name(self) -> str:
        return getattr(self.run, "__name__", "")

    @property
    def said(self) -> str:
        return inspect.getdoc(self.run) or ""

    async def __call__(self, service: Service, request: Request) -> Response:
        context = service.context
        principal = await self._admitted(context, request)
        if principal is not None and request.method not in _READS:
            context.access.check_csrf(principal, request.headers.get("x-csrf-token"))
        given: dict[str, Any] = {
            name: path_value(name, request.path_params[name], kind) for name, kind in self.parameters.items()
        }
        query = query_values(request, self.query)
        if self.query is not None:
            given["query"] = query
        if self.decoder is not None:
            given["body"] = await json_body(request, self.decoder, context.limits.body)
        elif self.body is bytes:
            given["body"] = await body_bytes(request, context.limits.body)
        call = Call(service, request, principal)
        if principal is not None and request.method in _READS:
            async with context.readings.turn(principal.key):
                answer = await self.run(call, **given)
        else:
            answer = await self.run(call, **given)
        if isinstance(answer, Response):
            return answer
        if answer is None:
            return Response(status_code=204)
        return Response(msgspec.json.encode(answer), media_type=JSON)

    async def _admitted(self, context: Context, request: Request) -> Principal | None:
        if self.needs is None:
            context.access.count_address(request)
            return None
        principal = await context.access.principal(request)
        if principal is None:
            raise unauthorised()
        if self.needs and not any(need.met_by(principal, request.path_params) for need in self.needs):
            first = self.needs[0]
            raise forbidden(first.verb, None if first.of is None else request.path_params[first.of])
        return principal


class Operations:
    """The operations of a module, declared with `@operations.add(...)`."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.all: list[Operation] = []

    def add(
        self,
        method: str,
        path: str,
        *needs: Need,
        public: bool = False,
        media: Mapping[str, Sequence[Any]] | None = None,
        problems: tuple[int, ...] = (),
    ) -> Callable[[Run], Run]:
        def declared(run: Run) -> Run:
            self.all.append(
                Operation(method, path, run, None if public else needs, self.tag, media or {}, problems)
            )
            return run

        return declared


def routes_of(service: Service, operations: Sequence[Operation]) -> list[Route]:
    """One route per path, so that 405 responses list all methods."""
    paths: dict[str, dict[str, Operation]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = operation
    return [_route(service, path, methods) for path, methods in paths.items()]


def _route(service: Service, path: str, methods: Mapping[str, Operation]) -> Route:
    async def answer(request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        return await methods[method](service, request)

    return Route(path, answer, methods=list(methods))
