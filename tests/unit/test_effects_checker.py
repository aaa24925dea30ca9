"""The checker of the fault programs reports what it is there to report: each planted fault, and no other."""

from __future__ import annotations

import math
from uuid import UUID

import pytest

from faults.correctness.verdict import (
    Ask,
    Delivery,
    Effect,
    Ended,
    Generation,
    History,
    Published,
    Verdict,
    judge,
    superseded_at,
)

A, B, C = UUID(int=1), UUID(int=2), UUID(int=3)
LEASE = 10.0


def event(name: UUID, number: int = 0, at: float = 100.0, key: str = "k") -> Published:
    return Published(name, "q", key, number, at)


def effect(name: UUID, lease: int = 1, at: float = 102.0) -> Effect:
    return Effect(name, UUID(int=1000 + lease), at)


def delivery(name: UUID, lease: int = 1, at: float = 101.0, ended: Ended = Ended.HELD) -> Delivery:
    made = Delivery(name, UUID(int=1000 + lease), 1, at, at + LEASE, at + LEASE, ended)
    if ended is Ended.RETURNED:
        made.due_at = at + 1
    return made


def lease_of(generation: int, number: int) -> UUID:
    return UUID(f"{1:06x}{(generation << 40) + number:016x}{0:010x}")


def verdict(
    published: list[Published],
    effects: list[Effect],
    deliveries: list[Delivery],
    *,
    dead: tuple[UUID, ...] = (),
    empty: tuple[float, ...] = (),
    superseding: bool = False,
    ordered: bool = False,
    generations: tuple[Generation, ...] = (),
) -> Verdict:
    asks = [Ask(at, at + 0.001) for at in empty]
    history = History("q", deliveries, asks, superseding=superseding, generations=generations)
    history.ordered = ordered
    return judge(published, effects, dead, [history])


def test_each_event_with_one_effect_holds() -> None:
    found = verdict([event(A), event(B)], [effect(A), effect(B)], [delivery(A), delivery(B)])
    assert found.holds
    assert str(found) == ("2 events, 0 lost, 0 doubled, 0 unexplained, 0 out of order, longest stall 0.0 s")


def test_nothing_published_shows_nothing() -> None:
    assert not verdict([], [], []).holds


def test_an_event_without_effect_is_lost_unless_it_is_a_dead_letter() -> None:
    assert verdict([event(A), event(B)], [effect(A)], [delivery(A)]).lost == [B]
    assert verdict([event(A), event(B)], [effect(A)], [delivery(A)], dead=(B,)).holds


def test_a_second_effect_is_doubled_also_beside_a_dead_letter() -> None:
    twice = [delivery(A, 1), delivery(A, 2, at=130.0)]
    assert verdict([event(A)], [effect(A, 1), effect(A, 2)], twice).doubled == [A]
    assert verdict([event(A)], [effect(A, 1)], [delivery(A)], dead=(A,)).doubled == [A]


def test_an_effect_of_an_event_that_was_never_committed_is_a_phantom() -> None:
    found = verdict([event(A)], [effect(A), effect(B)], [delivery(A)])
    assert found.phantom == [B]
    assert not found.holds


@pytest.mark.parametrize(
    ("ended", "again", "explained"),
    [
        (Ended.HELD, 105.0, False),
        (Ended.HELD, 111.0, True),
        (Ended.LOST, 105.0, False),
        (Ended.LOST, 112.0, True),
        (Ended.RETURNED, 102.0, True),
        (Ended.UNKNOWN, 102.0, True),
        (Ended.SETTLED, 120.0, False),
    ],
)
def test_a_second_delivery_needs_an_expiry_a_return_or_a_kill(
    ended: Ended, again: float, explained: bool
) -> None:
    twice = [delivery(A, 1, ended=ended), delivery(A, 2, at=again)]
    found = verdict([event(A)], [effect(A, 2, at=again + 1)], twice)
    assert (found.unexplained == []) is explained


def test_a_lease_may_be_lost_early_only_where_transactions_stay_open() -> None:
    twice = [delivery(A, 1, ended=Ended.LOST), delivery(A, 2, at=103.0)]
    assert verdict([event(A)], [effect(A, 2)], twice, superseding=True).unexplained == []


@pytest.mark.parametrize(("opened", "explained"), [(102.0, True), (104.0, False)])
def test_a_lease_that_was_superseded_may_be_lost_from_then_on(opened: float, explained: bool) -> None:
    first, second = delivery(A, 1, ended=Ended.LOST), delivery(A, 2, at=103.0)
    first.lease = lease_of(generation=0, number=6)
    found = verdict(
        [event(A)],
        [effect(A, 2)],
        [first, second],
        superseding=False,
        generations=(Generation(1, 5, opened),),
    )
    assert (found.unexplained == []) is explained


@pytest.mark.parametrize(
    ("again", "ended", "superseded", "explained"),
    [
        (103.0, Ended.LOST, 103.5, True),
        (103.0, Ended.LOST, None, False),
        (105.0, Ended.LOST, 104.5, True),
        (105.0, Ended.LOST, 105.5, False),
        (105.0, Ended.LOST, None, False),
        (103.0, Ended.SETTLED, 102.0, False),
    ],
)
def test_a_settled_event_may_only_be_delivered_again_to_a_transaction_that_is_superseded(
    again: float, ended: Ended, superseded: float | None, explained: bool
) -> None:
    first, second = delivery(A, 1, ended=Ended.SETTLED), delivery(A, 2, at=again, ended=ended)
    first.settled_by = 104.0
    second.lease = lease_of(generation=1, number=7)
    opened = [Generation(1, 5, 102.0)]
    if superseded is not None:
        opened.append(Generation(2, 6, superseded))
    found = verdict([event(A)], [effect(A, 1)], [first, second], superseding=True, generations=tuple(opened))
    assert (found.unexplained == []) is explained


def test_a_lease_is_void_if_a_generation_that_counts_goes_on_from_before_it() -> None:
    first = Generation(1, 5, 101.0)
    later, second = Generation(3, (1 << 40) + 9, 103.0), Generation(2, 7, 102.0)
    assert superseded_at(lease_of(0, 6), [first]) == 101.0
    assert superseded_at(lease_of(0, 5), [first]) == math.inf
    assert superseded_at(lease_of(1, 8), [first]) == math.inf
    assert superseded_at(lease_of(1, 8), [first, second, later]) == math.inf, "the third went on from it"
    assert superseded_at(lease_of(2, 8), [first, second, later]) == 103.0, "the second counts no more"
    assert superseded_at(lease_of(0, 6), [first, second, later]) == 101.0


def test_an_effect_proves_a_settlement_whose_answer_was_lost() -> None:
    twice = [delivery(A, 1, ended=Ended.UNKNOWN), delivery(A, 2, at=130.0)]
    assert verdict([event(A)], [effect(A, 1)], twice).unexplained == [A]


def test_effects_of_a_key_in_another_order_are_reported_in_ordered_queues() -> None:
    published = [event(A, 1), event(B, 2), event(C, 1, key="other")]
    effects = [effect(B, at=102.0), effect(A, at=103.0), effect(C, at=104.0)]
    deliveries = [delivery(A), delivery(B), delivery(C)]
    assert verdict(published, effects, deliveries, ordered=True).disordered == [A]
    assert verdict(published, effects, deliveries).disordered == []


def test_an_empty_receive_while_an_event_is_deliverable_is_a_stall() -> None:
    late = [delivery(A, at=105.0)]
    assert verdict([event(A)], [effect(A, at=106.0)], late, empty=(104.0,)).longest_stall == 4.0
    # Before it was published, and after it was settled, there is nothing to receive.
    assert verdict([event(A)], [effect(A, at=106.0)], late, empty=(99.0, 200.0)).longest_stall == 0.0


def test_an_event_that_was_settled_is_not_awaited_by_a_transaction_that_was_superseded() -> None:
    settled = delivery(A, ended=Ended.SETTLED)
    settled.ended_at = 106.0
    superseded = delivery(A, 2, at=105.0, ended=Ended.LOST)
    made = [settled, superseded]
    assert verdict([event(A)], [effect(A, at=106.0)], made, empty=(200.0,)).longest_stall == 0.0
    # Until it is settled, it is.
    settled.ended_at = 130.0
    assert verdict([event(A)], [effect(A, at=130.0)], made, empty=(125.0,)).longest_stall > 2.0


def test_an_expired_lease_that_is_never_delivered_again_stalls() -> None:
    found = verdict([event(A)], [], [delivery(A)], empty=(150.0,))
    assert found.lost == [A]
    assert math.isclose(found.longest_stall, 150.0 - 111.0)


def test_in_an_ordered_queue_an_event_waits_for_those_ahead_of_it() -> None:
    published = [event(A, 1), event(B, 2)]
    first = delivery(A, 1, ended=Ended.SETTLED)
    first.ended_at = 120.0
    late = [first, delivery(B, 2, at=124.0)]
    effects = [effect(A, 1, at=120.0), effect(B, 2, at=125.0)]
    assert verdict(published, effects, late, empty=(119.0,), ordered=True).longest_stall == 0.0
    assert verdict(published, effects, late, empty=(123.0,), ordered=True).longest_stall == 3.0
