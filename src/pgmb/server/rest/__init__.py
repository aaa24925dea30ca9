"""REST: publish, receive and settle, see and change what there is. Described by its own document.

The data's way: operation.py admits and reads a request as the declaration says, a module of operations
answers it; openapi.py tells all of it.
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
    """What an Application takes as a part."""
    return list(routes_of(Service(context), OPERATIONS))


@cache
def _encoded() -> bytes:
    return msgspec.json.encode(document())
