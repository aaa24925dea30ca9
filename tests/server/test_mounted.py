"""Mounted into Starlette, FastAPI and Litestar: the examples, each in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.server.asking import bearer, make_key

ROOT = Path(__file__).parents[2]
HOSTS = ["starlette_app", "fastapi_app", "litestar_app"]
_RUNNING = re.compile(r"Uvicorn running on (http://[\d.:]+)")


@contextmanager
def hosting(dsn: str, name: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """An example, served; its address."""
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "uvicorn", f"examples.server.{name}:app", "--port", "0"],
        cwd=ROOT,
        env={**os.environ, "PGMB_DSN": dsn},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            said: list[str] = []
            for line in process.stderr:
                said.append(line)
                if found := _RUNNING.search(line):
                    yield process, found[1]
                    return
            raise AssertionError("".join(said))
        finally:
            process.kill()


class Events:
    """Server-sent events, one after the other."""

    def __init__(self, answer: httpx.Response) -> None:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        self._lines = answer.iter_lines()

    def opened(self) -> None:
        """Until it has its place: what is published from now on will come."""
        while not next(self._lines).startswith("id: "):
            pass

    def next(self) -> dict[str, object]:
        """The payload of the next one."""
        for line in self._lines:
            if line.startswith("data: "):
                payload: dict[str, object] = msgspec.json.decode(line[6:])["payload"]
                return payload
        raise AssertionError("the connection has ended")

    def ended(self) -> bool:
        return all(not line.startswith("data: ") for line in self._lines)


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_serves_all_of_it_under_its_prefix_and_ends_in_good_order(dsn: str, host: str) -> None:
    key = make_key(dsn, "test", "operate")
    with hosting(dsn, host) as (process, url), httpx.Client(base_url=url, timeout=60) as client:
        client.headers.update(bearer(key))
        client.cookies.set("customer", "cookie-of-ann")
        with client.stream("GET", "/broker/v1/streams/main/events?topic=order.%23") as answer:
            events = Events(answer)
            events.opened()
            given = {"topic": "order.paid", "payload": {"n": 1}}
            published = client.post("/broker/v1/streams/main/events", json=given)
            assert published.status_code == 200, published.text
            assert events.next() == {"n": 1}
            assert client.post("/orders", json={"id": 7}).status_code == 201
            assert events.next()["id"] == 7

            assert client.get("/broker/readyz").json()["ready"] is True
            told = client.get("/broker/metrics").text
            assert 'route="/v1/streams/{stream}/events"' in told
            assert "pgmb_sse_clients 1.0" in told
            assert client.get("/broker/nowhere").json()["code"] == "not_found"
            root = client.get("/broker/", headers={"Accept": "text/html"})
            assert (root.status_code, root.headers["location"]) == (303, "/broker/ui")
            login = client.get("/broker/ui/login")
            assert login.status_code == 200
            static = set(re.findall(r'(?:href|src)="([^"]*/static/[^"]*)"', login.text))
            assert static
            for address in static:
                assert address.startswith("/broker/ui/static/")
                assert client.get(address).status_code == 200

            process.send_signal(signal.SIGTERM)
            assert events.ended()
        _, log = process.communicate(timeout=60)
    assert process.returncode in (0, -signal.SIGTERM)
    assert "Traceback" not in log
    assert "timeout graceful shutdown exceeded" not in log


@pytest.mark.parametrize("host", ["fastapi_app"])
def test_the_application_decides_what_a_request_may_see(dsn: str, host: str) -> None:
    with hosting(dsn, host) as (_, url), httpx.Client(base_url=url, timeout=60) as client:
        assert client.get("/live/").status_code == 401
        client.cookies.set("customer", "cookie-of-ann")
        with client.stream("GET", "/live/") as answer:
            events = Events(answer)
            events.opened()
            for number, customer in enumerate(("bob", "ann", "bob", "ann")):
                cookies = {"Cookie": f"customer=cookie-of-{customer}"}
                with httpx.Client(base_url=url, timeout=60, headers=cookies) as other:
                    assert other.post("/orders", json={"n": number}).status_code == 201
            assert [events.next() for _ in range(2)] == [{"n": n, "customer": "ann"} for n in (1, 3)]
