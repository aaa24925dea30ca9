"""Malformed requests of all kinds at the HTTP side: no server error, no growth, and no leak between keys.

Two keys ask for everything, each allowed a stream and a queue of its own; a third part of the database is
nobody's. Marks lie in all three, in payloads, headers, errors, urls and names, that nobody ever sends: no
answer to one key may hold a mark of another, and what is nobody's must be as it was.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import psycopg
from psycopg.types.json import Jsonb

from faults.server.fuzz_requests import Made, Maker
from faults.server.fuzz_wire import NEVER, Answer, Connection
from harness.states import contents, queue_names
from pgmb._core import keys

CONNECTIONS: Final = 32
OPERATOR: Final = keys.generate()
_PIPELINED: Final = 8
_MALFORMED: Final = 0.3
"""Of the turns of a connection: each is one malformed request, or up to so many others."""
_MAY_GROW: Final = 250.0
"""Megabytes: the largest bodies of all connections, and what the allocator keeps of them."""
_LEASE: Final = b'"lease":"'

_KEPT: Final = (
    "select md5(string_agg(line, ',' order by line)) from ("
    " select l::text from pgmb.log_c l"
    " union all select e::text from pgmb.endpoint e"
    " union all select concat(k.name, k.digest, k.scopes) from pgmb.api_key k"
    " union all select s.name from pgmb.stream s) kept (line)"
)
_STRANGE: Final = "select count(*) from pgmb.audit a where a.actor <> 'key:' || coalesce(a.subject, '')"


@dataclass(frozen=True)
class Result:
    requests: int
    answers: Counter[int]
    server_errors: int
    leaks: int
    own: int
    """Answers that held marks of the key's own: what is looked for is there to be found."""
    changed: bool
    """Whether anything changed of what is nobody's."""
    answers_still: bool
    memory: tuple[float, float]
    seconds: float
    examples: list[str]

    @property
    def holds(self) -> bool:
        fine = (
            not self.server_errors and not self.leaks and self.own and not self.changed and self.answers_still
        )
        return bool(fine) and self.memory[1] - self.memory[0] < _MAY_GROW

    def __str__(self) -> str:
        hundreds = Counter({status // 100: 0 for status in self.answers})
        for status, count in self.answers.items():
            hundreds[status // 100] += count
        statuses = ", ".join(f"{count} {hundred}xx" for hundred, count in sorted(hundreds.items()))
        told = (
            f"requests {self.requests}, {self.server_errors} server errors, {self.leaks} leaks"
            f" | {self.own} answers with marks of the key's own"
            f" | {'CHANGED' if self.changed else 'nothing changed'} of what is nobody's"
            f" | {statuses} | {'answers' if self.answers_still else 'DOES NOT ANSWER'} at the end"
            f" | {self.memory[0]:.0f} MB, then {self.memory[1]:.0f} MB | {self.seconds:.1f} s"
        )
        return "\n".join([told, *self.examples])


def run(dsn: str, *, requests: int, seed: int) -> Result:
    began = time.monotonic()
    with psycopg.connect(dsn, autocommit=True) as admin:
        marks, texts, lease = _prepare(admin)
        before = _kept(admin)
        with tempfile.TemporaryFile() as log, _served(dsn, log) as (process, address):
            fuzz = _Fuzz(address, random.Random(seed), marks, texts, lease, admin)
            memory = asyncio.run(fuzz.drive(requests * 5 // 6, process.pid))
            changed = _kept(admin) != before or admin.execute(_STRANGE).fetchone() != (0,)
            asyncio.run(fuzz.drive_operator(requests, OPERATOR))
            if fuzz.server_errors:
                log.seek(0)
                fuzz.examples.append(log.read().decode(errors="replace")[-3000:])
            answers_still = process.poll() is None and asyncio.run(_answers(address))
    return Result(
        fuzz.asked,
        fuzz.answers,
        fuzz.server_errors,
        fuzz.leaks,
        fuzz.own,
        changed,
        answers_still,
        memory,
        time.monotonic() - began,
        fuzz.examples,
    )


class _Fuzz:
    """The requests, and what is looked for in the answers."""

    def __init__(
        self,
        address: tuple[str, int],
        chance: random.Random,
        marks: dict[str, bytes],
        texts: dict[str, str],
        lease: str,
        admin: psycopg.Connection[Any],
    ) -> None:
        self._admin = admin
        self._marks = marks
        self._address = address
        self._chance = chance
        names = [name.encode() for name in ("main", "endpoint", *marks)]
        self._maker = Maker(chance, texts, names, [lease.encode()])
        self._foreign = {key: [mark for name, mark in marks.items() if name != key] for key in ("", *texts)}
        for key, text in texts.items():
            for other in self._foreign:
                if other != key:
                    self._foreign[other].append(text.encode())
        self.asked = 0
        self.answers: Counter[int] = Counter()
        self.server_errors = 0
        self.leaks = 0
        self.own = 0
        self.examples: list[str] = []

    async def drive(self, requests: int, pid: int) -> tuple[float, float]:
        """Ask so often. What the process has in memory after the first tenth, and at the end."""
        early = max(200, requests // 10)
        await self._until(early)
        before = _memory(pid)
        await self._until(requests)
        return before, _memory(pid)

    async def drive_operator(self, requests: int, text: str) -> None:
        """The same with a key that may do everything, which is then no leak; server errors count."""
        self._maker = Maker(
            self._chance, {"made": text}, [b"made", b"a", b"main", b"endpoint"], self._maker.leases
        )
        self._foreign = {"made": [], "": self._foreign[""]}
        await self._until(requests)

    async def _until(self, requests: int) -> None:
        async with asyncio.TaskGroup() as group:
            ticking = group.create_task(self._ticks())
            asking = [group.create_task(self._connection(requests)) for _ in range(CONNECTIONS)]
            await asyncio.wait(asking)
            ticking.cancel()

    async def _ticks(self) -> None:
        # Or it is not ready, and says so.
        while True:
            await asyncio.to_thread(self._admin.execute, "select pgmb.tick(s.name) from pgmb.stream s")
            await asyncio.sleep(1)

    async def _connection(self, requests: int) -> None:
        connection = Connection(self._address)
        try:
            while self.asked < requests:
                if self._chance.random() < _MALFORMED:
                    made = self._maker.malformed()
                    self.asked += 1
                    self._look(await connection.provoke(made))
                else:
                    several = self._several()
                    self.asked += len(several)
                    self._look(await connection.ask(several))
        finally:
            await connection.close()

    def _several(self) -> list[Made]:
        several: list[Made] = []
        for _ in range(self._chance.randrange(1, _PIPELINED)):
            several.append(self._maker.request())
            if several[-1].last:
                break
        return several

    def _look(self, answers: list[Answer]) -> None:
        for answer in answers:
            self.answers[answer.status] += 1
            if answer.status >= 500 or answer.status == NEVER:
                self.server_errors += 1
                self._example(answer)
            elif any(mark in answer.text for mark in self._foreign[answer.made.key]):
                self.leaks += 1
                self._example(answer)
            elif (mark := self._marks.get(answer.made.key)) and mark in answer.text:
                self.own += 1
            if (at := answer.text.find(_LEASE)) >= 0 and len(self._maker.leases) < 100:
                begins = at + len(_LEASE)
                self._maker.leases.append(answer.text[begins : begins + 36])

    def _example(self, answer: Answer) -> None:
        if len(self.examples) < 5:
            self.examples.append(f"{answer.made.data[:500]!r}\n  {answer.text[-500:]!r}")


def _prepare(admin: psycopg.Connection[Any]) -> tuple[dict[str, bytes], dict[str, str], str]:
    """The marks of all three parts, the texts of both keys, and a lease that is nobody's."""
    marks = {name: f"mark-{name}-{secrets.token_hex(8)}" for name in ("a", "b", "c")}
    texts: dict[str, str] = {}
    lease = ""
    for name, mark in marks.items():
        admin.execute("select pgmb.create_stream(%s)", [name])
        admin.execute("select pgmb.create_queue(%s, stream => %s)", [name, name])
        admin.execute(
            "select pgmb.publish('a.b', json_build_object('mark', %s::text, 'n', n), key => %s,"
            " headers => json_build_object('mark', %s::text), stream => %s) from generate_series(1, 30) n",
            [mark, mark, mark, name],
        )
        dead = admin.execute("select lease from pgmb.receive(%s, 10, '1 hour')", [name]).fetchone()
        assert dead is not None
        admin.execute("select pgmb.bury(%s, error => %s)", [dead[0], mark])
        held = admin.execute("select lease from pgmb.receive(%s, 10, '1 hour')", [name]).fetchone()
        assert held is not None
        lease = str(held[0])
        if name != "c":
            texts[name] = keys.generate()
            scopes = [f"publish:{name}", f"read:{name}", f"consume:{name}"]
            admin.execute("select pgmb.create_api_key(%s, %s, %s)", [name, keys.digest(texts[name]), scopes])
    nobodys = marks["c"]
    admin.execute(
        "select pgmb.create_endpoint('endpoint', %s, description => %s, headers => %s, queue => 'endpoint')",
        [f"https://{nobodys}.example", nobodys, Jsonb({"x-mark": nobodys})],
    )
    admin.execute("select pgmb.pause('c', %s)", [nobodys])
    admin.execute("select pgmb.create_api_key(%s, %s, '{operate}')", [nobodys, keys.digest(OPERATOR)])
    return {name: mark.encode() for name, mark in marks.items()}, texts, lease


def _kept(admin: psycopg.Connection[Any]) -> Any:
    return contents(admin, "c"), queue_names(admin), admin.execute(_KEPT).fetchone()


@contextmanager
def _served(dsn: str, log: IO[bytes]) -> Iterator[tuple[subprocess.Popen[bytes], tuple[str, int]]]:
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        descriptor = listening.fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", "faults.server.fuzz_app", str(descriptor)],
            env={**os.environ, "PGMB_DSN": dsn},
            pass_fds=[descriptor],
            stderr=log,
        )
        try:
            address = listening.getsockname()
            deadline = time.monotonic() + 60
            while not asyncio.run(_answers(address)):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("the server does not start")
            yield process, address
        finally:
            process.kill()
            process.wait()


async def _answers(address: tuple[str, int]) -> bool:
    connection = Connection(address)
    try:
        async with asyncio.timeout(30):
            found = await connection.ask([Made(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n", "")])
    except (OSError, TimeoutError):
        return False
    finally:
        await connection.close()
    return [answer.status for answer in found] == [200]


def _memory(pid: int) -> float:
    """Megabytes that a process has in memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0
