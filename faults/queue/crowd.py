"""A crowd: hundreds of consumers of one queue, none of which has a long transaction. None may be superseded.

First a few consumers take events, then hundreds do, each with a connection of its own: pgbench, so that the
clients cost little. The crowd must take each event once, open no generation and get no error, at little more
server CPU a message than the few. In the end one more transaction receives and stays open: that one must be
superseded in a second, and another for each hundred who wait.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, LiteralString

import psycopg

from harness.installations import binaries
from harness.server import Server
from harness.states import open_generations

KINDS = {
    "plain": "",
    "ordered": ", ordered => true",
    "limited": ", max_in_flight => 100000",
    "fair": ", fair_by => 'key'",
}
_FEW = 20
_KEYS = 500
_PGBENCH_MAJOR = 15
"""Version 18 as it is installed here has no pgbench; one version suits all servers."""
_SPARE = 10
"""Connections that are left to this program."""
_DEAREST = 1.5
_LONGEST_STALL_SECONDS = 5.0
_HELD_SECONDS = 6.0
_WARM_UP_SECONDS = 120.0

# The receive is a transaction, and what it took is recorded in it. The ack is another.
_TAKE = """\
with got as materialized (select r.lease, r.seq from pgmb.receive('{queue}', 1) r),
  recorded as (insert into taken select got.seq, pg_backend_pid(), clock_timestamp() from got)
select count(*) some, coalesce(max(got.lease::text), '') lease from got \\gset
\\if :some
select pgmb.ack(:lease::uuid);
\\endif
"""


def settings(consumers: int) -> dict[str, Any]:
    return {"max_connections": consumers + _FEW + _SPARE}


@dataclass
class Stage:
    """What so many consumers did."""

    consumers: int
    messages: int
    cpu: float
    errors: list[str] = field(default_factory=list)

    @property
    def cpu_each(self) -> float:
        """Milliseconds of server CPU a message."""
        return self.cpu * 1000 / max(self.messages, 1)


@dataclass
class Crowd:
    """What became of one queue."""

    kind: str
    few: Stage
    many: Stage
    twice: int
    generations: int
    stall: float

    @property
    def errors(self) -> list[str]:
        return self.few.errors + self.many.errors

    @property
    def holds(self) -> bool:
        return (
            not (self.errors or self.twice or self.generations)
            and self.many.messages > 0
            and self.cost <= _DEAREST
            and self.stall < _LONGEST_STALL_SECONDS
        )

    @property
    def cost(self) -> float:
        return self.many.cpu_each / self.few.cpu_each

    def __str__(self) -> str:
        return (
            f"{self.kind}: {self.many.messages} messages, {self.generations} superseded, {self.twice} twice, "
            f"{len(self.errors)} errors, CPU {self.many.cpu_each:.2f} ms a message "
            f"({self.cost:.2f} times that of {self.few.consumers} consumers), stalled for {self.stall:.1f} s"
        )


@dataclass
class Result:
    consumers: int
    crowds: list[Crowd]

    @property
    def holds(self) -> bool:
        return all(crowd.holds for crowd in self.crowds)

    def __str__(self) -> str:
        errors = [error for crowd in self.crowds for error in crowd.errors][:5]
        dearest = max(crowd.cost for crowd in self.crowds)
        total = (
            f"{self.consumers} consumers: {sum(crowd.generations for crowd in self.crowds)} superseded, "
            f"{sum(crowd.twice for crowd in self.crowds)} twice, "
            f"{sum(len(crowd.errors) for crowd in self.crowds)} errors, CPU {dearest:.2f} times"
        )
        return "\n".join((*errors, *map(str, self.crowds), total))


def run(server: Server, dsn: str, *, kinds: Sequence[str], consumers: int, seconds: float) -> Result:
    """`seconds`: how long each stage is measured, after every consumer has received."""
    return Result(consumers, [_crowd(server, dsn, kind, consumers, seconds) for kind in kinds])


def _crowd(server: Server, dsn: str, kind: str, consumers: int, seconds: float) -> Crowd:
    queue = f"crowd-{kind}"
    with psycopg.connect(dsn, autocommit=True) as db:
        # The leases of consumers that end must not expire in the run: their events would come again.
        db.execute(f"select pgmb.create_queue('{queue}', lease_for => '1 hour' {KINDS[kind]})".encode())
        db.execute("drop table if exists taken")
        db.execute("create unlogged table taken (seq bigint, pid integer, at timestamptz)")
        backlog = _Backlog(db)
        with _consumers(dsn, queue, _FEW) as few_errors:
            few = _measure(server, db, backlog, _FEW, seconds, few_errors)
        with _consumers(dsn, queue, consumers) as many_errors:
            many = _measure(server, db, backlog, consumers, seconds, many_errors)
            generations = _generations(db, queue)
            stall = _stall(dsn, db, queue)
        (twice,) = _row(db, "select count(*) - count(distinct seq) from taken")
        db.execute("select pgmb.drop_queue(%s)", [queue])
        return Crowd(kind, few, many, twice, generations, stall)


@contextlib.contextmanager
def _consumers(dsn: str, queue: str, number: int) -> Generator[list[str]]:
    """That many receive and ack until the block ends. Its errors are complete after it."""
    errors: list[str] = []
    with tempfile.TemporaryDirectory(prefix="pgmb-crowd-") as folder:
        script = Path(folder) / "consume.sql"
        script.write_text(_TAKE.format(queue=queue))
        pgbench = subprocess.Popen(
            [
                *(
                    binaries(_PGBENCH_MAJOR) / "pgbench",
                    "--no-vacuum",
                    "--protocol=prepared",
                    "--file",
                    script,
                ),
                *("--client", str(number), "--jobs", "2", "--time", "600", dsn),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert pgbench.stderr is not None
        lines = pgbench.stderr
        reading = threading.Thread(
            target=lambda: errors.extend(line.strip() for line in lines if "ERROR" in line or "FATAL" in line)
        )
        reading.start()
        try:
            yield errors
            ended = pgbench.poll() is not None
        finally:
            pgbench.terminate()
            pgbench.wait(30)
            reading.join(30)
            lines.close()
        if ended:
            errors.append("all consumers ended")


def _measure(
    server: Server,
    db: psycopg.Connection[Any],
    backlog: _Backlog,
    consumers: int,
    seconds: float,
    errors: list[str],
) -> Stage:
    """Measures once each consumer has received eight times: in its first calls a session plans statements."""
    (since,) = _row(db, "select clock_timestamp()")
    warm = "select count(*) from (select pid from taken where at > %s group by pid having count(*) >= 8) warm"
    deadline = time.monotonic() + _WARM_UP_SECONDS
    while _row(db, warm, since)[0] < consumers - len(errors):
        backlog.fill()
        if time.monotonic() > deadline:
            errors.append(f"after {_WARM_UP_SECONDS:.0f} s not every consumer had received eight times")
            break
        time.sleep(0.2)
    backlog.fill()
    (before,) = _row(db, "select count(*) from taken")
    cpu = server.cpu_seconds()
    time.sleep(seconds)
    cpu = server.cpu_seconds() - cpu
    (after,) = _row(db, "select count(*) from taken")
    backlog.fill()
    return Stage(consumers, after - before, cpu, errors)


class _Backlog:
    """Events that wait, so many that no consumer finds the queue empty."""

    _AHEAD = 60_000

    def __init__(self, db: psycopg.Connection[Any]) -> None:
        self._db = db
        self._published = 0
        self.fill()

    def fill(self) -> None:
        (taken,) = _row(self._db, "select count(*) from taken")
        if self._published - taken < self._AHEAD / 2:
            self._db.execute(
                "select pgmb.publish_many(array_agg('t'::text), array_agg(to_json(n)),"
                " keys => array_agg('key ' || n %% %s::int)) from generate_series(1, %s::int) n",
                [_KEYS, self._AHEAD],
            )
            self._published += self._AHEAD


def _generations(db: psycopg.Connection[Any], queue: str) -> int:
    return open_generations(db, queue)


def _stall(dsn: str, db: psycopg.Connection[Any], queue: str) -> float:
    """Receives in a transaction that stays open: for how many seconds nobody received."""
    with psycopg.connect(dsn) as long:
        long.execute("select from pgmb.receive(%s, 1)", [queue])
        (since,) = _row(db, "select clock_timestamp()")
        time.sleep(_HELD_SECONDS)
        long.rollback()
    (stall,) = _row(
        db,
        "select extract(epoch from max(gap))::float from (select at - lag(at) over (order by at) gap from"
        " (select at from taken union all select %s union all select clock_timestamp()) moment (at)"
        " where at >= %s) gaps",
        since,
        since,
    )
    return float(stall)


def _row(db: psycopg.Connection[Any], statement: LiteralString, *parameters: Any) -> tuple[Any, ...]:
    row: tuple[Any, ...] | None = db.execute(statement, parameters).fetchone()
    assert row is not None
    return row
