"""Ordered queues: events of one key one after another, keys in parallel, whatever happens to a lease.

Promises: per key, first deliveries come in the order of publishing; while a lease holds an event of a key, no
other lease holds one; what fails goes before what waits behind it; nothing is lost, nothing settled returns.
"""

from __future__ import annotations

import time

import pytest

from harness.sessions import Sessions
from harness.states import date_releases, make_due, queue_number, take_snapshot
from tests.contract.deliveries import Consumer, lost

PATIENCE = 0.12


@pytest.fixture
def one(sessions: Sessions) -> Consumer:
    sessions["admin"].run(
        "select pgmb.create_queue('q', ordered => true, shards => 1, max_attempts => 3, backoff_jitter => 0)"
    )
    return Consumer(sessions["one"], patience=PATIENCE)


@pytest.fixture
def two(one: Consumer, sessions: Sessions) -> Consumer:
    return Consumer(sessions["two"], patience=PATIENCE)


def test_a_key_waits_while_a_lease_holds_it_and_others_go_on(one: Consumer, two: Consumer) -> None:
    one.publish("a", 1, 2)
    first = one.receive(1)
    one.publish("b", 3)
    one.publish("a", 4)
    one.publish(None, 5)
    assert two.names() == [3, 5]
    assert two.names() == []
    one.ack(first)
    assert two.names() == [2, 4]


def test_a_lease_may_hold_several_events_of_a_key_in_order(one: Consumer, two: Consumer) -> None:
    one.publish("a", 1, 2, 3)
    assert one.names() == [1, 2, 3]


def test_events_without_a_key_wait_for_nobody(one: Consumer, two: Consumer) -> None:
    one.publish(None, 1, 2, 3)
    assert one.names(1) == [1]
    assert two.names(1) == [2]
    assert one.names(1) == [3]


def test_an_empty_key_is_a_key(one: Consumer, two: Consumer) -> None:
    one.publish("", 1, 2)
    held = one.receive(1)
    assert two.names() == []
    one.ack(held)
    assert two.names() == [2]


def test_a_retry_goes_before_what_waits_behind_it(one: Consumer, two: Consumer) -> None:
    one.publish("a", 1, 2, 3)
    held = one.receive(2)
    assert two.names() == []
    assert one.retry(held, 1, after="1 hour") == 1
    assert one.ack(held) == 0, "what lies behind the retried one went back too"
    assert two.names() == []
    make_due(one.session.connection)
    got = two.receive()
    assert got.names == [1, 2, 3]
    assert got.attempts == {1: 2, 2: 1, 3: 1}, "those behind were not tried"


def test_a_retry_that_a_scan_for_due_rows_has_passed_keeps_its_place(one: Consumer, two: Consumer) -> None:
    """Its transaction may have committed long after the time that it wrote (docs/adr/0039)."""
    one.publish("a", 1)
    one.retry(one.receive(1), after="0")
    one.publish("a", 2)
    one.publish("b", 3)
    # The first scan after a multiple of 2, 4, 8 ... seconds starts 4, 8, 16 ... seconds before the stored
    # start: from one a century ahead, no scan reaches back to the retry.
    two.session.run(
        "select set_config(%s, concat_ws(' ', at + 60000000, 60000000, at + 3153600000000000, at), false)"
        " from pgmb_internal.microseconds(clock_timestamp()) at",
        [f"pgmb.retry_{queue_number(two.session)}"],
    )
    assert two.names() == [3]
    assert one.names() == [1, 2]


def test_what_comes_before_a_retried_event_stays_with_the_lease(one: Consumer, two: Consumer) -> None:
    one.publish("a", 1, 2, 3)
    held = one.receive()
    one.retry(held, 2)
    assert two.names() == [], "the lease still holds the key"
    assert one.ack(held) == 1
    assert two.names() == [2, 3]


def test_a_retried_event_in_a_retried_lease_takes_those_behind_along(one: Consumer, two: Consumer) -> None:
    one.publish("a", 1, 2, 3)
    one.publish("b", 11, 12)
    one.release(one.receive())
    held = one.receive()
    assert held.names == [1, 2, 3, 11, 12]
    assert one.retry(held, 2, after="1 hour") == 1
    assert two.names() == [], "1 is still held, and 11"
    assert one.ack(held) == 3
    make_due(one.session.connection)
    assert two.receive().attempts == {2: 2, 3: 1}


def test_expiry_takes_back_all_keys_of_a_lease(one: Consumer, two: Consumer) -> None:
    one.publish("a", 1, 2)
    one.publish("b", 3)
    held = one.receive()
    one.publish("a", 4)
    one.publish("b", 5)
    assert two.names() == []
    one.expire(held)
    got = two.receive()
    assert got.names == [1, 2, 3, 4, 5]
    assert got.attempts == {1: 2, 2: 2, 3: 2, 4: 1, 5: 1}
    with lost():
        one.ack(held)


def test_expiry_of_a_lease_settled_in_part(one: Consumer, two: Consumer) -> None:
    one.publish("a", 1, 2, 3)
    held = one.receive()
    one.ack(held, 1)
    one.expire(held)
    assert two.receive().attempts == {2: 2, 3: 2}


def test_a_lease_settled_event_by_event_frees_its_keys(one: Consumer, two: Consumer) -> None:
    one.publish("a", 1, 2)
    held = one.receive()
    one.publish("a", 3)
    one.ack(held, 1)
    assert two.names() == []
    one.ack(held, 2)
    assert two.names() == [3]


def test_bury_lets_the_next_of_the_key_go_on(one: Consumer, two: Consumer) -> None:
    one.publish("a", 1, 2, 3)
    held = one.receive(2)
    one.publish("a", 4)
    one.bury(held, 1, error="broken")
    assert one.ack(held) == 1, "2 stays with the lease"
    assert two.take_all() == [3, 4]
    assert one.dead() == [(1, 1)]


def test_the_last_attempt_ends_and_the_next_of_the_key_goes_on(one: Consumer, two: Consumer) -> None:
    one.publish("a", 1, 2, 3)
    for attempt in (1, 2, 3):
        held = one.receive(1)
        assert held.attempts == {1: attempt}
        one.retry(held, after="0", error="no")
    assert one.dead() == [(1, 3)]
    assert two.names() == [2, 3]


def test_the_last_attempt_gives_back_what_the_lease_holds_behind_it(one: Consumer, two: Consumer) -> None:
    one.publish("a", 1, 2)
    one.retry(one.receive(), 1)
    one.retry(one.receive(), 1)
    third = one.receive()
    assert third.attempts == {1: 3, 2: 1}
    assert one.retry(third, 1) == 1
    assert one.dead() == [(1, 3)]
    assert one.ack(third) == 0
    assert two.names() == [2]


def test_a_release_that_waits_keeps_the_order_of_its_key(one: Consumer, two: Consumer) -> None:
    one.publish("a", 1, 2)
    one.publish("b", 3)
    held = one.receive()
    one.release(held, 1, after="0.3 seconds", bury_after="1 day")
    assert one.ack(held, 3) == 1
    assert two.names() == []
    one.session.run("select pg_sleep(0.2)")
    again = one.receive()
    assert again.attempts == {1: 1, 2: 1}
    date_releases(one.session, "1 day")
    assert one.release(again, 1, after="1 second", bury_after="1 day") == 1
    assert one.dead() == [(1, 1)]
    assert two.names() == [2]


def test_the_last_attempt_ends_by_expiry_and_the_next_of_the_key_goes_on(
    one: Consumer, two: Consumer
) -> None:
    one.publish("a", 1)
    for attempt in (1, 2, 3):
        held = one.receive()
        assert held.attempts == {1: attempt}
        if attempt == 1:
            one.publish("a", 2)
        one.expire(held)
    assert two.names() == [2]
    assert one.dead() == [(1, 3)]


def test_one_attempt_only(sessions: Sessions) -> None:
    sessions["admin"].run("select pgmb.create_queue('q', ordered => true, shards => 1, max_attempts => 1)")
    one, two = (Consumer(sessions[name], patience=PATIENCE) for name in ("one", "two"))
    one.publish("a", 1, 2)
    held = one.receive(1)
    assert two.names() == []
    one.expire(held)
    assert two.names() == [2]
    assert one.dead() == [(1, 1)]


def test_release_gives_back_in_order_and_untried(one: Consumer, two: Consumer) -> None:
    one.publish("a", 1, 2, 3)
    held = one.receive(2)
    assert one.release(held) == 2
    got = two.receive()
    assert got.attempts == {1: 1, 2: 1}
    two.ack(got)
    assert two.names() == [3]


def test_release_of_one_event_takes_those_behind_along(one: Consumer, two: Consumer) -> None:
    one.publish("a", 1, 2, 3)
    held = one.receive()
    assert one.release(held, 2) == 1
    assert one.ack(held) == 1
    got = two.receive()
    assert got.names == [2, 3]
    assert set(got.attempts.values()) == {1}


def test_a_late_commit_comes_after_what_was_delivered(
    one: Consumer, two: Consumer, sessions: Sessions
) -> None:
    late = Consumer(sessions["late"])
    late.session.run("begin")
    late.publish("a", 1)
    one.publish("a", 2)
    held = one.receive()
    assert held.names == [2]
    late.session.run("commit")
    one.publish("a", 3)
    assert two.names() == [], "the late one waits for its key as well"
    one.expire(held)
    got = two.receive()
    assert got.names == [2, 1, 3], "what was delivered first stays first, then by number"
    assert got.attempts == {2: 2, 1: 1, 3: 1}


def test_a_late_commit_parked_behind_a_retry(one: Consumer, two: Consumer, sessions: Sessions) -> None:
    late = Consumer(sessions["late"])
    late.session.run("begin")
    late.publish("a", 1)
    one.publish("a", 2, 3)
    held = one.receive(1)
    late.session.run("commit")
    one.retry(held, after="1 hour")
    assert two.names() == []
    make_due(one.session.connection)
    first, *rest = two.names()
    assert first == 2
    assert sorted(rest) == [1, 3], "neither was delivered before: their transactions ran at the same time"


def test_an_ack_in_an_open_transaction_keeps_the_key(one: Consumer, two: Consumer) -> None:
    one.publish("a", 1, 2)
    held = one.receive(1)
    one.session.run("begin")
    one.ack(held)
    assert two.names() == []
    one.session.run("commit")
    assert two.names() == [2]


def test_an_ack_rolled_back_keeps_the_key(one: Consumer, two: Consumer) -> None:
    one.publish("a", 1, 2)
    held = one.receive(1)
    one.session.run("begin")
    one.ack(held)
    one.session.run("rollback")
    assert two.names() == []
    one.expire(held)
    assert two.names() == [1, 2]


def test_an_ack_of_a_retried_event_in_an_open_transaction(one: Consumer, two: Consumer) -> None:
    """What is parked meanwhile comes as soon as the transaction has ended, not when the lease would have."""
    one.publish("a", 1)
    one.release(one.receive())
    held = one.receive()
    one.session.run("begin")
    one.ack(held)
    two.publish("a", 2, 3)
    assert two.names() == []
    assert two.names() == []
    one.session.run("commit")
    assert two.names() == [2, 3]


def test_an_ack_in_repeatable_read(one: Consumer, two: Consumer) -> None:
    one.publish("a", 1, 2)
    held = one.receive(1)
    one.session.run("begin isolation level repeatable read")
    take_snapshot(one.session)
    assert two.names() == [], "2 is parked after the snapshot was taken"
    assert one.ack(held) == 1
    one.session.run("commit")
    assert two.names() == [2]


def test_a_retry_in_repeatable_read(one: Consumer, two: Consumer) -> None:
    one.publish("a", 1, 2)
    held = one.receive(1)
    one.session.run("begin isolation level repeatable read")
    take_snapshot(one.session)
    assert two.names() == []
    one.retry(held)
    one.session.run("commit")
    got = two.receive()
    assert got.names == [1, 2]


def test_a_dead_letter_sent_back_waits_for_the_lease_of_its_key(one: Consumer, two: Consumer) -> None:
    one.publish("a", 1)
    one.bury(one.receive())
    one.publish("a", 2)
    held = one.receive()
    one.session.run("select pgmb.redrive('q')")
    assert two.names() == []
    one.ack(held)
    assert two.receive().attempts == {1: 1}


def test_a_dead_letter_sent_back_waits_for_a_retried_lease_too(one: Consumer, two: Consumer) -> None:
    one.publish("a", 1)
    one.bury(one.receive())
    one.publish("a", 2, 3)
    one.release(one.receive())
    held = one.receive(1)
    assert held.names == [2]
    one.session.run("select pgmb.redrive('q')")
    assert two.names() == []
    one.ack(held)
    assert two.take_all() == [1, 3]


def test_a_dead_letter_sent_back_comes_after_older_events_of_its_key(one: Consumer, two: Consumer) -> None:
    one.publish("a", 1, 2, 3)
    one.publish("b", 4)
    held = one.receive()
    one.bury(held, 2)
    one.retry(held, 1, after="1 hour")
    one.bury(held, 4)
    one.session.run("select pgmb.redrive('q')")
    assert two.take_all() == [4], "1 is tried again in an hour, 2 and 3 wait behind it"
    make_due(one.session.connection)
    assert two.take_all() == [1, 2, 3]


def test_an_expired_event_sent_back_comes_after_older_events_that_no_consumer_saw(
    one: Consumer, two: Consumer
) -> None:
    one.publish("a", 1)
    held = one.receive()
    one.publish("a", 2)
    assert two.names() == [], "2 waits behind the lease"
    one.publish("a", 3)
    one.session.run("select pgmb.alter_queue('q', ttl => '1 millisecond')")
    assert two.names() == [], "3 has expired"
    one.session.run("select pgmb.alter_queue('q', ttl => '0')")
    assert one.session.value("select pgmb.redrive('q')") == 1
    one.ack(held)
    assert two.take_all() == [2, 3]


def test_a_dead_letter_sent_back_is_delivered_once_the_event_ahead_is_settled(
    one: Consumer, two: Consumer, sessions: Sessions
) -> None:
    """The ack of the event ahead waits for the open redrive, or the queue's position would pass its place."""
    one.publish("a", 1, 2, 3)
    held = one.receive()
    one.bury(held, 2)
    one.release(held, 1)
    one.ack(held)
    held = one.receive(1)
    assert held.names == [1]
    operator = sessions["operator"]
    operator.run("begin")
    operator.run("select pgmb.redrive('q')")
    ack = one.session.start("select pgmb.ack(%s)", [held.lease]).blocked()
    one_more = two.names()
    assert one_more == [], "the key is held"
    operator.run("commit")
    assert ack.result() == [(1,)]
    assert two.take_all() == [2, 3]


def test_a_retry_waits_for_its_time_behind_a_dead_letter_sent_back(one: Consumer, two: Consumer) -> None:
    one.publish("a", 1)
    one.bury(one.receive())
    one.publish("a", 2, 3)
    one.retry(one.receive(1), after="1 hour")
    one.session.run("select pgmb.redrive('q')")
    held = two.receive()
    assert held.names == [1]
    two.ack(held)
    assert two.names() == [], "2 is tried again in an hour, and 3 waits behind it"
    make_due(one.session.connection)
    assert two.receive().attempts == {2: 2, 3: 1}


def test_a_parked_event_that_is_retried_stays_ahead_of_those_parked_with_it(
    one: Consumer, two: Consumer
) -> None:
    one.publish("a", 1)
    held = one.receive()
    one.publish("a", 2, 3, 4, 5)
    assert two.names() == []
    one.ack(held)
    held = one.receive(3)
    assert held.names == [2, 3, 4]
    one.ack(held, 3, 4)
    one.retry(held, 2, after="1 hour")
    assert two.names() == []
    make_due(one.session.connection)
    assert two.take_all() == [2, 5]


def test_a_dead_letter_sent_back_leaves_other_leases_as_they_are(one: Consumer, two: Consumer) -> None:
    one.publish("a", 1)
    one.bury(one.receive())
    one.publish("a", 2)
    one.publish("b", 3)
    one.release(one.receive())
    held = one.receive()
    assert held.names == [2, 3]
    one.session.run("select pgmb.redrive('q')")
    assert one.retry(held, 3, after="1 hour") == 1
    assert one.ack(held) == 1, "2 is still held"
    assert two.names() == [1]


def test_keys_that_share_a_hash_wait_for_each_other_and_none_is_delivered_twice(
    one: Consumer, two: Consumer
) -> None:
    pair = one.session.run(
        "select min(n)::text, max(n)::text from generate_series(1, 300000) n"
        " group by hashtext(n::text) having count(*) = 2 limit 1"
    )
    first, second = pair[0]
    one.publish(first, 1)
    one.retry(one.receive(), after="1 hour")
    one.publish(second, 2)
    one.publish(first, 3)
    one.publish("other", 4)
    held = two.receive()
    assert 3 not in held.names, "1 is ahead of it"
    two.expire(held)
    make_due(one.session.connection)
    taken = one.take_all()
    assert sorted(taken) == [1, 2, 3, 4]
    assert taken.index(1) < taken.index(3)


def test_seek_forgets_what_was_parked(one: Consumer, two: Consumer) -> None:
    one.publish("a", 1, 2)
    held = one.receive(1)
    assert two.names() == []
    one.session.run("select pgmb.seek('q', pgmb.earliest('main'))")
    assert two.names() == [1, 2]
    with lost():
        one.ack(held)


def test_purge_frees_the_keys(one: Consumer, two: Consumer) -> None:
    one.publish("a", 1, 2)
    one.receive(1)
    assert two.names() == []
    one.session.run("select pgmb.purge('q')")
    one.publish("a", 3)
    assert two.names() == [3]


def test_rebase_keeps_the_order(one: Consumer, two: Consumer) -> None:
    one.publish("a", 1, 2, 3)
    one.receive(1)
    one.publish("b", 4)
    two.names(1)
    one.session.run("select pgmb.rebase()")
    one.publish("a", 5)
    assert [name for name in two.take_all() if name != 4] == [1, 2, 3, 5]


def test_pause_keeps_what_was_parked(one: Consumer, two: Consumer) -> None:
    one.publish("a", 1, 2)
    held = one.receive(1)
    assert two.names() == []
    one.session.run("select pgmb.pause('q')")
    one.ack(held)
    assert two.names() == []
    one.session.run("select pgmb.resume('q')")
    assert two.names() == [2]


def test_new_patterns_leave_leases_and_what_waits_behind_them(one: Consumer, two: Consumer) -> None:
    one.publish("a", 1, 2, topic="old")
    held = one.receive(1)
    assert two.names() == []
    one.session.run("select pgmb.bind('q', '{new}')")
    one.publish("a", 3, topic="old")
    one.publish("a", 4, topic="new")
    one.expire(held)
    assert two.take_all() == [1, 2, 4]


def test_rotation_and_retention_with_parked_events(one: Consumer, two: Consumer) -> None:
    """Parked events carry themselves; what is leased keeps its segment."""
    one.session.run("select pgmb.alter_stream('main', keep_for => '0')")
    one.publish("a", 1, 2, 3)
    held = one.receive(1)
    assert two.names() == []
    for _ in range(3):
        one.session.run("select pgmb.rotate()")
        one.session.run("select pgmb.maintain()")
    one.publish("a", 4)
    one.expire(held)
    assert two.take_all() == [1, 2, 3, 4]
    for _ in range(3):
        one.session.run("select pgmb.maintain()")


def test_a_superseded_receive_parks_nothing(one: Consumer, two: Consumer) -> None:
    """A receive in a transaction that stayed open was passed by: nothing it parked may come a second time."""
    one.publish("a", 1)
    held = one.receive()
    one.publish("a", 2)
    one.publish("b", 3)
    one.session.run("begin")
    assert one.names() == [3]
    assert two.names() == [3], "after a second it goes on without the first"
    with lost():
        one.session.run("commit")
    one.ack(held)
    assert two.names() == [2]
    assert two.take_all() == []


def test_receiving_and_acking_in_one_call(one: Consumer) -> None:
    one.publish("a", 1, 2, 3)
    held = one.receive(1)
    held = one.receive(1, ack=held.lease)
    assert held.names == [2]
    held = one.receive(1, ack=held.lease)
    assert held.names == [3]


def test_one_hot_key_does_not_hide_the_others(one: Consumer, two: Consumer) -> None:
    one.publish("hot", *range(1, 31))
    one.publish("cold", 100)
    held = one.receive(2)
    deadline = time.monotonic() + 20
    while not (others := two.names(5)):
        assert time.monotonic() < deadline
    assert others == [100]
    one.ack(held)
    assert one.take_all() == list(range(3, 31))


def test_many_parked_events_come_in_order(one: Consumer, two: Consumer) -> None:
    for number in range(60):
        one.publish("abc"[number % 3], number)
    held = one.receive(6)
    assert two.names(5) == []
    one.ack(held)
    assert held.names == [*range(6)]
    rest = two.take_all(7)
    for key in range(3):
        assert [n for n in rest if n % 3 == key] == [n for n in range(6, 60) if n % 3 == key]
