"""JSON as people read it: a tree of bounded size, and what to paste elsewhere. No I/O."""

from __future__ import annotations

import shlex
from typing import Any, Literal
from urllib.parse import quote

import msgspec

from pgmb._core.masking import printable_json

_MOST_NODES = 1500
_MOST_TEXT = 500
_DEEPEST = 40
_MOST_RAW = 100_000
_UNFOLDED = 3
"""How deep a tree is open from the start."""


class Node(msgspec.Struct):
    """A value and where it stands. `kind` names its look."""

    kind: Literal["object", "array", "string", "number", "word", "cut"]
    name: str | None
    text: str
    more: int = 0
    """Characters, or members, that are not shown."""
    size: int = 0
    children: list[Any] = msgspec.field(default_factory=list[Any])
    open: bool = False


class Document(msgspec.Struct, frozen=True):
    """A text of JSON: its tree, where it can be read, and the text itself, cut where it is very long."""

    tree: Node | None
    raw: str
    bytes: int
    cut: bool
    pretty: str | None


def read(text: str) -> Document:
    size = len(text.encode("utf-8", "replace"))
    raw = text[:_MOST_RAW]
    try:
        value = msgspec.json.decode(text)
        tree = _Tree().node(None, value, 0)
        pretty = msgspec.json.format(text, indent=2) if size <= _MOST_RAW else None
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        # Too deep, or what JSON allows and Unicode does not: the letters are there all the same.
        tree, pretty = None, None
    return Document(tree, raw, size, len(text) > _MOST_RAW, pretty)


class _Tree:
    def __init__(self) -> None:
        self._left = _MOST_NODES

    def node(self, name: str | None, value: Any, depth: int) -> Node:
        self._left -= 1
        name = name if name is None or len(name) <= _MOST_TEXT else name[:_MOST_TEXT] + "…"
        if _is(value, dict):
            return self._members("object", name, list(value.items()), depth)
        if _is(value, list):
            return self._members("array", name, [(None, member) for member in value], depth)
        if isinstance(value, str):
            return Node("string", name, value[:_MOST_TEXT], max(0, len(value) - _MOST_TEXT))
        if isinstance(value, bool) or value is None:
            return Node("word", name, {True: "true", False: "false", None: "null"}[value])
        return Node("number", name, msgspec.json.encode(value).decode()[:_MOST_TEXT])

    def _members(
        self,
        kind: Literal["object", "array"],
        name: str | None,
        members: list[tuple[str | None, Any]],
        depth: int,
    ) -> Node:
        found = Node(kind, name, "", size=len(members), open=depth < _UNFOLDED)
        for place, (key, value) in enumerate(members):
            if self._left <= 0 or depth >= _DEEPEST:
                found.children.append(Node("cut", None, "", more=len(members) - place))
                break
            found.children.append(self.node(key, value, depth + 1))
        return found


def curl(base: str, stream: str, event: dict[str, Any]) -> str | None:
    """A command that publishes the same again; None where it would be too long for a command line."""
    payload = event["payload"]
    if len(payload) > _MOST_RAW:
        return None
    fields = [f'"topic":{_json(event["topic"])}']
    if event["key"] is not None:
        fields.append(f'"key":{_json(event["key"])}')
    fields.append(f'"payload":{payload}')
    if event["headers"]:
        fields.append(f'"headers":{event["headers"]}')
    body = "{" + ",".join(fields) + "}"
    address = f"{base.rstrip('/')}/v1/streams/{quote(stream, safe='')}/events"
    return (
        f"curl -X POST {shlex.quote(address)} \\\n"
        '  -H "Authorization: Bearer $PGMB_KEY" \\\n'
        "  -H 'Content-Type: application/json' \\\n"
        # A terminal acts on control characters while the command is pasted, whatever the quotes.
        f"  -d {shlex.quote(printable_json(body))}"
    )


def _is(value: object, kind: type) -> bool:
    """`isinstance`, after which the value is still anything to those who check types."""
    return isinstance(value, kind)


def _json(text: str) -> str:
    return msgspec.json.encode(text).decode()
