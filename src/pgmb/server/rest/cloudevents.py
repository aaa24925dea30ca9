"""CloudEvents 1.0 as events: what a Dispatcher posts can be posted back. No I/O.

`id` is the event's if it is a UUID, otherwise one is derived of `source` and `id`; `type` is the topic,
`partitionkey` the key, `pgmbheaders` the headers as JSON. All other attributes become headers under the names
that they have in HTTP, `ce-source` and so on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote_to_bytes
from uuid import NAMESPACE_URL, UUID, uuid5

import msgspec

from pgmb.server.rest.schemas import Key, NewEvent, Topic

STRUCTURED: Final = "application/cloudevents+json"
BATCH: Final = "application/cloudevents-batch+json"
PREFIX: Final = "ce-"

_JSON_TYPE: Final = re.compile(r"application/json|text/json|[a-z0-9!#$&^_.+-]+/[a-z0-9!#$&^_.+-]+\+json")
_NAME: Final = re.compile(r"[a-z0-9]{1,50}")
_OURS: Final = frozenset(("specversion", "id", "type", "partitionkey", "pgmbheaders"))
_NOTHING: Final = msgspec.Raw(b"null")
_DATA: Final = ("data", "data_base64")

_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_array = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode
_headers = msgspec.json.Decoder(dict[str, Any]).decode
_attribute = msgspec.json.Decoder(str | int | bool | None).decode


class Document(msgspec.Struct):
    """A CloudEvent in structured mode. Further attributes are its extensions."""

    specversion: str
    id: str
    source: str
    type: str
    data: Any = None
    partitionkey: str | None = None
    pgmbheaders: str | None = None
    datacontenttype: str | None = None
    dataschema: str | None = None
    subject: str | None = None
    time: str | None = None


def is_json(media_type: str) -> bool:
    return _JSON_TYPE.fullmatch(media_type) is not None


def structured(body: bytes) -> NewEvent:
    return _of_document(_object(body))


def batch(body: bytes) -> list[NewEvent]:
    return [_of_document(document) for document in _array(body)]


def binary(headers: Mapping[str, str], media_type: str, body: bytes) -> NewEvent:
    """Parse a CloudEvent in binary mode: attributes in headers, the data in the body."""
    attributes: dict[str, Any] = {
        name.removeprefix(PREFIX): _decoded(value)
        for name, value in headers.items()
        if name.startswith(PREFIX)
    }
    if media_type and media_type != "application/json":
        attributes["datacontenttype"] = media_type
    data = msgspec.json.decode(body, type=msgspec.Raw) if body else _NOTHING
    return _event(attributes, data)


def _of_document(document: dict[str, msgspec.Raw]) -> NewEvent:
    if "data_base64" in document:
        raise ValueError("data must be JSON")
    attributes = {name: _attribute(raw) for name, raw in document.items() if name not in _DATA}
    return _event(attributes, document.get("data", _NOTHING))


def _event(attributes: dict[str, Any], data: msgspec.Raw) -> NewEvent:
    given = {name: value for name, value in attributes.items() if value is not None}
    if given.get("specversion") != "1.0":
        raise ValueError("specversion is not 1.0")
    for name in ("id", "source", "type"):
        if not isinstance(given.get(name), str) or not given[name]:
            raise ValueError(f"the attribute {name} is missing")
    if not all(_NAME.fullmatch(name) for name in given):
        raise ValueError("attribute names may contain only lower-case letters and digits")
    if given.get("datacontenttype") == "application/json":
        del given["datacontenttype"]
    headers = _headers(given["pgmbheaders"]) if "pgmbheaders" in given else {}
    headers |= {PREFIX + name: value for name, value in given.items() if name not in _OURS}
    id = _uuid(given["id"])
    if id is None:
        headers[PREFIX + "id"] = given["id"]
        id = uuid5(NAMESPACE_URL, f"{given['source']} {given['id']}")
    topic: str = msgspec.convert(given["type"], Topic)
    key: str | None = msgspec.convert(given.get("partitionkey"), Key | None)
    return NewEvent(topic=topic, payload=data, key=key, headers=headers, id=id)


def _uuid(text: str) -> UUID | None:
    try:
        return msgspec.convert(text, UUID)
    except msgspec.ValidationError:
        return None


def _decoded(value: str) -> str:
    """Decode a header's value, which may be quoted and percent-encoded."""
    if len(value) > 1 and value[0] == value[-1] == '"':
        value = re.sub(r"\\(.)", r"\1", value[1:-1])
    return unquote_to_bytes(value.encode("latin-1")).decode()
