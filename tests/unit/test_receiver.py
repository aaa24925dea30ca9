"""The web server that benchmarks and faults post to."""

from __future__ import annotations

import http.client
import socket
from functools import partial

from harness import answers
from harness.receiver import Answer, ReceiverProcess


def ask(receiver: ReceiverProcess, path: str, headers: dict[str, str] | None = None) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", receiver.port, timeout=30)
    connection.request("POST", path, b"[1]", headers or {})
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


def test_it_counts_and_remembers_what_it_is_told_to() -> None:
    with ReceiverProcess(("x-one",)) as receiver:
        assert ask(receiver, "/a/b", {"X-One": "1", "X-Two": "2"}) == 204
        (request,) = receiver.requests()
        assert (request.path, request.headers, request.body) == ("/a/b", {"x-one": "1"}, b"[1]")
        assert receiver.answered() == {0: 204}
        receiver.clear()
        assert receiver.count() == 0


def test_requests_in_pieces_and_several_at_once_are_told_apart() -> None:
    with (
        ReceiverProcess() as receiver,
        socket.create_connection(("127.0.0.1", receiver.port), 30) as connection,
    ):
        request = b"POST /x HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"
        connection.sendall(request + request + request[:30])
        receiver.wait_for(2)
        connection.sendall(request[30:])
        receiver.wait_for(3)
        assert connection.recv(1000).startswith(b"HTTP/1.1 204 ")


def test_a_path_is_answered_as_it_is_told() -> None:
    kinds: dict[str, Answer] = {
        "late": partial(answers.slow, seconds=0.01),
        "no": partial(answers.answering, status=503),
    }
    with ReceiverProcess((), kinds) as receiver:
        assert [ask(receiver, path) for path in ("/late/1", "/no/1", "/other")] == [204, 503, 204]
        assert receiver.most_under_way() == {"/late/1": 1, "/no/1": 1, "/other": 1}


def test_what_fails_once_fails_once() -> None:
    with ReceiverProcess(("webhook-id",), {"once": answers.failing_once}) as receiver:
        statuses = [ask(receiver, "/once", {"webhook-id": name}) for name in ("a0", "a0", "a1", "a1")]
        assert statuses == [500, 204, 204, 204]
