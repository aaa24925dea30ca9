"""The OpenAPI 3.1 document, generated from the declared operations. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, Final

import msgspec

from pgmb.server.problems import MEDIA_TYPE
from pgmb.server.rest.operation import Operation
from pgmb.server.rest.parsing import JSON

_REF: Final = "#/components/schemas/{name}"
_DURATION: Final = r"^-?P([0-9]+D)?(T([0-9]+H)?([0-9]+M)?([0-9]+(\.[0-9]+)?S)?)?$"
_PROBLEMS: Final = {
    400: "The request could not be read.",
    401: "There is no key, or it is none.",
    403: "The key does not allow this.",
    404: "What was named does not exist.",
    409: "It exists and differs, is in use, or the lease is lost.",
    410: "The position does not apply, or no longer.",
    413: "Larger than a request may be.",
    415: "Not a content type of this.",
    422: "What was asked for cannot be.",
    429: "Too many requests, or a queue is full.",
    503: "The database does not answer, or too many wait.",
}


class ProblemDocument(msgspec.Struct):
    """A problem document (RFC 9457) with a code of pgmb."""

    type: str
    title: str
    status: int
    code: str
    detail: str | msgspec.UnsetType = msgspec.UNSET
    hint: str | msgspec.UnsetType = msgspec.UNSET


def document(operations: Sequence[Operation]) -> dict[str, Any]:
    """The document of these operations."""
    schemas = _Schemas(operations)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "pgmb",
            "version": version("pgmb"),
            "description": "A message broker and event log inside PostgreSQL, over HTTP.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


class _Schemas:
    """The schemas of all types in operations."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._types: list[Any] = [ProblemDocument]
        for operation in operations:
            named = (operation.answer, operation.query, *operation.parameters.values())
            taken = [kind for kinds in operation.media.values() for kind in kinds]
            if operation.decoder is not None:
                taken.append(operation.body)
            self._types += [kind for kind in (*named, *taken) if kind is not None]
        schemas, components = msgspec.json.schema_components(self._types, ref_template=_REF)
        self._schemas: list[dict[str, Any]] = _told(schemas)
        self.components: dict[str, Any] = _told(components)

    def of(self, kind: Any) -> dict[str, Any]:
        return self._schemas[self._types.index(kind)]

    def fields(self, kind: type[msgspec.Struct]) -> dict[str, Any]:
        fields: dict[str, Any] = self.components[kind.__name__]
        return fields


def _told(schema: Any) -> Any:
    """Describe durations by a pattern: the format `duration` has no fractions of a second."""
    if schema.__class__ is dict:
        if schema.get("format") == "duration":
            return {"type": "string", "pattern": _DURATION}
        return {name: _told(value) for name, value in schema.items()}
    return [_told(one) for one in schema] if schema.__class__ in (list, tuple) else schema


def _operation(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    summary, _, more = operation.said.partition("\n\n")
    told = [more.replace("\n", " ")] if more else []
    if operation.needs:
        told.append(f"Needs the scope {' or '.join(f'`{need}`' for need in operation.needs)}.")
    described: dict[str, Any] = {
        "operationId": operation.name,
        "tags": [operation.tag],
        "summary": summary.replace("\n", " "),
        "description": " ".join(told),
        "parameters": [*_path(operation, schemas), *_query(operation, schemas)],
        "responses": _responses(operation, schemas),
        "security": [] if operation.needs is None else [{"key": []}],
    }
    if body := _body(operation, schemas):
        described["requestBody"] = body
    return described


def _path(operation: Operation, schemas: _Schemas) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": schemas.of(kind)}
        for name, kind in operation.parameters.items()
    ]


def _query(operation: Operation, schemas: _Schemas) -> list[dict[str, Any]]:
    if operation.query is None:
        return []
    fields = schemas.fields(operation.query)
    return [
        {
            "name": name,
            "in": "query",
            "required": name in fields["required"],
            "schema": _without_null(schema),
        }
        for name, schema in fields["properties"].items()
    ]


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove null from a schema: a query parameter is omitted instead."""
    if "anyOf" not in schema:
        return schema
    kinds = [kind for kind in schema["anyOf"] if kind != {"type": "null"}]
    return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}


def _body(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    if operation.media:
        content = {
            media: {"schema": _either([schemas.of(kind) for kind in kinds])}
            for media, kinds in operation.media.items()
        }
        return {"required": True, "content": content}
    if operation.decoder is None:
        return {}
    required = bool(schemas.fields(operation.body)["required"])
    return {"required": required, "content": {JSON: {"schema": schemas.of(operation.body)}}}


def _either(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _responses(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    if operation.answer is None:
        answers: dict[str, Any] = {"204": {"description": "Done."}}
    else:
        content = {JSON: {"schema": schemas.of(operation.answer)}}
        answers = {"200": {"description": "Done.", "content": content}}
    problem = {MEDIA_TYPE: {"schema": schemas.of(ProblemDocument)}}
    for status in sorted(_statuses(operation)):
        answers[str(status)] = {"description": _PROBLEMS[status], "content": problem}
    return answers


def _statuses(operation: Operation) -> set[int]:
    statuses = {422, 429, 503, *operation.problems}
    if operation.needs is not None:
        statuses |= {401, 403}
    if operation.parameters:
        statuses |= {404}
    if operation.method != "GET":
        # A queue or a stream may also be named in the body.
        statuses |= {400, 404, 409, 413, 415}
    return statuses
