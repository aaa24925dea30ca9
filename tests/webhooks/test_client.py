"""Posting to servers that misbehave: every request ends in time, with a word for what went wrong."""

from __future__ import annotations

import asyncio
import datetime
import errno
import gzip
import os
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from aiohttp.abc import ResolveResult
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from harness.answers import OK, saying
from harness.receiver import Answer, Exchange, Receiver, response
from pgmb.webhooks.client import AttemptResult, WebhookClient, as_text
from pgmb.webhooks.egress import Guard, Resolver
from pgmb.webhooks.request import Endpoint, Request, WebhookEvent, build_request

pytestmark = pytest.mark.once

SOON = 0.3
LONG = 30.0


@pytest.fixture
async def poster() -> AsyncIterator[WebhookClient]:
    async with WebhookClient(Guard(["127.0.0.0/8"])) as poster:
        yield poster


async def tried(
    poster: WebhookClient, answer: Answer, wait: float = LONG, *, keep: bool = False
) -> AttemptResult:
    async with Receiver(answer) as receiver:
        request = Request(f"http://127.0.0.1:{receiver.port}/hook?a=b", b'{"n": 1}', {"x-a": "b"})
        async with asyncio.timeout(LONG + 10):
            return await poster.post(request, wait, keep)


def dribbling(first: bytes, piece: bytes) -> Answer:
    """Never ends, and is never quite silent."""

    async def answer(exchange: Exchange) -> None:
        await exchange.send(first)
        while True:
            await exchange.send(piece)
            await asyncio.sleep(0.02)

    return answer


def endless(first: bytes, piece: bytes) -> Answer:
    async def answer(exchange: Exchange) -> None:
        await exchange.send(first)
        while True:
            await exchange.send(piece)
            await asyncio.sleep(0)

    return answer


def dropping(first: bytes, *, reset: bool) -> Answer:
    async def answer(exchange: Exchange) -> None:
        await exchange.send(first)
        if reset:
            exchange.transport.abort()
        else:
            exchange.transport.close()

    return answer


async def test_what_is_built_is_sent_and_nothing_else(poster: WebhookClient) -> None:
    async with Receiver(saying(OK)) as receiver:
        target = Endpoint(
            UUID(int=1), "billing", f"http://127.0.0.1:{receiver.port}/hook?a=b", headers={"x-a": "b"}
        )
        event = WebhookEvent(
            "1", "order.created", None, '{"n": 1}', None, datetime.datetime.now(datetime.UTC)
        )
        request = build_request(target, [event], 1, 1)
        attempted = await poster.post(request, LONG, False)
        assert attempted[0] == 200
        assert attempted[2:] == (None, None, None, None, "delivered")
        assert 0 < attempted.latency < LONG
        (received,) = receiver.requests
    assert received.body == b'{"n": 1}'
    first, *lines = received.head.decode().split("\r\n")
    assert first == "POST /hook?a=b HTTP/1.1"
    sent = {line.split(": ")[0].lower(): line.split(": ")[1] for line in lines}
    assert sent == request.headers | {"host": f"127.0.0.1:{receiver.port}", "content-length": "8"}


async def test_connections_are_used_again(poster: WebhookClient) -> None:
    async with Receiver(saying(response(200, body=b"x" * 1000))) as receiver:
        request = Request(f"http://127.0.0.1:{receiver.port}/", b"{}", {})
        for keep in (True, False, True):
            assert (await poster.post(request, LONG, keep)).kind == "delivered"
        assert (receiver.connections, len(receiver.requests)) == (1, 3)


async def test_cookies_are_not_kept(poster: WebhookClient) -> None:
    async with Receiver(saying(response(200, "Set-Cookie: a=b; Path=/"))) as receiver:
        request = Request(f"http://127.0.0.1:{receiver.port}/", b"{}", {})
        for _ in range(2):
            await poster.post(request, LONG, False)
        assert not any("cookie" in sent.headers for sent in receiver.requests)


async def test_large_bodies(poster: WebhookClient) -> None:
    body = b"x" * 3_000_000
    async with Receiver(saying(OK)) as receiver:
        request = Request(f"http://127.0.0.1:{receiver.port}/", body, {"content-type": "text/plain"})
        assert (await poster.post(request, LONG, False)).kind == "delivered"
        assert receiver.requests[0].body == body


async def test_an_answer_before_the_body_was_sent(poster: WebhookClient) -> None:
    connections = 0
    done = asyncio.Event()

    async def hasty(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(response(413))
        await done.wait()
        writer.transport.abort()

    async with await asyncio.start_server(hasty, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        for _ in range(2):
            attempted = await poster.post(Request(url, b"x" * 20_000_000, {}), LONG, False)
            assert attempted.error_class == "http_413"
        assert connections == 2
        done.set()


@pytest.mark.parametrize(
    ("code", "kind", "word"),
    [
        (204, "delivered", None),
        (404, "failed", "http_404"),
        (410, "gone", "http_410"),
        (500, "failed", "http_500"),
    ],
)
async def test_statuses(poster: WebhookClient, code: int, kind: str, word: str | None) -> None:
    attempted = await tried(poster, saying(response(code) if code != 204 else b"HTTP/1.1 204 No\r\n\r\n"))
    assert (attempted.status, attempted.kind, attempted.error_class) == (code, kind, word)


async def test_a_server_that_asks_to_wait(poster: WebhookClient) -> None:
    attempted = await tried(poster, saying(response(503, "Retry-After: 120")))
    assert attempted.kind == "throttled"
    assert attempted.retry_after == 120


SILENT = {
    "nothing": saying(b""),
    "headers": dribbling(b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n"),
    "status": dribbling(b"HTTP/1.1 200 ", b"O"),
    "continue": dribbling(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "hints": dribbling(b"", b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"),
}


async def test_servers_that_never_say_a_status_are_left_in_time(poster: WebhookClient) -> None:
    attempts = await asyncio.gather(*(tried(poster, answer, SOON) for answer in SILENT.values()))
    for name, attempted in zip(SILENT, attempts, strict=True):
        assert attempted.status is None, name
        assert attempted.error_class == "timeout", name
        assert attempted.kind == "failed", name
        assert attempted.response is None, name
        assert attempted.latency >= SOON, name


STUCK = {
    "length": dribbling(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b"x"),
    "until closed": dribbling(b"HTTP/1.1 200 OK\r\n\r\n", b"x"),
    "chunks": dribbling(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
    "reset": dropping(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\nxxx", reset=True),
    "closed": dropping(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\nxxx", reset=False),
    "cut chunk": dropping(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nxxx", reset=False),
}


async def test_once_there_is_a_status_the_rest_changes_nothing(poster: WebhookClient) -> None:
    attempts = await asyncio.gather(
        *(tried(poster, answer, 5 * SOON, keep=True) for answer in STUCK.values())
    )
    for name, attempted in zip(STUCK, attempts, strict=True):
        assert attempted.status == 200, name
        assert attempted.kind == "delivered", name
        assert set(attempted.response or "") <= {"x"}, name


@pytest.mark.parametrize(
    "first",
    [
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n",
    ],
)
async def test_an_endless_body_is_cut_off(poster: WebhookClient, first: bytes) -> None:
    attempted = await tried(poster, endless(first, b"x" * 10_000), keep=True)
    assert attempted.kind == "delivered"
    assert attempted.latency < LONG
    assert attempted.response == "x" * 1024


async def test_a_connection_with_an_unread_body_is_not_used_again(poster: WebhookClient) -> None:
    async with Receiver(saying(response(200, body=b"x" * 1_000_000))) as receiver:
        request = Request(f"http://127.0.0.1:{receiver.port}/", b"{}", {})
        for _ in range(2):
            assert (await poster.post(request, LONG, False)).kind == "delivered"
        assert receiver.connections == 2


async def test_a_compressed_bomb_stays_compressed(poster: WebhookClient) -> None:
    bomb = gzip.compress(bytes(20_000_000))
    assert len(bomb) < 65_536
    attempted = await tried(poster, saying(response(200, "Content-Encoding: gzip", body=bomb)), keep=True)
    assert attempted.kind == "delivered"
    assert attempted.response is not None
    assert len(attempted.response.encode()) <= 1024


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (saying(b"SSH-2.0-OpenSSH_9.2 secret\r\n\r\n"), {"protocol"}),
        (saying(b"\x16\x03\x01\x02\x00\x01\x00" * 10 + b"\r\n\r\n"), {"protocol"}),
        (saying(b"HTTP/1.1 abc OK\r\n\r\n"), {"protocol"}),
        (saying(b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n"), {"protocol"}),
        (saying(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n"), {"protocol"}),
        (saying(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"), {"protocol"}),
        (saying(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"), {"protocol"}),
        (saying(b"HTTP/1.1 200 OK\r\nX-A: " + b"a" * 100_000 + b"\r\n\r\n"), {"too_large"}),
        (saying(b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 100_000 + b"\r\n"), {"too_large", "protocol"}),
        (endless(b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n" * 1000), {"too_large", "protocol"}),
        (endless(b"", b"HTTP/1.1 200 " + b"O" * 10_000), {"too_large", "protocol"}),
        (dropping(b"", reset=True), {"disconnected"}),
        (dropping(b"", reset=False), {"disconnected"}),
        (dropping(b"HTTP/1.1 200 OK\r\nX-A", reset=True), {"disconnected"}),
        (dropping(b"HTTP/1.1 200 OK\r\nX-A", reset=False), {"disconnected", "protocol"}),
    ],
)
async def test_garbage_instead_of_http(poster: WebhookClient, answer: Answer, words: set[str]) -> None:
    attempted = await tried(poster, answer)
    assert attempted.status is None
    assert attempted.error_class in words
    assert attempted.kind == "failed"
    assert attempted.detail
    assert "secret" not in attempted.detail


async def test_answers_that_precede_the_status_are_skipped(poster: WebhookClient) -> None:
    hints = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
    assert (await tried(poster, saying(hints, OK))).kind == "delivered"


HINTS = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"


async def test_interim_responses_without_end_are_cut_off(poster: WebhookClient) -> None:
    """Not by the deadline: the process would parse them until then, and do nothing else."""
    attempted = await tried(poster, endless(b"", HINTS * 1000))
    assert (attempted.status, attempted.error_class, attempted.kind) == (None, "too_large", "failed")


async def test_what_a_connection_may_send_is_counted_for_each_request(poster: WebhookClient) -> None:
    async with Receiver(saying(HINTS * 1000 + response(200, body=b"x" * 50_000))) as receiver:
        request = Request(f"http://127.0.0.1:{receiver.port}/", b"{}", {})
        for _ in range(5):
            assert (await poster.post(request, LONG, False)).kind == "delivered"
        assert receiver.connections == 1


class WithoutResources(Guard):
    """A process that has no more files, memory or addresses."""

    error: OSError | MemoryError

    def socket_factory(self, *given: Any) -> socket.socket:
        raise self.error


@pytest.mark.parametrize("lacking", ["EMFILE", "ENFILE", "ENOMEM", "ENOBUFS", "EADDRNOTAVAIL", ""])
async def test_what_this_process_lacks_is_not_held_against_the_receiver(lacking: str) -> None:
    guard = WithoutResources(["127.0.0.0/8"])
    number = getattr(errno, lacking, 0)
    guard.error = OSError(number, os.strerror(number)) if number else MemoryError()
    async with WebhookClient(guard) as poster:
        attempted = await tried(poster, lambda _: 204)
    assert (attempted.kind, attempted.error_class) == ("unsent", "local_resources")


async def test_another_protocol_is_not_delivery(poster: WebhookClient) -> None:
    switching = saying(b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n")
    attempted = await tried(poster, switching, SOON)
    assert attempted.kind == "failed"
    assert attempted.error_class == "http_101"


async def test_redirects_that_go_round_are_one_failure(poster: WebhookClient) -> None:
    async with Receiver(saying(response(302, "Location: /hook"))) as receiver:
        request = Request(f"http://127.0.0.1:{receiver.port}/hook", b"{}", {})
        assert (await poster.post(request, LONG, False)).error_class == "redirect"
        assert len(receiver.requests) == 1


async def test_nobody_listens(poster: WebhookClient) -> None:
    async with Receiver(saying(OK)) as receiver:
        pass
    attempted = await poster.post(Request(f"http://127.0.0.1:{receiver.port}/", b"{}", {}), LONG, False)
    assert (attempted.error_class, attempted.detail) == (
        "connect",
        f"Connect call failed ('127.0.0.1', {receiver.port})",
    )


async def test_a_name_that_is_none(poster: WebhookClient) -> None:
    attempted = await poster.post(Request("http://" + "a" * 64 + ".invalid/", b"{}", {}), LONG, False)
    assert attempted.error_class == "dns"


class Lost(Resolver):
    """Never finds anything."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        await asyncio.Event().wait()
        return []


async def test_a_name_that_takes_for_ever() -> None:
    async with WebhookClient(Guard(), resolver=Lost()) as poster:
        attempted = await poster.post(Request("http://example.org/", b"{}", {}), 0.1, False)
    assert attempted.error_class == "timeout"


async def test_waiting_for_a_connection_counts_as_waiting() -> None:
    async with (
        Receiver(saying(b"")) as silent,
        WebhookClient(Guard(["127.0.0.0/8"]), connections=1) as poster,
    ):
        request = Request(f"http://127.0.0.1:{silent.port}/", b"{}", {})
        tried = await asyncio.gather(*(poster.post(request, SOON, False) for _ in range(3)))
        assert [attempted.error_class for attempted in tried] == ["timeout"] * 3
        assert silent.connections <= 3


async def test_cancelling_a_post_leaves_nothing_behind(poster: WebhookClient) -> None:
    async with Receiver(saying(b"")) as silent:
        request = Request(f"http://127.0.0.1:{silent.port}/", b"{}", {})
        task = asyncio.create_task(poster.post(request, LONG, False))
        async with asyncio.timeout(LONG):
            await silent.until(lambda: silent.requests)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Of 127.0.0.1, by nobody that one trusts."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "nobody")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    file = tmp_path / "certificate.pem"
    file.write_bytes(
        made.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return file


async def test_certificates_are_checked(poster: WebhookClient, certificate: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(nothing, "127.0.0.1", 0, ssl=context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        attempted = await poster.post(Request(f"https://127.0.0.1:{port}/", b"{}", {}), LONG, False)
    assert attempted.error_class == "tls"
    assert attempted.detail
    assert "certificate" in attempted.detail


async def test_tls_where_there_is_none(poster: WebhookClient) -> None:
    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(plain, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        attempted = await poster.post(Request(f"https://127.0.0.1:{port}/", b"{}", {}), LONG, False)
    assert attempted.error_class == "tls"


def test_what_is_kept_is_text_that_may_be_stored_and_shown() -> None:
    assert as_text(b'{"ok": true}\r\n\t') == '{"ok": true}\r\n\t'
    assert as_text(b"a\x00b\x1b[31mc\x7f\xc2\x85") == "a\ufffdb\ufffd[31mc\ufffd\ufffd"
    assert as_text(b"\xff\xfe\xed\xa0\x80") == "\ufffd" * 5
    assert as_text("é".encode() * 1000) == "é" * 512
    assert as_text(b"a" + "é".encode() * 1000) == "a" + "é" * 511
    assert len(as_text(b"\xff" * 5000).encode()) <= 1024
