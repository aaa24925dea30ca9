"""REST: publish, receive and settle events, manage queues, streams, endpoints and keys.

`operation` authorizes and parses a request as its operation declares, and the operation responds. `openapi`
describes all operations.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import msgspec
from starlette.responses import Response
from starlette.routing import BaseRoute

from pgmb.server.application import Context
from pgmb.server.rest import (
    dead_letters,
    endpoints,
    inspecting,
    keys,
    openapi,
    publishing,
    queues,
    receiving,
    streams,
)
from pgmb.server.rest.operation import Call, Operation, Operations, routes_of
from pgmb.server.rest.parsing import JSON
from pgmb.server.rest.service import Service

__all__ = ["OPERATIONS", "document", "routes"]

_about = Operations("about")


@_about.add("GET", "/v1/openapi.json", public=True)
async def openapi_document(call: Call) -> dict[str, Any]:
    """This document."""
    return Response(_encoded(), media_type=JSON)  # type: ignore[return-value]


OPERATIONS: Final[tuple[Operation, ...]] = tuple(
    operation
    for operations in (
        publishing.operations,
        receiving.operations,
        queues.operations,
        dead_letters.operations,
        inspecting.operations,
        streams.operations,
        endpoints.operations,
        keys.operations,
        _about,
    )
    for operation in operations.all
)


def document() -> dict[str, Any]:
    """The OpenAPI document."""
    return openapi.document(OPERATIONS)


def routes(context: Context) -> list[BaseRoute]:
    """The routes under /v1."""
    return list(routes_of(Service(context), OPERATIONS))


@cache
def _encoded() -> bytes:
    return msgspec.json.encode(document())
