"""The parts of server-sent events that do no I/O, held against what the rest of the product says."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgmb._core.patterns import matches
from pgmb.errors import InvalidArgument
from pgmb.server.limits import Limits
from pgmb.server.sse.connection import Reader
from pgmb.server.sse.frames import ResumeToken, event_frame
from pgmb.server.sse.history import Batches, Recent, Tick
from pgmb.server.sse.matching import Entry, EventFields, Interest, ReaderIndex, TopicTrie
from pgmb.types import Event, Position, Source

WORDS = st.sampled_from(["a", "b", "", "ab"])
WILD = st.one_of(WORDS, st.sampled_from(["*", "#"]))
PATTERNS = st.lists(WILD, min_size=1, max_size=5).map(".".join).filter(bool)
TOPICS = st.lists(WORDS, min_size=1, max_size=5).map(".".join)
VALUES = st.sampled_from([0, 1, 1.0, True, False, None, "1", "", "x"])


def event(seq: int, topic: str = "t", payload: Any = None, key: str | None = None) -> Event:
    return Event(seq, b"\0" * 16, topic, key, msgspec.json.encode(payload), None, 0, 1, Source("main", 0))


@given(st.lists(PATTERNS, max_size=8), TOPICS)
def test_the_tree_agrees_with_the_patterns(patterns: list[str], topic: str) -> None:
    tree: TopicTrie[str] = TopicTrie()
    for pattern in patterns:
        tree.add(pattern, pattern)
    assert tree.matching(topic) == {pattern for pattern in patterns if matches(pattern, topic)}
    for pattern in set(patterns):
        tree.remove(pattern, pattern)
    assert tree.matching(topic) == set()
    assert not tree._root.below, "nothing is left behind"


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.lists(PATTERNS, max_size=2), st.none() | VALUES, st.booleans()), max_size=10),
    TOPICS,
    VALUES,
)
def test_the_index_finds_those_who_ask(
    asked: list[tuple[list[str], Any, bool]], topic: str, value: Any
) -> None:
    index: ReaderIndex[int] = ReaderIndex()
    interests = [
        Interest.of(patterns, {"payload": {"v": wanted}} if fields else None)
        for patterns, wanted, fields in asked
    ]
    for number, interest in enumerate(interests):
        index.add(number, interest)
    came = event(1, topic, {"v": value})
    document = EventFields(came)
    found = [reader for readers in index.matching(came, document) for reader in readers]
    assert sorted(found) == [n for n, one in enumerate(interests) if one.matches(came, document)]
    for number, interest in enumerate(interests):
        index.remove(number, interest)
        index.remove(number, interest)
    assert not index._shapes


@pytest.mark.parametrize(
    ("wanted", "given", "equal"),
    [
        (1, 1.0, True),
        (1, True, False),
        (True, True, True),
        (None, None, True),
        ("1", 1, False),
        (0.1, 0.1, True),
        (9007199254740993, 9007199254740992, False),
        ("a", ["a"], False),
    ],
)
def test_values_are_equal_as_the_database_has_it(wanted: Any, given: Any, equal: bool) -> None:
    interest = Interest.of(equals={"payload": {"v": wanted}})
    came = event(1, "t", {"v": given})
    assert interest.matches(came, EventFields(came)) is equal
    nothing = event(1, "t", {})
    assert not interest.matches(nothing, EventFields(nothing))


@pytest.mark.parametrize(
    "equals",
    [{}, {"other": 1}, {"topic": 1}, {"payload": 1}, {"payload": {}}, {"payload": {"a": [1]}}, {"key": 1}],
    ids=str,
)
def test_what_are_not_fields_is_refused(equals: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        Interest.of(equals=equals)


@given(st.integers(0, 2**31), *[st.integers(0, 2**63 - 1)] * 3, st.integers(0, 2**32 - 1))
def test_a_mark_comes_back_as_it_went(epoch: int, done: int, batch: int, seq: int, check: int) -> None:
    token = ResumeToken(epoch, done, batch, seq, check)
    assert ResumeToken.parse(str(token)) == token


@given(st.text(max_size=60))
def test_what_is_no_mark_is_none(text: str) -> None:
    parsed = ResumeToken.parse(text)
    assert parsed is None or max(parsed) < 2**63


@given(st.binary(max_size=80), st.text(max_size=40), st.text(max_size=40))
def test_a_frame_holds_one_event(data: bytes, id: str, name: str) -> None:
    written = event_frame(data, id=id, event=name)
    assert written.endswith(b"\n\n")
    assert b"\r" not in written
    assert b"\n\n" not in written[:-1]
    fields = [line.partition(b": ")[0] for line in written[:-2].split(b"\n")]
    assert fields[:2] == [b"id", b"event"]
    assert set(fields[2:]) == {b"data"}


def tick(number: int, proof: int = 0) -> Tick:
    position = Position(1, 5, number, proof or number << 40 | number, f"{number}:{number}:", 0, 3)
    return Tick(number, None, position)


def test_memory_gives_what_was_missed_or_says_that_it_cannot() -> None:
    batches = Batches(tick(10), most=4)
    recent, passing = Recent(batches), Recent(batches)
    everything = Interest.of()

    def since(epoch: int, done: int, batch: int, seq: int = 0, memory: Recent = recent) -> list[int] | None:
        token = tick(done).token(tick(batch), seq)._replace(epoch=epoch)
        found = memory.since(token, everything)
        return None if found is None else [entry.event.seq for entry in found]

    def read(*seqs: int) -> list[Entry]:
        current = batches.current
        assert current is not None
        entries = [Entry(event(seq), current.token._replace(seq=seq)) for seq in seqs]
        batches.add(entries)
        recent.add(entries, batches.end)
        return entries

    def place(memory: Recent = recent) -> tuple[int, ...]:
        return batches.place(memory.end)[1][:4]

    assert place() == (1, 10, 10, 0)
    batches.begin(tick(11))
    assert since(1, 10, 11, 5) is None, "it is ahead of what was read here"
    read(1, 2)
    assert place() == (1, 10, 11, 2)
    assert since(1, 10, 10) == [1, 2]
    assert since(1, 10, 11, 1) == [2]
    assert since(1, 10, 11, 2) == []
    batches.complete()
    assert place() == (1, 11, 11, 0)
    assert place(passing) == (1, 10, 10, 0)
    assert since(1, 10, 10, memory=passing) == []
    assert since(1, 10, 11, 1, memory=passing) is None, "this filter was not asked about the first event"
    passing.add([], 1)
    assert place(passing) == (1, 10, 11, 1)
    assert since(1, 10, 11, 7) == []
    batches.begin(tick(12))
    passing.add(read(3, 4)[:1], 3)
    batches.complete()
    assert since(1, 10, 11, 1) == [2, 3, 4]
    assert since(1, 11, 11) == [3, 4]
    assert since(1, 10, 10, memory=passing) == [3]
    assert since(1, 11, 12, 3, memory=passing) == []
    assert since(1, 12, 12, memory=passing) is None, "this filter was not asked about the last event"
    assert since(1, 10, 12, 1) is None, "another process read these together"
    assert since(2, 11, 11) is None
    batches.begin(tick(13))
    read(5)
    batches.complete()
    read_on = batches.first
    assert since(1, 10, 11, 1) is None, "the oldest are gone"
    assert since(1, 11, 11) == [3, 4, 5]
    assert since(1, 13, 13) == []
    assert read_on == 2
    assert recent.since(tick(13, proof=1).token(), everything) is None, "a tick of that number was lost"
    assert recent.since(tick(11, proof=1).token(tick(12)), everything) is None


async def test_what_waits_for_a_reader_is_bounded() -> None:
    reader = Reader(Interest.of(), False, Limits(pending_events=10, pending_bytes=1000))
    for _ in range(10):
        reader.give(b"x", 1)
        reader.wake()
    assert reader.take() == b"x" * 10
    for _ in range(11):
        reader.give(b"x", 1)
        reader.wake()
    assert (reader.dropped, reader.ended, reader.pending) == (True, True, 0)
    await asyncio.wait_for(reader.wait(), 1)
    large = Reader(Interest.of(), False, Limits(pending_events=10, pending_bytes=1000))
    large.give(b"x" * 5000, 1)
    large.wake()
    assert not large.dropped, "an event of any size is delivered"
    large.give(b"x", 1)
    large.wake()
    assert large.dropped
