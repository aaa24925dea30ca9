"""A bar on the terminal while Spark works: tasks that are done, of those it knows of."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

_EVERY = 0.2


@contextmanager
def progress(spark: SparkSession, doing: str) -> Generator[None]:
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f} tasks"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    ended = threading.Event()
    watching = threading.Thread(target=_watch, args=(spark.sparkContext, bar, doing, ended), daemon=True)
    with bar:
        watching.start()
        try:
            yield
        finally:
            ended.set()
            watching.join(10)


def _watch(context: SparkContext, bar: Progress, doing: str, ended: threading.Event) -> None:
    tracker = context.statusTracker()
    shown = bar.add_task(doing, total=0)
    seen: dict[int, tuple[int, int]] = {}
    while not ended.wait(_EVERY):
        # A stage that ended between two looks had done all that it had.
        seen = {stage: (tasks, tasks) for stage, (_, tasks) in seen.items()}
        for stage in tracker.getActiveStageIds():
            told = tracker.getStageInfo(stage)
            if told is not None:
                seen[stage] = (told.numCompletedTasks, told.numTasks)
        done, tasks = (sum(counts) for counts in zip(*seen.values(), strict=True)) if seen else (0, 0)
        bar.update(shown, completed=done, total=tasks)
