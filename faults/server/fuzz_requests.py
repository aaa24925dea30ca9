"""Requests that are almost right: of every operation, with one key or another, something odd in each."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from faults.server.fuzz_odd import HEADERS, MALFORMED, MEDIA, METHODS, TEXTS, VALUES
from pgmb.server.rest import OPERATIONS
from pgmb.server.rest.operation import Operation
from pgmb.server.rest.publishing import MEDIA as PUBLISHED

_OTHER_PATHS: Final = [
    b"/",
    b"//",
    b"/v1",
    b"/v1/../v1/queues",
    b"/v1/%2e%2e/ui",
    b"/v2/queues",
    b"/livez",
    b"/readyz",
    b"/metrics",
    b"/ui",
    b"/ui/",
    b"/ui/login",
    b"/ui/queues",
    b"/ui/events",
    b"/ui/static/../../pyproject.toml",
    b"/ui/static/%2e%2e/%2e%2e/etc/passwd",
    b"/v1/openapi.json/",
    b"/v1/queues/?a=b",
    b"/.git/config",
    b"/etc/passwd",
]
_PLAIN: Final = [
    (b"GET", b"/v1/queues/KEY/dead_letters"),
    (b"GET", b"/v1/queues/KEY"),
    (b"POST", b"/v1/queues/KEY/receive"),
]
_OPEN: Final = [
    operation for operation in OPERATIONS if operation.needs and any(need.of for need in operation.needs)
]
"""What a key may do that is allowed a stream and a queue."""


class Made(NamedTuple):
    """A request as it is sent."""

    data: bytes
    key: str
    """Whose it is: of the name of a key, or of nobody."""
    head: bool = False
    last: bool = False
    """Whether the server may take what follows it for something else than requests."""


@dataclass
class Maker:
    """Makes requests at random."""

    chance: random.Random
    keys: dict[str, str]
    """The texts of keys by the names of what they allow: a stream, a queue."""
    names: list[bytes]
    """Streams, queues, endpoints and keys that there are, everybody's."""
    leases: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._fields = {operation.name: _fields(operation) for operation in OPERATIONS}

    def request(self) -> Made:
        """One that is framed well."""
        chance = self.chance
        key = chance.choice(("", *self.keys, *self.keys, *self.keys))
        drawn = chance.random()
        if drawn < 0.1:
            return self._elsewhere(key)
        if key and drawn < 0.14:
            # Nothing is wrong with it: there is an answer to look at.
            method, path = chance.choice(_PLAIN)
            return self._framed(method, path.replace(b"KEY", key.encode()), key, b"")
        operation = chance.choice(_OPEN if key and chance.random() < 0.6 else OPERATIONS)
        method = chance.choice(METHODS) if chance.random() < 0.08 else operation.method.encode()
        path = self._path(operation, key) + self._query(operation)
        body = b"" if operation.method == "GET" else self._body(operation)
        return self._framed(method, path, key, body)

    def malformed(self) -> Made:
        """One that is not: nobody knows where it ends."""
        key = self.chance.choice(tuple(self.keys))
        operation = self.chance.choice(OPERATIONS)
        head = b"Host: x\r\nAuthorization: Bearer " + self.keys[key].encode() + b"\r\n"
        data = self.chance.choice(MALFORMED)(self.chance, self._path(operation, key), head)
        return Made(data, key, last=True)

    def _elsewhere(self, key: str) -> Made:
        path = self.chance.choice(_OTHER_PATHS)
        if self.chance.random() < 0.5:
            path += b"/" + self.chance.choice(TEXTS)
        return self._framed(self.chance.choice(METHODS), path, key, b"")

    def _framed(self, method: bytes, path: bytes, key: str, body: bytes) -> Made:
        chance = self.chance
        lines = [method + b" " + path + b" HTTP/1.1", b"Host: x"]
        lines += self._authorization(key)
        if body or method in (b"POST", b"PATCH", b"PUT"):
            media = chance.choice(MEDIA) if chance.random() < 0.3 else b"application/json"
            lines += [b"Content-Type: " + media, b"Content-Length: %d" % len(body)]
        header = chance.choice(HEADERS) if chance.random() < 0.15 else b""
        if header:
            lines.append(header)
        data = b"\r\n".join(lines) + b"\r\n\r\n" + body
        return Made(data, key, method == b"HEAD", header.startswith(b"Upgrade"))

    def _authorization(self, key: str) -> list[bytes]:
        if not key:
            wrong = (b"Bearer pgmb_key_wrong", b"Bearer", b"Bearer \xff", b"Basic eDp5", b"bearer  x y")
            return [] if self.chance.random() < 0.5 else [b"Authorization: " + self.chance.choice(wrong)]
        scheme = self.chance.choice((b"Bearer ", b"Bearer ", b"bearer ", b"BEARER  "))
        return [b"Authorization: " + scheme + self.keys[key].encode()]

    def _path(self, operation: Operation, key: str) -> bytes:
        path = operation.path.encode()
        for name in operation.parameters:
            path = path.replace(f"{{{name}}}".encode(), self._named(name, key))
        return path

    def _named(self, parameter: str, key: str) -> bytes:
        drawn = self.chance.random()
        if parameter == "lease" and self.leases and drawn < 0.7:
            return self.chance.choice(self.leases)
        if drawn < 0.6:
            return key.encode() or b"a"
        if drawn < 0.8:
            return self.chance.choice(self.names)
        # An empty one is another path.
        return self.chance.choice(TEXTS) or b"x"

    def _query(self, operation: Operation) -> bytes:
        if self.chance.random() < 0.7 and operation.query is None:
            return b""
        known = (
            [] if operation.query is None else [name.encode() for name in operation.query.__struct_fields__]
        )
        chosen = self.chance.choices([*known, b"odd"], k=self.chance.randrange(4))
        pairs = [name + b"=" + self.chance.choice(TEXTS).replace(b"?", b"") for name in chosen]
        return b"?" + b"&".join(pairs) if pairs else b""

    def _body(self, operation: Operation) -> bytes:
        chance = self.chance
        drawn = chance.random()
        if drawn < 0.05:
            return chance.randbytes(chance.randrange(200))
        if drawn < 0.15:
            return chance.choice(VALUES)
        fields = self._fields[operation.name]
        if operation.media and drawn < 0.4:
            return (
                b'{"events": [' + b",".join(self._object(fields) for _ in range(chance.randrange(4))) + b"]}"
            )
        if operation.media and drawn < 0.5:
            return b"\n".join(self._object(fields) for _ in range(chance.randrange(4)))
        return self._object(fields)

    def _object(self, fields: dict[bytes, bytes]) -> bytes:
        chance = self.chance
        given: list[bytes] = []
        for name, good in fields.items():
            drawn = chance.random()
            if drawn < 0.55 and good:
                given.append(b'"' + name + b'": ' + good)
            elif drawn < 0.7 and name != b"wait":
                given.append(b'"' + name + b'": ' + chance.choice(VALUES))
        if chance.random() < 0.1:
            given.append(b'"odd": 1')
        return b"{" + b", ".join(given) + b"}"


_GOOD: Final = {
    "topic": b'"a.b"',
    "payload": b'{"n": 1}',
    "name": b'"made"',
    "url": b'"https://made.example"',
    "patterns": b'["a.#"]',
    "scopes": b'["read:a"]',
    "to": b'"latest"',
    "max": b"3",
    "wait": b"0",
    "lease_for": b"30",
    "seqs": b"[1099511627777]",
    "error": b'"failed"',
    "specversion": b'"1.0"',
    "type": b'"a.b"',
    "source": b'"/x"',
    "id": b'"0190a1b2-0000-7000-8000-000000000002"',
}


def _fields(operation: Operation) -> dict[bytes, bytes]:
    """What the body may have, each with a value that will do where one is known."""
    kinds = [operation.body] if operation.decoder is not None else []
    for several in operation.media.values() if operation.media is PUBLISHED else ():
        kinds += [kind for kind in several if isinstance(kind, type)]
    names = [
        name
        for kind in kinds
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
        for name in kind.__struct_fields__
        if name != "events"
    ]
    return {name.encode(): _GOOD.get(name, b"") for name in names}
