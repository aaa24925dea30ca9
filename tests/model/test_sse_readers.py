"""Promise: a reader of server-sent events gets every event that passes its filter once, in any interleaving.

The protocol of a reader, as a model:

    away(token)   it has every event before its token and no other
    joining       away, and the events after the token are read: from memory, or page by page from the log
    joined        events are given to it as its tail takes them; each event and heartbeat moves its token
    dropped       what it was not yet sent is discarded; it is away(token) again, and joins any process

The model judges by tokens alone: an event was before a reader's first token, or it came exactly once. The
tails, their memory and the replay are the product's. The database is a log of events and ticks whose every
answer is a gate of the search. Two processes read it. The mutants bring back what lost events.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import msgspec
import pytest

from pgmb.server.instrumentation import Counters
from pgmb.server.limits import Limits
from pgmb.server.sse import tail as sse_tail
from pgmb.server.sse.connection import Reader
from pgmb.server.sse.frames import ResumeToken
from pgmb.server.sse.history import Batches, Page, Recent, StreamLog, Tick
from pgmb.server.sse.matching import Entry, Interest, Sieve
from pgmb.server.sse.replay import Replay
from pgmb.server.sse.tail import FilterTail, StreamTail, Tail
from pgmb.types import Event, Position, Source
from tests.model.interleaving import Run, schedules

PAGE = 2
SIEVE = Sieve("$.payload", None, None)
FRAME = re.compile(rb'id: (\S+)\n(?:data: \{[^\n]*"payload":(\d+))?')


def tick(number: int) -> Tick:
    return Tick(number, None, Position(1, 5, number, number, f"{number}:{number}:", 0, 3))


class Log:
    """A stream: the events with the ticks that showed them. Each answer is a gate."""

    stream = "main"

    def __init__(self, run: Run) -> None:
        self.run = run
        self.seen_at: dict[int, int] = {}
        """By seq, the tick that showed the event."""
        self.newest_number = 10

    def publish(self, *seqs: int) -> None:
        self.newest_number += 1
        self.seen_at.update(dict.fromkeys(seqs, self.newest_number))

    async def tick(self) -> None:
        pass

    async def newest(self) -> Tick:
        await self.run.gate("newest")
        return tick(self.newest_number)

    async def ticks(self, numbers: Iterable[int]) -> dict[int, Tick]:
        await self.run.gate("ticks")
        return {number: tick(number) for number in numbers}

    async def between(self, after: Tick, upto: Tick, seq: int) -> Page:
        await self.run.gate("page")
        found = sorted(n for n, at in self.seen_at.items() if after.number < at <= upto.number and n > seq)
        return Page([self._entry(after, upto, n) for n in found[:PAGE]], len(found) <= PAGE)

    async def passing(self, sieve: Sieve, entries: Sequence[Entry], *, costly: bool) -> set[int]:
        await self.run.gate("sieve")
        return {entry.event.seq for entry in entries if passes(entry.event.seq)}

    def _entry(self, after: Tick, upto: Tick, seq: int) -> Entry:
        payload = msgspec.json.encode(seq)
        event = Event(seq, bytes(16), "t", None, payload, None, 0, 1, Source("main", 0))
        return Entry(event, after.token(upto, seq))


def passes(seq: int) -> bool:
    return seq % 3 != 0


class News:
    """Tells of news at a gate."""

    healthy = True

    def __init__(self, run: Run) -> None:
        self._run = run

    async def wait(self, seconds: float) -> bool:
        await self._run.gate("news")
        return True

    def close(self) -> None:
        pass


class Process:
    """A server process: its tail, a filter's tail, and the replay."""

    def __init__(self, run: Run, log: Log) -> None:
        self.counts = Counters()
        self._log = cast("StreamLog", log)
        self.replay = Replay(self._log, Limits(), self.counts)
        self.stream = StreamTail(self._log, cast("Any", News(run)), self.counts)
        self.stream._begin(tick(log.newest_number))
        self.stream._task = run.spawn(self.stream._run())
        self._filter: FilterTail | None = None

    def tail(self, filtered: bool) -> Tail:
        if not filtered:
            return self.stream
        if self._filter is None or self._filter.ended:
            self._filter = FilterTail(self.stream, SIEVE, self.counts, failed=lambda *_: None)
        return self._filter


class Client:
    """A client: its token, what it got, and the connection it has."""

    def __init__(self, run: Run, filtered: bool) -> None:
        self.run = run
        self.filtered = filtered
        self.first: ResumeToken | None = None
        self.token: ResumeToken | None = None
        self.got: list[int] = []
        self._reader: Reader | None = None
        self._tail: Tail | None = None
        self._task: asyncio.Task[None] | None = None

    def connect(self, process: Process) -> None:
        """Leave, and come to a process with the last token."""
        if self._task is not None:
            self._task.cancel()
            self._leave()
        self._task = self.run.spawn(self._live(process))

    def heartbeat(self) -> None:
        if self._tail is not None and not self._tail.ended:
            self.run.spawn(self._tail.heartbeat(0, 1))

    def _leave(self) -> None:
        if self._tail is not None and self._reader is not None:
            self._tail.leave(self._reader)

    async def _live(self, process: Process) -> None:
        while True:
            tail = self._tail = process.tail(self.filtered)
            reader = self._reader = Reader(Interest.of(), False, Limits())
            if self.token is None:
                tail.join(reader)
                self.first = self.token = tail.token
            else:
                async for entries in process.replay.catch_up(tail, reader, self.token):
                    await self.run.gate("send")
                    for entry in entries:
                        self._note(entry.frame(False))
            while not reader.ended:
                reader.heartbeat_seen = False
                await reader.wait()
                while reader.pending:
                    self._note(reader.take())
            self._leave()

    def _note(self, frames: bytes) -> None:
        for id, payload in FRAME.findall(frames):
            self.token = ResumeToken.parse(id.decode())
            if payload:
                self.got.append(int(payload))

    def expected(self, log: Log) -> list[int]:
        """The events that its first token does not cover."""
        token = self.first
        assert token is not None
        return sorted(
            seq
            for seq, at in log.seen_at.items()
            if (at > token.to_tick or (at > token.from_tick and seq > token.seq))
            and (passes(seq) or not self.filtered)
        )


def play(run: Run) -> None:
    """One story: two filtered clients and a plain one, two processes, late commits, cuts, a long batch."""
    log = Log(run)
    log.publish(1)
    one, two = Process(run, log), Process(run, log)
    stays, moves, plain = (Client(run, filtered) for filtered in (True, True, False))
    actions: list[tuple[str, Callable[[], None]]] = [
        ("stays: connect", lambda: stays.connect(one)),
        ("moves: connect", lambda: moves.connect(two)),
        ("publish 4, 5, 6, 8, 9", lambda: log.publish(4, 5, 6, 8, 9)),
        ("moves: to the other", lambda: moves.connect(one)),
        ("plain: connect", lambda: plain.connect(one)),
        ("heartbeat", moves.heartbeat),
        ("publish 2, 10 to 13", lambda: log.publish(2, 10, 11, 12, 13)),
        ("moves: back", lambda: moves.connect(two)),
        ("plain: to the other", lambda: plain.connect(two)),
        ("publish 7, 14", lambda: log.publish(7, 14)),
        ("moves: back", lambda: moves.connect(two)),
        ("heartbeat", stays.heartbeat),
        ("publish 3, 15, 16", lambda: log.publish(3, 15, 16)),
        ("moves: to the other", lambda: moves.connect(one)),
    ]
    while actions:
        run.choose(actions)
    for _ in range(60):
        run.open_all()
    for client in (stays, moves, plain):
        assert sorted(client.got) == client.expected(log)


def search(most: int, depth: int = 5, seed: int = 1) -> int:
    """How many different stories were played."""
    stories: set[tuple[str, ...]] = set()
    for choices, chance, runs in schedules(depth, most, seed):
        with Run(choices, chance) as run:
            runs.append(run)
            try:
                play(run)
            except AssertionError as error:
                raise AssertionError(f"{error}\nafter: {', '.join(run.story)}") from None
            stories.add(tuple(run.story))
    return len(stories)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of two events, a memory of a few, and parts of one."""
    monkeypatch.setattr(sse_tail, "PAGE", PAGE)
    monkeypatch.setattr(sse_tail, "Batches", partial(Batches, most=6))


def test_every_reader_gets_every_event_once_however_steps_interleave() -> None:
    assert search(120) > 60


@pytest.mark.minutes
def test_every_reader_gets_every_event_once_in_many_interleavings() -> None:
    assert search(20_000, depth=9) > 10_000


def _joins_before_its_place(recent: Recent, token: ResumeToken, interest: Interest) -> list[Entry] | None:
    """Memory is taken to hold what the filter was not asked about."""
    number = recent.batches.find(token)
    return None if number is None else recent.after(number, 1 << 30)


async def _forgets_its_readers(tail: Tail, entries: Sequence[Entry], end: int) -> None:
    """Who joins while a page is on its way gets it neither from memory nor from the tail."""
    readers = set(tail.readers)
    await asyncio.sleep(0)
    tail._move(*tail._recent.batches.place(end))
    for reader in readers & tail.readers:
        for entry in entries:
            reader.give(entry.frame(False), 1)
        reader.wake()
    tail._recent.add(entries, end)


def _finds_what_is_ahead(batches: Batches, token: ResumeToken) -> int | None:
    """A token that another process read further is taken for the end."""
    with contextlib.suppress(KeyError):
        batch = batches._starting[token._replace(seq=0)]
        return batch.first + sum(seq <= token.seq for seq in batch.seqs)
    return batches.end if token._replace(seq=0) == batches.at.token() else None


@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    [
        (Recent, "since", _joins_before_its_place),
        (Tail, "_take", _forgets_its_readers),
        (Batches, "find", _finds_what_is_ahead),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_search_finds_what_loses_events(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, mutant: Any
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(AssertionError):
        search(1500, depth=0)
