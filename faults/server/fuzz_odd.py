"""Odd things to send: values, texts, headers, and requests that are none."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

VALUES: Final[list[bytes]] = [
    b"null",
    b"true",
    b"0",
    b"1",
    b"-1",
    b"3",
    b"0.5",
    b"1e400",
    b"-0.0",
    b"2147483648",
    b"9223372036854775808",
    b"9" * 400,
    b'""',
    b'"a"',
    b'"a.b"',
    b'"#"',
    b'"PT1S"',
    b'"-PT1S"',
    b'"P99999999999D"',
    b'"2026-01-01T00:00:00Z"',
    b'"0001-01-01T00:00:00+14:00"',
    b'"9999-12-31T23:59:59-14:00"',
    b'"earliest"',
    b'"(1,5,0,0,\\"3:3:\\",0,3)"',
    b'"(9,5,0,0,\\"3:3:\\",0,3)"',
    b'"0190a1b2-0000-7000-8000-000000000001"',
    b'"\\u0000"',
    b'"\\ud800"',
    b'"\\udc00\\ud800"',
    b'"\\uffff"',
    b'"\xff\xfe"',
    b'"\xc0\x80"',
    b'"\xed\xa0\x80"',
    b'"\xf0\x9f\x98\x80"',
    b'"\x01"',
    b'"%s%n%d {} {0.__class__}"',
    b'"\'; drop table pgmb.queue; --"',
    b'"../../../etc/passwd"',
    b'"' + b"x" * 5000 + b'"',
    b"[]",
    b"[null]",
    b'["a"]',
    b'["#", 1]',
    b"[1, 2, 3]",
    b"[" * 300 + b"]" * 300,
    b"[" * 3000 + b"]" * 3000,
    b'{"a":' * 2000 + b"1" + b"}" * 2000,
    b"{}",
    b'{"a": 1}',
    b'{"payload": {"a": null}}',
    b'{"": {"": ""}}',
    b"NaN",
    b"-",
    b"01",
    b"tru",
    b"{",
    b'"',
    b"",
]
TEXTS: Final[list[bytes]] = [
    b"",
    b"x",
    b"%00",
    b"%0a",
    b"%0d%0aX-Injected:%201",
    b"..",
    b"%2e%2e",
    b"%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    b"..%2f..%2f",
    b"%2f",
    b"a%2fb",
    b"%ff",
    b"%ed%a0%80",
    b"%f0%9f%98%80",
    b"%c3%a9",
    b"%",
    b"%zz",
    b"*",
    b"'",
    b"%22",
    b"a" * 101,
    b"b" * 3000,
    b"%20",
    b"00000000-0000-0000-0000-000000000000",
    b"ffffffff-ffff-ffff-ffff-ffffffffffff",
    b"-1",
    b"1e9",
    b"9" * 100,
    b"null",
    b";",
    b"a;b=c",
    b"a?b",
    b"a%3fb",
    b"(1,5,0,0,%223:3:%22,0,3)",
]
MEDIA: Final[list[bytes]] = [
    b"application/json",
    b"application/json",
    b"application/json; charset=utf-8",
    b"application/json; charset=utf-16",
    b"APPLICATION/JSON",
    b"application/x-ndjson",
    b"application/cloudevents+json",
    b"application/cloudevents-batch+json",
    b"application/x-www-form-urlencoded",
    b"multipart/form-data; boundary=x",
    b"text/plain",
    b"",
    b"\xff",
    b"application/json" * 100,
]
HEADERS: Final[list[bytes]] = [
    b"X-Odd: \xff\xfe",
    b"X-Empty:",
    b"X-Long: " + b"y" * 4000,
    b"Cookie: pgmb_session=pgmb_session_x",
    b"Cookie: pgmb_session=\xff; a=b; ;;==",
    b"Cookie: " + b"a=b; " * 500,
    b"X-CSRF-Token: x",
    b"Content-Encoding: gzip",
    b"Content-Encoding: br",
    b"Content-Encoding: gzip, gzip",
    b"Accept: \xff",
    b"Accept-Encoding: gzip;q=\xff",
    b"Last-Event-ID: \xff",
    b"X-Request-ID: " + b"z" * 300,
    b"X-Request-ID: a\tb",
    b"Forwarded: for=_hidden",
    b"X-Forwarded-For: 1.2.3.4, \xff",
    b"X-HTTP-Method-Override: DELETE",
    b"Authorization: Basic eDp5",
    b"ce-specversion: 1.0",
    b"ce-specversion: 1.0\r\nce-id: 1\r\nce-source: /x\r\nce-type: a",
    b"ce-specversion: 1.0\r\nce-id: %FF\r\nce-source: /x\r\nce-type: %00",
    b"ce-specversion: 1.0\r\nce-id: 1\r\nce-source: /x\r\nce-type: a\r\nce-pgmbheaders: [",
    b"ce-specversion: 1.0\r\nce-id: 1\r\nce-source: /x\r\nce-type: \xc3\xa9\r\nce-" + b"n" * 90 + b": x",
    b"Range: bytes=0-",
    b"If-None-Match: *",
    b"Expect: 100-continue",
    b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13",
    b"Upgrade: h2c\r\nHTTP2-Settings: AAAA",
]
METHODS: Final[list[bytes]] = [
    b"GET",
    b"HEAD",
    b"POST",
    b"PUT",
    b"PATCH",
    b"DELETE",
    b"OPTIONS",
    b"TRACE",
]


def _noise(chance: random.Random, path: bytes, head: bytes) -> bytes:
    return chance.randbytes(chance.randrange(1, 600))


def _long_line(chance: random.Random, path: bytes, head: bytes) -> bytes:
    return b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n" + head + b"\r\n"


def _long_header(chance: random.Random, path: bytes, head: bytes) -> bytes:
    return b"GET " + path + b" HTTP/1.1\r\n" + head + b"X-Long: " + b"y" * 80_000 + b"\r\n\r\n"


def _many_headers(chance: random.Random, path: bytes, head: bytes) -> bytes:
    many = b"".join(b"X-%d: y\r\n" % number for number in range(3000))
    return b"GET " + path + b" HTTP/1.1\r\n" + head + many + b"\r\n"


def _bad_line(chance: random.Random, path: bytes, head: bytes) -> bytes:
    lines = [
        b"GET\r\n",
        b"GET  " + path + b" HTTP/1.1\r\n",
        path + b"\r\n",
        b"GET " + path + b" HTTP/9.9\r\n",
        b"get " + path + b" HTTP/1.1\r\n",
        b"GET " + path + b" HTTP/0.9\r\n",
        b"GET " + path + b"\r\n",
        b"\0\0\0 " + path + b" HTTP/1.1\r\n",
        b"GET " + path + b"\0 HTTP/1.1\r\n",
        b"GET http://[::1 HTTP/1.1\r\n",
        b"GET http://else.example" + path + b" HTTP/1.1\r\n",
        b"CONNECT else.example:443 HTTP/1.1\r\n",
        b"OPTIONS * HTTP/1.1\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"G\xc3\xa9T " + path + b" HTTP/1.1\r\n",
        b"POST " + path + b" HTTP/1.1\n",
    ]
    return chance.choice(lines) + head + b"\r\n"


def _bad_length(chance: random.Random, path: bytes, head: bytes) -> bytes:
    lengths = [
        b"Content-Length: -1\r\n",
        b"Content-Length: +5\r\n",
        b"Content-Length: 0x5\r\n",
        b"Content-Length: " + b"9" * 30 + b"\r\n",
        b"Content-Length: " + b"9" * 6000 + b"\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: 5, 5\r\n",
        b"Content-Length:\r\n",
        b"Content-Length: 1e3\r\n",
        b"Content-Length: 100\r\n",
        b"Content-Length: 3\r\n",
        b"Content-Length : 5\r\n",
    ]
    line = b"POST " + path + b" HTTP/1.1\r\nContent-Type: application/json\r\n"
    return line + head + chance.choice(lengths) + b"\r\n{...}"


def _bad_chunks(chance: random.Random, path: bytes, head: bytes) -> bytes:
    bodies = [
        b"5\r\n{...}\r\n0\r\n\r\n",
        b"zz\r\n{}\r\n0\r\n\r\n",
        b"-1\r\n{}\r\n",
        b"ffffffffffffffffff\r\n{}\r\n",
        b"2\r\n{}XX0\r\n\r\n",
        b"2;ext=" + b"e" * 5000 + b"\r\n{}\r\n0\r\n\r\n",
        b"2\r\n{}\r\n0\r\nTrailer: \xff\r\n\r\n",
        b"2\r\n{}",
        b"0\r\n\r\n",
        b"1\r\n{\r\n1\r\n}\r\n0\r\n\r\n",
    ]
    encodings = [
        b"Transfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding:\tchunked\r\n",
        b"Transfer-Encoding: xchunked\r\n",
    ]
    line = b"POST " + path + b" HTTP/1.1\r\nContent-Type: application/json\r\n"
    return line + head + chance.choice(encodings) + b"\r\n" + chance.choice(bodies)


def _bad_header(chance: random.Random, path: bytes, head: bytes) -> bytes:
    headers = [
        b"no colon\r\n",
        b": no name\r\n",
        b"Bad Name: x\r\n",
        b"X: a\rb\r\n",
        b"X: a\nb\r\n",
        b"X: a\0b\r\n",
        b" folded: x\r\n",
        b"X: a\r\n b\r\n",
        b"X\xc3\xa9: x\r\n",
        b"Host: a\r\nHost: b\r\n",
        b"Host: \xff\r\n",
        b"Host: a:b:c/../?\r\n",
    ]
    return b"GET " + path + b" HTTP/1.1\r\n" + head + chance.choice(headers) + b"\r\n"


def _cut_short(chance: random.Random, path: bytes, head: bytes) -> bytes:
    whole = (
        b"POST "
        + path
        + b" HTTP/1.1\r\nContent-Type: application/json\r\n"
        + head
        + b"Content-Length: 90\r\n\r\n{"
    )
    return whole[: chance.randrange(1, len(whole))]


MALFORMED: Final[list[Callable[[random.Random, bytes, bytes], bytes]]] = [
    _noise,
    _long_line,
    _long_header,
    _many_headers,
    _bad_line,
    _bad_length,
    _bad_chunks,
    _bad_header,
    _cut_short,
]
