"""What a background publisher decides, against a log that fails in every way there is."""

from __future__ import annotations

from typing import Any

import psycopg
import psycopg_pool
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgmb._core import pending, wire
from pgmb._core.concurrency import LONGEST_RETRY_SECONDS
from pgmb._core.pending import Batch, Pending, made, marked, marker_key, may_have_committed, passes
from pgmb.errors import InvalidArgument, QueueFull, StreamNotFound
from pgmb.types import NewEvent

LOST = psycopg.OperationalError("the connection is lost")


class Log:
    """Takes a batch or nothing of it; keeps markers, and forgets the events' own keys at once."""

    def __init__(self, bad: set[int], most: int = 1000) -> None:
        self.bad = bad
        self.most = most
        """Larger batches lose their connection, as a proxy's limit may have it."""
        self.events: list[NewEvent] = []
        self.keys: set[str] = set()

    def publish(self, events: list[NewEvent], fault: str = "") -> None:
        if fault == "before" or len(events) > self.most:
            raise LOST
        if any(number(event) in self.bad for event in events):
            raise psycopg.errors.InvalidTextRepresentation("invalid input syntax for type json")
        assert all(event.dedup_key not in self.keys for event in events)
        self.keys |= {event.dedup_key for event in events if event.dedup_key} & set(map(marker_key, events))
        self.events += events


def number(event: NewEvent) -> int:
    return int(bytes(event.payload))


def event(payload: int, dedup_key: str | None = None) -> NewEvent:
    return made("a", payload, None, None, pending.fresh_id(), dedup_key)


def attempt(held: Pending, log: Log, batch: Batch, fault: str, now: float) -> None:
    """As the publisher does it; `fault` loses the connection before or after the commit."""
    events = [item.event for item in batch.items]
    try:
        if not batch.uncertain and all(event.dedup_key is None for event in events):
            batch.sent = True
            log.publish([marked(events[0]), *events[1:]], fault)
        elif (key := marker_key(events[0])) not in log.keys:
            batch.uncertain = False
            log.publish(events, fault)
            log.keys.add(key)
        batch.sent = True
        if fault == "after":
            raise LOST
        held.committed(batch)
    except psycopg.Error as error:
        held.refused(batch, error, now)


@settings(max_examples=120, deadline=None)
@given(
    total=st.integers(1, 60),
    max_batch=st.integers(1, 20),
    bad=st.sets(st.integers(1, 60), max_size=8),
    keyed=st.sets(st.integers(1, 60)),
    faults=st.lists(st.sampled_from(["", "", "before", "after"]), max_size=60),
    most=st.integers(1, 20),
)
def test_every_event_is_published_once_in_order_or_set_aside(
    total: int, max_batch: int, bad: set[int], keyed: set[int], faults: list[str], most: int
) -> None:
    held = Pending(0.0, max_batch, 1000)
    log = Log(bad, most)
    for one in range(1, total + 1):
        held.add(event(one, f"own:{one}" if one in keyed else None), "main", 0.0)
    mark = held.flush()
    now = 0.0
    while not held.passed(mark):
        found = held.next(now)
        if isinstance(found, Batch):
            attempt(held, log, found, faults.pop() if faults else "", now)
        else:
            assert found is not None
            now += found
    assert [number(one) for one in log.events] == [one for one in range(1, total + 1) if one not in bad]
    aside = {one for one in bad if one <= total}
    assert {number(item.event) for item in held.failed} == aside
    assert held.count == len(aside)
    # Tried once more by the next flush, and kept.
    mark = held.flush()
    while not held.passed(mark):
        found = held.next(now)
        if isinstance(found, Batch):
            attempt(held, log, found, "", now)
        else:
            assert found is not None
            now += found
    assert {number(item.event) for item in held.left(mark)} == aside
    assert {number(item.event) for item in held.discard_failed()} == aside
    assert held.count == 0


def test_a_batch_goes_by_size_or_by_time() -> None:
    held = Pending(10.0, 3, 100)
    assert held.next(0.0) is None
    assert held.add(event(1), "main", 1.0) is True
    assert held.next(1.0) == pytest.approx(10.0)
    assert held.add(event(2), "main", 2.0) is False
    assert held.add(event(3), "main", 3.0) is True
    full = held.next(3.0)
    assert isinstance(full, Batch)
    assert len(full.items) == 3
    held.committed(full)
    held.add(event(4), "main", 4.0)
    assert held.next(13.0) == pytest.approx(1.0)
    assert isinstance(held.next(14.0), Batch)


def test_a_stream_that_fails_does_not_hold_up_another() -> None:
    held = Pending(0.0, 10, 100)
    held.add(event(1), "full", 0.0)
    held.add(event(2), "main", 0.0)
    first = held.next(0.0)
    assert isinstance(first, Batch)
    assert first.stream == "full"
    held.refused(first, QueueFull("full"), 0.0)
    second = held.next(0.0)
    assert isinstance(second, Batch)
    assert second.stream == "main"
    held.committed(second)
    wait = held.next(0.0)
    assert isinstance(wait, float)
    assert 0 < wait <= pending.FIRST_PAUSE_SECONDS
    assert [item.error.args for item in held.left(2) if item.error] == [("full",)]


def test_pauses_grow_to_a_limit_and_a_flush_cuts_them_short() -> None:
    held = Pending(0.0, 10, 100)
    held.add(event(1), "main", 0.0)
    now, pauses = 0.0, []
    for _ in range(20):
        batch = held.next(now)
        assert isinstance(batch, Batch)
        held.refused(batch, LOST, now)
        wait = held.next(now)
        assert isinstance(wait, float)
        pauses.append(wait)
        now += wait
    assert pauses[0] < pauses[4] <= LONGEST_RETRY_SECONDS
    assert max(pauses) <= LONGEST_RETRY_SECONDS
    batch = held.next(now)
    assert isinstance(batch, Batch)
    held.refused(batch, LOST, now)
    held.flush()
    assert isinstance(held.next(now), Batch)


def test_what_took_too_long_goes_in_smaller_batches() -> None:
    held = Pending(0.0, 8, 100)
    for one in range(8):
        held.add(event(one), "main", 0.0)
    batch = held.next(0.0)
    assert isinstance(batch, Batch)
    held.refused(batch, psycopg.errors.QueryCanceled("statement timeout"), 0.0)
    assert held.failed == []
    held.flush()
    again = held.next(0.0)
    assert isinstance(again, Batch)
    assert [number(item.event) for item in again.items] == [0, 1, 2, 3]


def test_no_more_is_held_than_max_pending_bytes() -> None:
    held = Pending(0.0, 8, 100, max_pending_bytes=3)
    states: list[tuple[bool, bool]] = []
    for one in (10, 20):
        states.append((held.full, held.stuck))
        held.add(event(one), "main", 0.0)
    states.append((held.full, held.stuck))
    batch = held.next(0.0)
    assert isinstance(batch, Batch)
    held.refused(batch, StreamNotFound("main"), 0.0)
    states.append((held.full, held.stuck))
    held.discard_failed()
    states.append((held.full, held.stuck))
    assert states == [(False, False), (False, False), (True, False), (True, True), (False, False)]


@pytest.mark.parametrize(
    ("error", "waits", "asks"),
    [
        (LOST, True, True),
        (psycopg.errors.AdminShutdown("terminating"), True, True),
        (psycopg.errors.CannotConnectNow("starting up"), True, True),
        (psycopg_pool.PoolTimeout("no connection"), True, False),
        (psycopg.errors.DeadlockDetected("deadlock"), True, False),
        (psycopg.errors.DiskFull("disk full"), True, False),
        (psycopg.errors.ReadOnlySqlTransaction("standby"), True, False),
        (psycopg.errors.QueryCanceled("timeout"), True, False),
        (QueueFull("full"), True, False),
        (StreamNotFound("nowhere"), False, False),
        (psycopg.errors.InvalidTextRepresentation("json"), False, False),
        (psycopg.errors.InternalError_("invalid memory alloc request size"), False, False),
        (ValueError("a bug"), False, False),
    ],
)
def test_errors_are_told_apart(error: Exception, waits: bool, asks: bool) -> None:
    assert passes(error) is waits
    assert may_have_committed(error) is asks


@pytest.mark.parametrize("texts", [{"topic": 5}, {"topic": None}, {"key": b"k"}, {"dedup_key": 1}])
def test_what_is_not_text_is_refused(texts: dict[str, Any]) -> None:
    given_texts: dict[str, Any] = {"topic": "a", "key": None, "dedup_key": None, **texts}
    with pytest.raises(InvalidArgument, match=r"must be a string|needs a topic"):
        made(payload=1, headers=None, given=pending.fresh_id(), **given_texts)


def test_ids_are_version_7_and_in_the_order_of_time() -> None:
    ids = [pending.fresh_id() for _ in range(1000)]
    assert {one.version for one in ids} == {7}
    assert len(set(ids)) == 1000
    assert [one.int >> 80 for one in ids] == sorted(one.int >> 80 for one in ids)


@pytest.mark.parametrize("wrong", [{"flush_every": -1}, {"max_batch": 0}, {"max_pending": 0}])
def test_bounds_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        Pending(**{"flush_every": 1.0, "max_batch": 1, "max_pending": 1, **wrong})


@pytest.mark.parametrize("rejected", [False, True])
def test_a_batch_is_bounded_in_bytes(rejected: bool) -> None:
    """However many events wait: no message of PostgreSQL's protocol may exceed 1 GB."""
    held = Pending(0, 500, 10_000)
    large = wire.BATCH_BYTES // 4
    for _ in range(10):
        held.add(made("a", "x" * large, None, {"h": 1}, pending.fresh_id(), None), "main", 0.0)
    if rejected:
        while isinstance(batch := held.next(1.0), Batch):
            held.refused(batch, StreamNotFound("stream 'main' does not exist"), 1.0)
        assert len(held.failed) == 10
    held.flush()
    sizes: list[int] = []
    while isinstance(batch := held.next(2.0), Batch):
        sizes.append(len(batch.items))
        held.committed(batch)
    assert sizes == [3, 3, 3, 1]
    assert held.count == 0
