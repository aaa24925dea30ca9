"""Who handled which event of which key, from when to when; and whether that was one after another.

Each process writes down the beginning and the end of every handling, with the machine's monotonic clock. What
a process that was killed had begun ended with it.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

NEVER = 1 << 62


@dataclass(slots=True)
class Handling:
    """One delivery of the event `number` of `key`. Times are nanoseconds of the monotonic clock."""

    key: str
    number: int
    attempt: int
    began: int
    ended: int
    process: str
    finished: bool = True


class Diary:
    """What one process handles, a line a call: a kill leaves nothing behind but perhaps a torn last line."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def begin(self, key: str, number: int, attempt: int) -> None:
        os.write(self._file, f"b {key} {number} {attempt} {time.monotonic_ns()}\n".encode())

    def end(self, key: str, number: int, attempt: int) -> None:
        os.write(self._file, f"e {key} {number} {attempt} {time.monotonic_ns()}\n".encode())


def read(path: Path, killed_at: int | None = None) -> list[Handling]:
    """What a diary says; unfinished handlings ended when the process was killed."""
    handled: list[Handling] = []
    open_ones: dict[tuple[str, int, int], Handling] = {}
    for line in path.read_bytes().split(b"\n")[:-1]:
        kind, key, number, attempt, at = line.decode().split(" ")
        which = (key, int(number), int(attempt))
        if kind == "b":
            begun = Handling(*which, int(at), killed_at or NEVER, path.name, finished=False)
            handled.append(begun)
            open_ones[which] = begun
        else:
            done = open_ones.pop(which)
            done.ended, done.finished = int(at), True
    return handled


@dataclass(frozen=True, slots=True)
class Verdict:
    events: int
    lost: int
    repeated: int
    """Handled more than once: what a killed process held."""
    disordered: int
    """First deliveries that came after one that was published later under the same key."""
    overlapping: int
    """Handled while another process handled one of the same key, and no lease had expired."""
    explained: int
    """The same, but the lease of the earlier one had expired: its event was delivered again."""

    @property
    def ordered(self) -> bool:
        return not (self.disordered or self.overlapping)

    def __str__(self) -> str:
        return (
            f"{self.events} events, {self.lost} lost, {self.repeated} again, {self.disordered} out of order, "
            f"{self.overlapping} at once ({self.explained} explained by expiry)"
        )


def judge(handled: Iterable[Handling], published: Mapping[str, Collection[int]]) -> Verdict:
    """Numbers rise along each key in the order of publishing."""
    of_key: dict[str, list[Handling]] = defaultdict(list)
    for one in handled:
        of_key[one.key].append(one)
    lost = repeated = disordered = overlapping = explained = 0
    for key, numbers in published.items():
        handlings = sorted(of_key[key], key=lambda one: one.began)
        seen: set[int] = set()
        highest = -1
        latest: Handling | None = None
        finished = {one.number for one in handlings if one.finished}
        last_attempt: dict[int, int] = {}
        for one in handlings:
            last_attempt[one.number] = max(one.attempt, last_attempt.get(one.number, 0))
        for one in handlings:
            if one.number in seen:
                repeated += 1
            else:
                seen.add(one.number)
                disordered += one.number < highest
                highest = max(highest, one.number)
            if latest is not None and latest.process != one.process and one.began < latest.ended:
                if last_attempt[latest.number] > latest.attempt:
                    explained += 1
                else:
                    overlapping += 1
            if latest is None or one.ended > latest.ended:
                latest = one
        lost += len(set(numbers) - finished)
    events = sum(len(numbers) for numbers in published.values())
    return Verdict(events, lost, repeated, disordered, overlapping, explained)


def seconds_between(handled: Iterable[Handling]) -> float:
    """From the first beginning to the end, the first time, of the event that was last."""
    first_end: dict[tuple[str, int], int] = {}
    began = NEVER
    for one in handled:
        began = min(began, one.began)
        which = (one.key, one.number)
        if one.finished:
            first_end[which] = min(one.ended, first_end.get(which, NEVER))
    return (max(first_end.values()) - began) / 1e9
