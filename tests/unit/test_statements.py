"""Statements, batches and values: what is decided without a database."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgmb import InvalidArgument, NewEvent, Position
from pgmb._core import batch, statements, wire

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=5,
)


def test_a_call_names_what_is_given_and_leaves_the_rest_to_sql() -> None:
    statement = statements.call("pause", queue="q", reason=None)
    assert statement == ('select pgmb.pause("queue" => %s::text)', ("q",))
    assert statements.call("maintain") == ("select pgmb.maintain()", ())


def test_durations_are_timedeltas_or_seconds() -> None:
    assert statements.interval(1.5) == timedelta(seconds=1.5)
    assert statements.interval(timedelta(hours=1)) == timedelta(hours=1)
    assert statements.interval(None) is None
    assert statements.call("extend", lease_for=3).parameters == (timedelta(seconds=3),)


def test_a_time_needs_a_time_zone() -> None:
    assert statements.aware(datetime(2030, 1, 1, tzinfo=UTC)) is not None
    with pytest.raises(InvalidArgument):
        statements.aware(datetime(2030, 1, 1))  # noqa: DTZ001


@pytest.mark.parametrize(
    ("alone", "ack", "durable"),
    [(True, None, False), (True, UUID(int=1), True), (False, None, True), (False, UUID(int=1), True)],
)
def test_only_a_claim_alone_need_not_wait_for_the_disk(alone: bool, ack: UUID | None, durable: bool) -> None:
    assert statements.receive("q", 1, None, ack, alone=alone).parameters[-1] is durable


def test_what_a_lease_settles() -> None:
    assert statements.seqs_of(None) is None
    assert statements.seqs_of([]) == []
    assert statements.seqs_of(iter([3, 4])) == [3, 4]


@pytest.mark.parametrize(
    "text", ['(1,5,7,9,"10:20:11,12",5,21)', '(1,5,0,0,"3:3:",0,3)', '(2,5,7,9,"743:743:",10007,743)']
)
def test_positions_are_read_and_written(text: str) -> None:
    assert str(Position.parse(text)) == text


@pytest.mark.parametrize("text", ["", "(1,2)", '(1,5,7,9,"a:b:",1,2)', '(1,"10:20:",5,21,0/1A2B)', "null"])
def test_what_is_no_position_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="invalid position"):
        Position.parse(text)


@given(st.lists(JSON))
def test_all_at_once_is_encoded_as_one_by_one(values: list[object]) -> None:
    assert wire.encode_all(values) == [msgspec.json.encode(value) for value in values]


@given(st.lists(st.sampled_from([b"1", b"\n1", b"[1,\n\n2]"]).map(msgspec.Raw)))
def test_raw_json_may_have_newlines(values: list[msgspec.Raw]) -> None:
    assert wire.encode_all(values) == [bytes(value) for value in values]


def test_few_go_as_arrays_and_many_are_copied() -> None:
    few = batch.plan("a", range(batch.BLOCK_EVENTS), None, "main")
    assert isinstance(few, statements.Statement)
    many = batch.plan("a", iter(range(batch.BLOCK_EVENTS + 1)), None, "main")
    assert isinstance(many, batch.Copy)
    assert len(list(many.data)) == 4  # header, two blocks, trailer


@pytest.mark.parametrize("events", [False, True])
def test_an_iterator_is_read_ahead_by_bytes(monkeypatch: pytest.MonkeyPatch, events: bool) -> None:
    """However large its events are: it is never in memory as a whole."""
    monkeypatch.setattr(wire, "BATCH_BYTES", 1 << 20)
    monkeypatch.setattr(batch, "_ENCODED_BYTES", 1 << 17)
    size, taken = 10_000, 0

    def given() -> Iterator[Any]:
        nonlocal taken
        for _ in range(1000):
            taken += size
            yield NewEvent("a", "x" * size, key="k") if events else "x" * size

    plan = batch.plan(given(), None, None, "main") if events else batch.plan("a", given(), None, "main")
    copy = next(plan.steps) if isinstance(plan, batch.Parts) else plan
    assert isinstance(copy, batch.Copy)
    written = most = 0
    for data in copy.data:
        most = max(most, taken - written)
        written += len(data)
    assert taken == 1000 * size < written
    assert most < 2.5 * (1 << 20)


def test_events_that_differ_only_in_their_payload_go_with_one_topic() -> None:
    plan = batch.plan([NewEvent("a", 1), NewEvent("a", 2)], None, None, "main")
    assert isinstance(plan, statements.Statement)
    assert plan.parameters[0] == "a"
    for other in (NewEvent("b", 1), NewEvent("a", 1, key="k"), NewEvent("a", 1, headers={})):
        plan = batch.plan([NewEvent("a", 1), other], None, None, "main")
        assert isinstance(plan, statements.Statement)
        assert isinstance(plan.parameters[0], wire.TextArray)


def test_streams_are_quoted_in_copy() -> None:
    copy = batch.plan("a", range(batch.BLOCK_EVENTS + 1), None, 'x" ; drop')
    assert isinstance(copy, batch.Copy)
    assert copy.text.as_string(None).startswith('copy "pgmb"."log_x"" ; drop" (')


@pytest.mark.parametrize("nonsense", ["soon", float("nan"), float("inf"), [], object()])
def test_what_is_no_duration_is_refused_by_name(nonsense: Any) -> None:
    with pytest.raises(InvalidArgument, match="not a duration"):
        statements.interval(nonsense)
