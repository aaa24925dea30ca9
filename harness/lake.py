"""The lake for tests, faults and benchmarks: archivers in this process or one that is killed at a step.

    python -m harness.lake DSN STREAM [--die-after STEP] [--spark]

archives what is sealed, and kills itself with SIGKILL after the step. STEPS lists them.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import psycopg

from pgmb.lake.archive import Archived, Archiver, Sizes

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")

STEPS = ("lock", "plan", "first task", "write", "commit", "first read", "verify", "first record", "settle")
"""Where an archiver can die: when it holds the lock; after it planned, wrote a file, wrote all files, committed, read
a file back, read all back, recorded one segment, recorded all."""


class Here:
    """Runs the tasks of an archiver in this process, one after the other, and passes results as Spark does."""

    parallelism = 2

    def __call__(
        self, work: Callable[[_Task], _Result], tasks: Sequence[_Task], result: type[_Result]
    ) -> list[_Result]:
        return [msgspec.msgpack.decode(msgspec.msgpack.encode(work(task)), type=result) for task in tasks]


class Mortal(Archiver):
    """An archiver that kills its process after a step."""

    die_after: str | None = None

    def reach(self, step: str) -> None:
        if step == self.die_after:
            os.kill(os.getpid(), signal.SIGKILL)

    def lock(self, *given: Any) -> Any:
        held = super().lock(*given)
        self.reach("lock")
        return held

    def plan(self, *given: Any) -> Any:
        planned = super().plan(*given)
        self.reach("plan")
        return planned

    def write(self, *given: Any) -> Any:
        with self._dying_after("first task"):
            written = super().write(*given)
        self.reach("write")
        return written

    def commit(self, *given: Any) -> Any:
        committed = super().commit(*given)
        self.reach("commit")
        return committed

    def verify(self, *given: Any) -> Any:
        with self._dying_after("first read"):
            found = super().verify(*given)
        self.reach("verify")
        return found

    def record(self, *given: Any) -> None:
        super().record(*given)
        self.reach("first record")

    def settle(self, *given: Any, **options: Any) -> Any:
        settled = super().settle(*given, **options)
        self.reach("settle")
        return settled

    @contextmanager
    def _dying_after(self, step: str) -> Iterator[None]:
        """Dies after the first task of a step: the others are not begun."""
        run = self._run

        class First:
            parallelism = run.parallelism

            def __call__(_self, work: Any, tasks: Sequence[Any], result: Any) -> Any:  # noqa: N805
                if step == self.die_after:
                    run(work, tasks[:1], result)
                    self.reach(step)
                return run(work, tasks, result)

        self._run = First()
        try:
            yield
        finally:
            self._run = run


def fill(db: psycopg.Connection[Any], events: int, *, stream: str = "main", base: int = 0) -> None:
    """Publish events of several topics and keys: with and without key, headers and an id, large ones too."""
    db.execute(
        f"""
        insert into pgmb."log_{stream}" (id, topic, key, payload, headers)
        select case when g %% 50 = 0 then gen_random_uuid() end, 'order.' || (g %% 7),
          case when g %% 3 > 0 then 'ключ-' || g %% 11 end,
          json_build_object('n', g, 'text', repeat('é', case when g %% 97 = 0 then 2000 else g %% 20 end)),
          case when g %% 5 = 0 then json_build_object('trace', md5(g::text)) end
        from generate_series(%s::int, %s::int) g
        """.encode(),
        [base + 1, base + events],
    )


def seal(db: psycopg.Connection[Any], stream: str = "main") -> int:
    """Close the open segment and seal it: its number."""
    row = db.execute("select pgmb.rotate(%s)", [stream]).fetchone()
    assert row is not None
    assert row[0] is not None, "a transaction keeps the next segment from being opened"
    db.execute("select pgmb.seal(%s)", [stream])
    return int(row[0]) - 1


def archived(archiver: Archiver, *, repair: bool = False) -> list[Archived]:
    """Archive all that is sealed."""
    return list(archiver.archive(repair=repair))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("dsn")
    parser.add_argument("stream")
    parser.add_argument("--die-after", choices=STEPS)
    parser.add_argument("--spark", action="store_true")
    parser.add_argument("--commit-bytes", type=int, default=Sizes().commit_bytes)
    given = parser.parse_args()
    run: Any = Here()
    if given.spark:
        from pyspark.sql import SparkSession

        from pgmb.lake.spark import SparkRun

        run = SparkRun(SparkSession.builder.getOrCreate())
    archiver = Mortal(given.dsn, given.stream, run, sizes=Sizes(commit_bytes=given.commit_bytes))
    archiver.die_after = given.die_after
    for done in archiver.archive():
        print(msgspec.json.encode(done).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
