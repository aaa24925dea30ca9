"""The web server that benchmarks and faults post to."""

from __future__ import annotations

import http.client
import socket
from functools import partial

from harness import manners
from harness.sink import Sink


def ask(sink: Sink, path: str, headers: dict[str, str] | None = None) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", sink.port, timeout=30)
    connection.request("POST", path, b"[1]", headers or {})
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


def test_it_counts_and_remembers_what_it_is_told_to() -> None:
    with Sink(("x-one",)) as sink:
        assert ask(sink, "/a/b", {"X-One": "1", "X-Two": "2"}) == 204
        (arrival,) = sink.arrivals()
        assert (arrival.path, arrival.headers, arrival.body) == ("/a/b", {"x-one": "1"}, b"[1]")
        assert sink.answered() == {0: 204}
        sink.clear()
        assert sink.count() == 0


def test_requests_in_pieces_and_several_at_once_are_told_apart() -> None:
    with Sink() as sink, socket.create_connection(("127.0.0.1", sink.port), 30) as connection:
        request = b"POST /x HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"
        connection.sendall(request + request + request[:30])
        sink.wait_for(2)
        connection.sendall(request[30:])
        sink.wait_for(3)
        assert connection.recv(1000).startswith(b"HTTP/1.1 204 ")


def test_a_path_is_answered_in_its_manner() -> None:
    kinds = {"late": partial(manners.slow, seconds=0.01), "no": partial(manners.refusing, status=503)}
    with Sink((), kinds) as sink:
        assert [ask(sink, path) for path in ("/late/1", "/no/1", "/other")] == [204, 503, 204]
        assert sink.most_under_way() == {"/late/1": 1, "/no/1": 1, "/other": 1}


def test_what_fails_once_fails_once() -> None:
    with Sink(("webhook-id",), {"once": manners.failing_once}) as sink:
        statuses = [ask(sink, "/once", {"webhook-id": name}) for name in ("a0", "a0", "a1", "a1")]
        assert statuses == [500, 204, 204, 204]
