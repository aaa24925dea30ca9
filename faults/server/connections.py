"""Strangers hold connections in each of their states; others are answered, and memory stays bounded."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

import pgmb
from faults.server.strangers import ATTACKS
from harness.certificates import self_signed
from harness.serving import serving

_STRANGERS = [sys.executable, "-m", "faults.server.strangers"]
_MOST_MEMORY = 100 << 20
_SPARE = 10
"""Files that the server may have opened for other reasons."""
_WITHIN = 1.0
_ALL_CLOSED = {
    "handshaking: number": 30.0,
    "new: number": 30.0,
    "head: number": 30.0,
    "head: time": 30.0,
    "body: number": 90.0,
    "body: time": 90.0,
    "trailer: time": 90.0,
    "answering: unread": 90.0,
    "answering: unread events": 90.0,
    "closing: unread": 90.0,
    "closing: half closed": 30.0,
    "idle: number": 110.0,
    "queued: number": 90.0,
    "queued: bytes": 90.0,
    "answering: read a byte at a time": 110.0,
}
"""Seconds until the last connection of an attack is closed. Attacks by bytes are ended at once."""


@dataclass(frozen=True, slots=True)
class Result:
    attack: str
    memory: int
    waited: float
    failed: int
    report: dict[str, Any]
    descriptors: int
    left: int
    """More than before the attack, while the strangers still hold their ends."""

    @property
    def holds(self) -> bool:
        return (
            self.memory < _MOST_MEMORY and self.waited < _WITHIN and not self.failed and self.left <= _SPARE
        )

    def __str__(self) -> str:
        told = self.report
        last = "-" if told["last"] is None else f"{told['last']:.1f} s"
        return (
            f"{'holds' if self.holds else 'VIOLATED':8} {self.attack}: {told['opened']} opened,"
            f" {told['closed']} closed by the server, the last after {last}, {told['sent'] >> 20} MB sent"
            f" | others waited {self.waited:.2f} s, {self.failed} failed | {self.memory >> 20:+} MB,"
            f" {self.descriptors} files, {self.left} left"
        )


def run(dsn: str, *, only: str | None, say: Callable[[str], None]) -> bool:
    with pgmb.connect(dsn, max_size=1) as broker:
        key = broker.create_api_key("strangers", ["read:main", "publish:main"]).key
    held = True
    for attack in ATTACKS:
        if only is None or only in attack:
            result = _attacked(dsn, key, attack)
            say(str(result))
            held = held and result.holds
    return held


def _attacked(dsn: str, key: str, attack: str) -> Result:
    seconds = _ALL_CLOSED.get(attack, 30.0)
    with ExitStack() as stack:
        arguments, trusted = ["http", "--no-access-log"], None
        if attack.startswith("handshaking"):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            chain, secret = self_signed(folder)
            arguments += ["--ssl-certfile", str(chain), "--ssl-keyfile", str(secret)]
            trusted = ssl.create_default_context(cafile=str(chain))
        served = stack.enter_context(serving(dsn, *arguments))
        others = _Others(served.url, key, trusted)
        for _ in range(5):
            others.ask()
        others.waited = 0.0
        process = psutil.Process(served.process.pid)
        before, files = process.memory_info().rss, process.num_fds()
        with _watched(process) as seen, others.asking():
            strangers = subprocess.Popen(
                [*_STRANGERS, attack, "127.0.0.1", str(served.port), str(seconds), key],
                stdout=subprocess.PIPE,
                text=True,
            )
            if "events" in attack:
                time.sleep(3)
                _publish_large(dsn)
            assert strangers.stdout is not None
            out = strangers.stdout.readline()
            left = process.num_fds() - files
            strangers.terminate()
            strangers.wait()
    return Result(
        attack,
        seen["memory"] - before,
        others.waited,
        others.failed,
        json.loads(out),
        seen["descriptors"],
        left,
    )


def _publish_large(dsn: str) -> None:
    with pgmb.connect(dsn, max_size=1) as broker:
        for _ in range(3):
            broker.publish("large", "x" * (4 << 20))
            broker.tick()
            time.sleep(0.5)


@contextmanager
def _watched(process: psutil.Process) -> Generator[dict[str, int]]:
    seen = {"memory": 0, "descriptors": 0}
    over = threading.Event()

    def watch() -> None:
        with contextlib.suppress(psutil.Error):
            while not over.wait(0.1):
                seen["memory"] = max(seen["memory"], process.memory_info().rss)
                seen["descriptors"] = max(seen["descriptors"], process.num_fds())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


class _Others:
    """A client that connects for each request, from another address than the strangers."""

    def __init__(self, url: str, key: str, trusted: ssl.SSLContext | None) -> None:
        self._where = urlsplit(url).netloc
        self._key = key
        self._trusted = trusted
        self.waited = 0.0
        self.failed = 0

    def ask(self) -> None:
        """Look whether the server lives, and publish an event."""
        body = json.dumps({"topic": "of.others", "payload": 1})
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        self._request("GET", "/livez", None, {})
        self._request("POST", "/v1/streams/main/events", body, headers)

    def _request(self, method: str, path: str, body: str | None, headers: dict[str, str]) -> None:
        began = time.monotonic()
        connection = (
            http.client.HTTPConnection(self._where, timeout=30)
            if self._trusted is None
            else http.client.HTTPSConnection(self._where, timeout=30, context=self._trusted)
        )
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            answer.read()
            self.failed += answer.status >= 300
        except OSError:
            self.failed += 1
        finally:
            connection.close()
            self.waited = max(self.waited, time.monotonic() - began)

    @contextmanager
    def asking(self) -> Generator[None]:
        over = threading.Event()

        def ask() -> None:
            while not over.wait(0.2):
                self.ask()

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
