"""An ordered queue deals its keys out to shards: consumers pass each other by, the order holds in each."""

from __future__ import annotations

import pytest

from harness.sessions import Sessions
from harness.states import kept_of_queues
from tests.contract.deliveries import Consumer, Received, lost

KEYS = [f"key-{number}" for number in range(16)]
PATIENCE = 0.12


@pytest.fixture
def one(sessions: Sessions) -> Consumer:
    sessions["admin"].run("select pgmb.create_queue('q', ordered => true, max_attempts => 3)")
    return Consumer(sessions["one"])


def everything(consumer: Consumer, size: int = 100) -> list[Received]:
    """All leases that can be had now. Each shard gives one at a time."""
    leases: list[Received] = []
    while got := consumer.receive(size):
        leases.append(got)
    return leases


def test_every_key_comes_and_in_order(one: Consumer) -> None:
    for turn in range(5):
        for number, key in enumerate([*KEYS, None]):
            one.publish(key, turn * 100 + number)
    taken = one.take_all(3)
    assert len(taken) == 5 * 17
    for number in range(16):
        assert [name for name in taken if name % 100 == number] == [turn * 100 + number for turn in range(5)]


def test_no_key_is_held_twice(one: Consumer, sessions: Sessions) -> None:
    two = Consumer(sessions["two"], patience=PATIENCE)
    for turn in range(3):
        for number, key in enumerate(KEYS):
            one.publish(key, turn * 100 + number)
    held = [row for lease in everything(one, 2) for row in lease.rows]
    held += [row for lease in everything(two, 2) for row in lease.rows]
    names = [name for _, name, _, _ in held]
    assert len(names) == len(set(names))
    first_of = {key: min(name for k, name, _, _ in held if k == key) for key in {row[0] for row in held}}
    assert all(name < 100 for name in first_of.values())
    assert two.names() == []


def test_a_receive_that_stays_open_holds_up_its_shard_for_a_second_at_most(
    one: Consumer, sessions: Sessions
) -> None:
    two = Consumer(sessions["two"])
    one.publish("a", 1)
    one.session.run("begin")
    assert one.names() == [1]
    two.publish("b", 2)
    got: list[int] = []
    for _ in range(1000):
        got += two.names()
        if sorted(got) == [1, 2]:
            break
    else:
        pytest.fail(f"the shard stays closed: {got}")
    one.session.run("commit")
    assert one.names() == []


def test_settling_through_the_queue_s_name_reaches_all_shards(one: Consumer) -> None:
    for number, key in enumerate(KEYS):
        one.publish(key, number)
    for lease in everything(one):
        one.bury(lease, error="no")
    assert sorted(name for name, _ in one.dead()) == list(range(16))
    assert one.session.value("select pgmb.redrive('q')") == 16
    assert sorted(one.take_all()) == list(range(16))
    one.publish("a", 99)
    held = one.receive()
    one.session.run("select pgmb.purge('q')")
    with lost():
        one.ack(held)
    assert one.take_all() == []


def test_dropping_takes_all_shards_along(one: Consumer) -> None:
    for number, key in enumerate(KEYS):
        one.publish(key, number)
    one.release(one.receive())
    assert one.session.value("select pgmb.drop_queue('q')")
    assert kept_of_queues(one.session) == {}


def test_a_role_granted_the_queue_may_settle_in_every_shard(one: Consumer, sessions: Sessions) -> None:
    admin = sessions["admin"]
    role = admin.value("select 'shard_reader_' || pg_backend_pid()")
    admin.run(f"create role {role}")
    try:
        admin.run("select pgmb.grant_consume('q', %s)", [role])
        for number, key in enumerate(KEYS):
            one.publish(key, number)
        one.session.run(f"set role {role}")
        assert sorted(one.take_all(2)) == list(range(16))
    finally:
        one.session.run("reset role")
        admin.run(f"drop owned by {role}")
        admin.run(f"drop role {role}")
