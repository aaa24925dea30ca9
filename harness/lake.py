"""The lake for tests, faults and benchmarks: archivers in this process or one that is killed at a step.

    python -m harness.lake DSN STREAM [--die-after STEP] [--unlocked] [--spark] [--dead | --project NAME]

archives what is sealed, or projects what is archived, and kills itself with SIGKILL after the step. STEPS
lists them.
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

from pgmb.lake.archive import Archived, Archiver, Sizes
from pgmb.lake.dead import DeadArchiver
from pgmb.lake.projection.projector import ProjectionSizes, Projector

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")

STEPS = ("lock", "plan", "first task", "write", "commit", "first read", "verify", "first record", "settle")
"""After which an archiver can die: it holds the lock, planned, wrote a part, wrote all, committed, read files
back, read all back, recorded one segment, recorded all."""


class Killed(BaseException):
    """Ends the work in place of SIGKILL, in this process: nothing of the product handles it."""


class Dying:
    """Ends after a step: kills its process, or with `here` raises Killed."""

    die_after: str | None = None
    here = False

    def reach(self, step: str) -> None:
        if step == self.die_after:
            if self.here:
                raise Killed
            os.kill(os.getpid(), signal.SIGKILL)


class Here:
    """Runs the tasks of an archiver in this process, one after the other; results pass as with Spark."""

    parallelism = 2

    def __call__(
        self, work: Callable[[_Task], _Result], tasks: Sequence[_Task], result: type[_Result]
    ) -> list[_Result]:
        return [msgspec.msgpack.decode(msgspec.msgpack.encode(work(task)), type=result) for task in tasks]


class Mortal(Dying, Archiver):
    """An archiver that ends after a step."""

    unlocked = False

    def lock(self, *given: Any) -> Any:
        held = self.unlocked or super().lock(*given)
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


DEAD_STEPS = ("plan", "write", "commit", "verify", "settle")


class MortalDead(Dying, DeadArchiver):
    """The same for dead letters."""

    def plan(self, *given: Any, **options: Any) -> Any:
        planned = super().plan(*given, **options)
        self.reach("plan")
        return planned

    def write(self, *given: Any) -> Any:
        written = super().write(*given)
        self.reach("write")
        return written

    def commit(self, *given: Any) -> Any:
        committed = super().commit(*given)
        self.reach("commit")
        return committed

    def verify(self, *given: Any) -> Any:
        found = super().verify(*given)
        self.reach("verify")
        return found

    def settle(self, *given: Any, **options: Any) -> Any:
        settled = super().settle(*given, **options)
        self.reach("settle")
        return settled


PROJECTION_STEPS = ("lock", "find", "first task", "write", "fields", "commit", "record")


class MortalProjector(Dying, Projector):
    """The same for projections."""

    unlocked = False

    def lock(self, *given: Any) -> Any:
        held = self.unlocked or super().lock(*given)
        self.reach("lock")
        return held

    def find(self, *given: Any) -> Any:
        found = super().find(*given)
        self.reach("find")
        return found

    def write(self, found: Any, parts: Any) -> Any:
        if parts and self.die_after == "first task":
            super().write(found, parts[:1])
            self.reach("first task")
        written = super().write(found, parts)
        self.reach("write")
        return written

    def record_fields(self, *given: Any) -> None:
        super().record_fields(*given)
        self.reach("fields")

    def commit(self, *given: Any, **options: Any) -> Any:
        committed = super().commit(*given, **options)
        self.reach("commit")
        return committed

    def record(self, *given: Any, **options: Any) -> Any:
        recorded = super().record(*given, **options)
        self.reach("record")
        return recorded


def archived(archiver: Archiver, *, repair: bool = False) -> list[Archived]:
    """Archive all that is sealed."""
    return list(archiver.archive(repair=repair))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("dsn")
    parser.add_argument("stream")
    parser.add_argument("--die-after", choices=sorted({*STEPS, *DEAD_STEPS, *PROJECTION_STEPS}))
    parser.add_argument("--unlocked", action="store_true", help="work although another archiver does")
    parser.add_argument("--spark", action="store_true")
    parser.add_argument("--commit-bytes", type=int, default=Sizes().commit_bytes)
    parser.add_argument("--dead", action="store_true", help="archive dead letters")
    parser.add_argument("--project", metavar="NAME", help="run a projection")
    parser.add_argument("--rebuild", action="store_true", help="from the beginning")
    given = parser.parse_args()
    if given.dead:
        dead = MortalDead(given.dsn, given.stream)
        dead.die_after = given.die_after
        for batch in dead.archive():
            print(msgspec.json.encode(batch).decode(), flush=True)
        return 0
    run: Any = Here()
    if given.spark:
        from pyspark.sql import SparkSession

        from pgmb.lake.spark import SparkRun

        run = SparkRun(SparkSession.builder.getOrCreate())
    if given.project:
        sizes = ProjectionSizes(commit_bytes=given.commit_bytes)
        projector = MortalProjector(given.dsn, given.project, run, sizes=sizes)
        projector.die_after, projector.unlocked = given.die_after, given.unlocked
        for projected in projector.run(rebuild=given.rebuild):
            print(msgspec.json.encode(projected).decode(), flush=True)
        return 0
    archiver = Mortal(given.dsn, given.stream, run, sizes=Sizes(commit_bytes=given.commit_bytes))
    archiver.die_after, archiver.unlocked = given.die_after, given.unlocked
    for done in archiver.archive():
        print(msgspec.json.encode(done).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
