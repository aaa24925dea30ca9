"""Runs coroutines on a virtual clock and lets a search choose what happens next.

Whatever a program waits for from outside, such as an answer of the database, is a gate. Once nothing can run
on its own, the search does the next action or opens one of the gates. A run is repeated from its choices, so
that all choices can be tried in turn.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from math import inf
from typing import Any

_MOST_STEPS = 2_000
"""Turns of the loop without a choice: more are a loop that waits for nothing."""
_PAUSE_SECONDS = 0.5
"""Longer sleeps are time-outs, which come last."""


class _VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock stands still until nothing else can run."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def turn(self) -> bool:
        """Run what is ready. False if nothing was."""
        ready = bool(self._ready)  # type: ignore[attr-defined]
        if ready:
            self._run_once()  # type: ignore[attr-defined]
        return ready

    def end_sleep(self, most: float) -> bool:
        """Let the shortest sleep end. False if nobody sleeps for so few seconds."""
        scheduled = [timer for timer in self._scheduled if not timer._cancelled]  # type: ignore[attr-defined]
        if not scheduled or min(timer.when() for timer in scheduled) > self.now + most:
            return False
        self.now = max(self.now, min(timer.when() for timer in scheduled))
        self._run_once()  # type: ignore[attr-defined]
        return True


class Run:
    """One run of a program under given choices."""

    def __init__(self, choices: list[int], chance: random.Random | None = None) -> None:
        self.taken: list[tuple[int, int]] = []
        """The choices, and out of how many."""
        self.story: list[str] = []
        self._choices = choices
        self._chance = chance
        self._gates: list[tuple[str, asyncio.Future[None]]] = []
        self._loop = _VirtualLoop()
        self._tasks: list[asyncio.Task[Any]] = []
        asyncio.set_event_loop(self._loop)
        asyncio.events._set_running_loop(self._loop)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        for _turn in range(_MOST_STEPS):
            if not asyncio.all_tasks(self._loop):
                break
            if not self._loop.turn():
                self._loop.end_sleep(inf)
        asyncio.events._set_running_loop(None)
        asyncio.set_event_loop(None)
        self._loop.close()

    async def gate(self, label: str) -> None:
        """Wait until the search lets this go on."""
        future = self._loop.create_future()
        self._gates.append((label, future))
        await future

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._loop.create_task(work)
        self._tasks.append(task)
        return task

    def settle(self) -> None:
        """Run until everything waits for a gate."""
        for _ in range(_MOST_STEPS):
            if not self._loop.turn() and not self._loop.end_sleep(_PAUSE_SECONDS):
                break
        else:
            raise AssertionError("a loop waits for nothing")
        self._gates = [gate for gate in self._gates if not gate[1].done()]
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error

    def choose(self, actions: list[tuple[str, Callable[[], None]]]) -> None:
        """Do the next action, which is then removed, or open a gate."""
        self.settle()
        count = len(self._gates) + bool(actions)
        place = len(self.taken)
        if place < len(self._choices):
            choice = self._choices[place]
        else:
            choice = 0 if self._chance is None else self._chance.randrange(count)
        self.taken.append((choice, count))
        if actions and choice == 0:
            label, act = actions.pop(0)
            self.story.append(label)
            act()
        else:
            label, future = self._gates.pop(choice - bool(actions))
            self.story.append(label)
            future.set_result(None)

    def open_all(self) -> None:
        """Open every gate, and let a time-out pass."""
        self.settle()
        self._loop.end_sleep(inf)
        for _, future in self._gates:
            if not future.done():
                future.set_result(None)


def schedules(
    depth: int, most: int, seed: int
) -> Iterator[tuple[list[int], random.Random | None, list[Run]]]:
    """Choices to run: all of the first `depth` in turn, then others at random, up to `most` runs in all.

    The caller appends its run to the list that it is given.
    """
    choices: list[int] = []
    runs: list[Run] = []
    tried = 0
    while tried < most // 2:
        runs.clear()
        yield choices, None, runs
        tried += 1
        taken = runs[0].taken[:depth]
        while taken and taken[-1][0] + 1 >= taken[-1][1]:
            taken.pop()
        if not taken:
            break
        choices = [choice for choice, _ in taken[:-1]] + [taken[-1][0] + 1]
    for number in range(tried, most):
        runs.clear()
        yield [], random.Random(f"{seed} {number}"), runs
