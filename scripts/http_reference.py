"""docs/reference/http.md, of the operations that the REST interface declares."""

from __future__ import annotations

from typing import Any

from pgmb.server import rest

INTRODUCTION = """\
# HTTP reference

Made from the operations in `src/pgmb/server/rest` by `make docs`; do not edit. `GET /v1/openapi.json` tells
the same in full, with the schema of every body and answer. How to use it:
[publish and receive over HTTP](../howto/rest.md).
"""


def render() -> str:
    parts = [INTRODUCTION]
    tag = ""
    document = rest.document()
    schemas = document["components"]["schemas"]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if operation["tags"][0] != tag:
                tag = operation["tags"][0]
                parts.append(f"## {tag.capitalize()}\n")
            parts.append(_entry(method, path, operation, schemas))
    return "\n".join(parts)


def _entry(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    lines = [f"### {operation['operationId']}\n", f"```\n{method.upper()} {path}\n```\n"]
    lines.append(" ".join(filter(None, (operation["summary"], operation["description"]))) + "\n")
    query = [one["name"] for one in operation["parameters"] if one["in"] == "query"]
    if query:
        lines.append(f"Query: {', '.join(f'`{name}`' for name in query)}.\n")
    content = operation.get("requestBody", {}).get("content", {})
    fields = _fields(content, schemas)
    if fields:
        lines.append(f"Body: {', '.join(fields)}.\n")
    if len(content) > 1:
        lines.append(f"Content types: {', '.join(f'`{media}`' for media in content)}.\n")
    return "\n".join(lines)


def _fields(content: dict[str, Any], schemas: dict[str, Any]) -> list[str]:
    """What an object may have, in the order of the code; what it must have is emphasised."""
    schema: dict[str, Any] = next(iter(content.values()), {"schema": {}})["schema"]
    schema = schema.get("anyOf", [schema])[0]
    name = schema.get("$ref", "").rpartition("/")[2]
    if not name:
        return []
    found = schemas[name]
    required = set(found["required"])
    return [f"**`{name}`**" if name in required else f"`{name}`" for name in found["properties"]]
