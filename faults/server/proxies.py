"""`pgmb serve` behind nginx and Caddy, with the configurations in `deploy`. Needs both programs."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import httpx

import pgmb
from harness.ports import free_port
from harness.serving import Served, serving

_DEPLOY = Path(__file__).parents[2] / "deploy"
_WITHIN_SECONDS = 2.0
_CLIENT = "127.0.0.2"
"""An address of loopback that is not the proxy's."""


def _nginx(folder: Path, port: int, upstream: int) -> list[str]:
    text = (_DEPLOY / "nginx" / "pgmb.conf").read_text()
    (folder / "pgmb.conf").write_text(
        text.replace("listen 80;", f"listen 127.0.0.1:{port};").replace(
            "127.0.0.1:8080", f"127.0.0.1:{upstream}"
        )
    )
    temporary = "".join(
        f"{name}_temp_path {folder}/{name};\n"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off;\npid {folder}/pid;\nerror_log stderr warn;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{temporary}include {folder}/pgmb.conf;\n}}\n"
    )
    return ["nginx", "-e", "stderr", "-p", str(folder), "-c", str(folder / "nginx.conf")]


def _caddy(folder: Path, port: int, upstream: int) -> list[str]:
    text = (_DEPLOY / "caddy" / "Caddyfile").read_text()
    (folder / "Caddyfile").write_text(
        text.replace("\tgrace_period", "\tadmin off\n\tgrace_period", 1)
        .replace("pgmb.example", f"http://127.0.0.1:{port}")
        .replace("127.0.0.1:8080", f"127.0.0.1:{upstream}")
    )
    return ["caddy", "run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]


PROXIES: dict[str, Callable[[Path, int, int], list[str]]] = {"nginx": _nginx, "caddy": _caddy}


def run(dsn: str) -> dict[str, list[str]]:
    """What does not hold behind each proxy."""
    with pgmb.connect(dsn) as broker:
        key = broker.create_api_key("proxies", ["operate"]).key
        broker.create_queue("jobs", ["job"])
    with serving(dsn, "serve", "--proxy-headers") as served:
        return {name: _judge(name, served, key) for name in PROXIES}


def _judge(name: str, served: Served, key: str) -> list[str]:
    if shutil.which(name) is None:
        return [f"{name} is not installed"]
    wrong: list[str] = []
    headers = {"Authorization": f"Bearer {key}"}
    transport = httpx.HTTPTransport(local_address=_CLIENT)
    with (
        _running(name, served.port) as url,
        httpx.Client(base_url=url, headers=headers, timeout=30, transport=transport) as client,
    ):
        logged = served.log.count(_CLIENT)
        for check in (_publishes, _streams_at_once, _polls, _limits_bodies):
            try:
                check(client)
            except (AssertionError, httpx.HTTPError) as error:
                wrong.append(f"{check.__name__}: {error!r}")
        if served.log.count(_CLIENT) == logged:
            wrong.append("the server does not see the client's address")
    return wrong


@contextmanager
def _running(name: str, upstream: int) -> Generator[str]:
    port = free_port()
    with (
        tempfile.TemporaryDirectory(prefix=f"pgmb-{name}-") as folder,
        subprocess.Popen(PROXIES[name](Path(folder), port, upstream), stderr=subprocess.DEVNULL) as process,
    ):
        try:
            _until_listening(port)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _until_listening(port: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def _publishes(client: httpx.Client) -> None:
    answer = client.post("/v1/streams/main/events", json={"topic": "job", "payload": 1})
    assert answer.status_code == 200, answer.text


def _streams_at_once(client: httpx.Client) -> None:
    """A server-sent event comes when it is published, and not when a buffer is full."""
    with client.stream("GET", "/v1/streams/main/events", params={"topic": "now"}) as answer:
        lines = answer.iter_lines()
        assert answer.status_code == 200
        next(lines)
        began = time.monotonic()
        publishing = threading.Timer(
            0.2,
            httpx.post,
            [str(client.base_url.join("/v1/streams/main/events"))],
            {"json": {"topic": "now", "payload": 1}, "headers": dict(client.headers)},
        )
        publishing.start()
        next(line for line in lines if line.startswith("data:"))
        assert time.monotonic() - began < _WITHIN_SECONDS
        publishing.join()


def _polls(client: httpx.Client) -> None:
    """A long poll lasts as long as it was asked to."""
    client.post("/v1/queues/jobs/receive", json={"max": 100})
    began = time.monotonic()
    answer = client.post("/v1/queues/jobs/receive", json={"wait": 5})
    assert answer.status_code == 200, answer.text
    assert 4 < time.monotonic() - began < 5 + _WITHIN_SECONDS


def _limits_bodies(client: httpx.Client) -> None:
    answer = client.post("/v1/streams/main/events", content=b"x" * (5 << 20))
    assert answer.status_code == 413, answer.status_code
