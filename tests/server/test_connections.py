"""Connections are bounded in each of their states: in bytes, in time and in number (ADR 48)."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import pgmb
from harness.certificates import self_signed
from pgmb.services import Http, HttpSettings, http_server


@contextlib.asynccontextmanager
async def served(dsn: str, **settings: Any) -> AsyncGenerator[int]:
    async with await pgmb.aconnect(dsn) as broker:
        service = Http(dsn, HttpSettings(port=0, finish_within=1.0, **settings))
        await service.turn(broker)
        yield int(service.url.rpartition(":")[2])
        await service.close(broker)


@contextlib.asynccontextmanager
async def serving_app(app: Any) -> AsyncGenerator[int]:
    """Another application behind the same connections."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        server = http_server.Server(app, HttpSettings(finish_within=0.2))
        serving = asyncio.create_task(server.serve(listening))
        yield listening.getsockname()[1]
        await server.stop()
        await serving


@pytest.fixture
async def port(dsn: str) -> AsyncGenerator[int]:
    async with served(dsn, head_within=4.0) as port:
        yield port


async def _ended(reader: asyncio.StreamReader) -> bytes:
    with contextlib.suppress(ConnectionError):
        return await reader.read()
    return b""


async def _until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def test_600_half_open_requests_are_closed_and_others_are_answered(port: int) -> None:
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(600)]
    for _, writer in opened[::2]:
        writer.write(b"GET /livez HTTP/1.1\r\nHost: pgmb\r\nX-Slow: ")
    # More than fit: the oldest had to go at once, unless opening so many took longer than a head may take.
    assert (await asyncio.wait_for(_ended(opened[1][0]), 20))[9:12] in (b"503", b"408")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
        assert (await client.get("/livez")).status_code == 200
    answers = await asyncio.wait_for(asyncio.gather(*[_ended(reader) for reader, _ in opened]), 20)
    assert {answer[9:12] for answer in answers[3::2]} <= {b"503", b"408"}
    # What was sent to a closed connection resets it, and the answer may be lost.
    assert {answer[9:12] for answer in answers[::2]} <= {b"503", b"408", b""}
    for _, writer in opened:
        writer.close()


async def test_a_head_that_trickles_in_is_closed(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    ended = asyncio.ensure_future(_ended(reader))
    writer.write(b"GET /livez HTTP/1.1\r\nHost: pgmb\r\n\r\n")
    writer.write(b"GET /livez HTTP/1.1\r\n")
    async with asyncio.timeout(20):
        while not ended.done():
            with contextlib.suppress(ConnectionError):
                writer.write(b"X: y\r\n")
            await asyncio.sleep(0.1)
    assert b"HTTP/1.1 408 " in ended.result()
    writer.close()


@pytest.mark.parametrize("kind", ["one field", "many fields", "the address"])
async def test_a_head_of_60_mb_is_refused_when_64_kb_have_come(port: int, kind: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    writer.write(b"GET /livez" if kind == "the address" else b"GET /livez HTTP/1.1\r\nHost: pgmb\r\nX: ")
    part = b"X: " + b"y" * 1000 + b"\r\n" if kind == "many fields" else b"y" * 1005
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < 60 << 20 and not reader.at_eof():
            writer.write(part * 100)
            sent += len(part) * 100
            await writer.drain()
    writer.close()
    assert sent < 30 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40 << 10


async def test_heads_that_are_too_large_or_have_too_many_fields_are_431_in_one_piece(port: int) -> None:
    for head in (b"X: " + b"y" * (65 << 10) + b"\r\n", b"X: y\r\n" * 300):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/keys HTTP/1.1\r\nHost: pgmb\r\nContent-Length: 3\r\n" + head + b"\r\nabc")
        answer = await asyncio.wait_for(_ended(reader), 20)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 431 ")


async def test_what_stays_open_after_its_request_has_come_is_left_alone(port: int) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
        for _ in range(3):
            assert (await client.get("/livez")).status_code == 200
            await asyncio.sleep(1.0)
        assert (await client.post("/v1/keys", content=b"x" * 300_000)).status_code == 401


@pytest.fixture
async def small(dsn: str, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[int]:
    """A server whose bounds are reached within seconds."""
    numbers = dict.fromkeys(http_server.State, http_server.Bound(1.0, 20))
    numbers[http_server.State.ANSWER] = http_server.BOUNDS[http_server.State.ANSWER]
    monkeypatch.setattr(http_server, "BOUNDS", numbers)
    monkeypatch.setattr(http_server, "UNREAD_SECONDS", 1.0)
    monkeypatch.setattr(http_server, "HELD_BYTES", 1 << 20)
    monkeypatch.setattr(http_server, "_BEHIND_SECONDS", 0.5)
    async with served(dsn, head_within=1.0) as port:
        yield port


_ASK = b"GET /livez HTTP/1.1\r\nHost: pgmb\r\n\r\n"
_FORM = b"POST /ui/login HTTP/1.1\r\nHost: pgmb\r\nContent-Type: application/x-www-form-urlencoded\r\n"
_CHUNKED = _FORM + b"Transfer-Encoding: chunked\r\n\r\n4\r\nkey=\r\n"
_STATES = {
    "new": b"",
    "head": _ASK[:-2] + b"X: ",
    "body": _FORM + b"Content-Length: 1000\r\n\r\nkey=",
    "chunk": _CHUNKED + b"1;x=y",
    "trailer": _CHUNKED + b"0\r\nX: y",
    "idle": _ASK,
}


@pytest.mark.parametrize("state", _STATES)
async def test_a_connection_that_stays_in_a_state_is_closed(small: int, state: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", small)
    writer.write(_STATES[state])
    await asyncio.wait_for(_ended(reader), 20)
    writer.close()


@pytest.mark.parametrize("state", _STATES)
async def test_an_address_with_many_connections_in_a_state_displaces_its_own(
    dsn: str, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    few = {state: bound._replace(number=20) for state, bound in http_server.BOUNDS.items()}
    monkeypatch.setattr(http_server, "BOUNDS", few)
    async with served(dsn, head_within=60.0) as port:
        kept, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_STATES[state])
        others = [
            await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0)) for _ in range(60)
        ]
        for _, other in others:
            other.write(_STATES[state])
        ends = [asyncio.ensure_future(_ended(reader)) for reader, _ in others]
        async with asyncio.timeout(20):
            await _until(lambda: sum(end.done() for end in ends) >= 40)
        assert not any(end.done() for end in ends[45:])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_ended(kept), 0.5)
        for one in (writer, *(other for _, other in others)):
            one.close()
        await asyncio.gather(*ends)


async def test_connections_beyond_the_limit_of_files_displace_idle_ones(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "raise_file_limit", lambda: 10 + 100 + 40)
    async with served(dsn) as port:
        kept, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_ASK)
        opened = []
        for _ in range(100):
            opened.append(await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0)))
            opened[-1][1].write(_ASK)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=5) as client:
            assert (await client.get("/livez")).status_code == 200
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_ended(kept), 0.5)
        for one in (writer, *(other for _, other in opened)):
            one.close()


@pytest.mark.parametrize("kind", ["one field", "many fields", "an extension"])
async def test_a_trailer_of_60_mb_is_refused(port: int, kind: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    writer.write(
        _CHUNKED + {"one field": b"0\r\nX: ", "many fields": b"0\r\n", "an extension": b"1;x="}[kind]
    )
    part = b"X: " + b"y" * 1000 + b"\r\n" if kind == "many fields" else b"y" * 1005
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < 60 << 20 and not reader.at_eof():
            writer.write(part * 100)
            sent += len(part) * 100
            await writer.drain()
    writer.close()
    assert sent < 30 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40 << 10


async def test_a_trailer_adds_no_header_to_the_request(dsn: str) -> None:
    seen: list[list[tuple[bytes, bytes]]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        seen.append(list(scope["headers"]))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async with serving_app(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_CHUNKED + b"0\r\nAuthorization: Bearer x\r\n\r\n")
        assert await asyncio.wait_for(reader.readline(), 20) == b"HTTP/1.1 204 No Content\r\n"
        writer.close()
    assert [name for name, _ in seen[0]] == [b"host", b"content-type", b"transfer-encoding"]


async def test_requests_sent_ahead_are_answered_up_to_a_number(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_ASK * 2000)
    answers = await asyncio.wait_for(_ended(reader), 20)
    writer.close()
    assert 0 < answers.count(b"HTTP/1.1 200 ") <= http_server.QUEUED_REQUESTS + 1
    assert answers.endswith(b"ok\n")


async def test_an_invalid_request_after_others_does_not_break_their_answers(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    for invalid in (b"X: y\r\n\r\n", b"GET /livez HTTP/1.1\r\nX: " + b"y" * (70 << 10) + b"\r\n\r\n"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_ASK * 3 + invalid)
        answers = await asyncio.wait_for(_ended(reader), 20)
        writer.close()
        assert answers.count(b"HTTP/1.1 200 ") == 3
        assert answers.endswith(b"ok\n")
    assert not [record for record in caplog.records if record.exc_info]


async def _large(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8000000")]})
    await send({"type": "http.response.body", "body": bytes(8_000_000)})


@pytest.mark.parametrize("reading", [0, 1000])
async def test_an_answer_that_is_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch, reading: int) -> None:
    monkeypatch.setattr(http_server, "UNREAD_SECONDS", 1.0)
    async with serving_app(_large) as port:
        with _unread(port) as client:
            async with asyncio.timeout(20):
                while not _is_reset(client):
                    await asyncio.sleep(0.1)
                    if reading:
                        await asyncio.get_running_loop().sock_recv(client, reading // 10)


async def test_an_answer_that_is_read_slowly_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "UNREAD_SECONDS", 0.6)
    async with serving_app(_large) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
        writer.write(_ASK)
        received = 0
        async with asyncio.timeout(30):
            await reader.readuntil(b"\r\n\r\n")
            while received < 8_000_000:
                received += len(await reader.readexactly(250_000))
                await asyncio.sleep(0.05)
        writer.close()


async def test_unread_answers_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HELD_BYTES", 20 << 20)
    monkeypatch.setattr(http_server, "_BEHIND_SECONDS", 0.5)
    async with serving_app(_large) as port, contextlib.AsyncExitStack() as stack:
        clients = [stack.enter_context(_unread(port)) for _ in range(8)]
        async with asyncio.timeout(20):
            await _until(lambda: sum(map(_is_reset, clients)) >= 4)
        await asyncio.sleep(1.0)
        assert not all(map(_is_reset, clients))


@contextlib.contextmanager
def _unread(port: int) -> Iterator[socket.socket]:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port))
        client.sendall(_ASK)
        client.setblocking(False)
        yield client


def _is_reset(client: socket.socket) -> bool:
    return client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) != b"\1"


async def test_connections_that_never_begin_the_handshake_are_bounded(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {**http_server.BOUNDS, http_server.State.HANDSHAKE: http_server.Bound(2.0, 20)}
    monkeypatch.setattr(http_server, "BOUNDS", few)
    chain, key = self_signed(tmp_path)
    async with served(dsn, ssl_certfile=str(chain), ssl_keyfile=str(key)) as port:
        opened = [
            await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0)) for _ in range(60)
        ]
        ends = [asyncio.ensure_future(_ended(reader)) for reader, _ in opened]
        trusted = ssl.create_default_context(cafile=str(chain))
        async with httpx.AsyncClient(
            base_url=f"https://127.0.0.1:{port}", verify=trusted, timeout=20
        ) as client:
            assert (await client.get("/livez")).status_code == 200
        async with asyncio.timeout(20):
            await _until(lambda: sum(end.done() for end in ends) >= 40)
            await asyncio.gather(*ends)
        for _, other in opened:
            other.close()


async def test_many_clients_that_connect_at_once_are_all_answered(port: int) -> None:
    clients = [socket.socket() for _ in range(1500)]
    loop = asyncio.get_running_loop()
    for client in clients:
        # The server shares this event loop: until all have connected, it accepts none.
        client.connect(("127.0.0.1", port))
        client.sendall(_ASK)
        client.setblocking(False)
    async with asyncio.timeout(60):
        for client in clients:
            assert (await loop.sock_recv(client, 12)) == b"HTTP/1.1 200"
            client.close()


async def test_requests_of_an_address_do_not_wait_for_those_of_another() -> None:
    """They begin in rotation, although hundreds of one address arrived before."""
    begun: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["client"][0])
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async with serving_app(app) as port:
        opened = [
            await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
            for address in ["127.0.0.66"] * 200 + ["127.0.0.1"]
        ]
        for _ in range(2):
            begun.clear()
            # All at once: nothing runs between these, and the server finds them in this order.
            for _, writer in opened:
                writer.write(_ASK)
            for reader, _ in opened:
                assert b"204" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        assert begun.count("127.0.0.66") == 200
        assert begun.index("127.0.0.1") <= 2 * http_server._REQUESTS_AT_ONCE  # pyright: ignore[reportPrivateUsage]
        for _, writer in opened:
            writer.close()
