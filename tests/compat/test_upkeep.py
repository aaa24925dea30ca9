"""Promises: rights are asked for, retention drops what was removed and nothing else, odd input is borne."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import errors

from harness.postgres import Server
from harness.states import kept_claims, leases_in_flight, settled_singly
from pgmb import schema


def ask(connection: psycopg.Connection[Any], statement: str, *arguments: Any) -> list[Any]:
    rows = connection.execute(statement.encode(), arguments or None).fetchall()
    return [row[0] if len(row) == 1 else row for row in rows]


def send(connection: psycopg.Connection[Any], count: int = 1) -> list[int]:
    return ask(connection, "select pgmq.send_batch('q', array_fill('{}'::jsonb, array[%s::int]))", count)


def read(connection: psycopg.Connection[Any], vt: int = 600, qty: int = 1000) -> list[int]:
    return ask(connection, "select msg_id from pgmq.read('q', %s, %s)", vt, qty)


def rotated(connection: psycopg.Connection[Any]) -> None:
    before = ask(connection, "select pgmb_internal.last_seq('pgmq.q') >> 40")
    deadline = time.monotonic() + 60
    while ask(connection, "select pgmb_internal.last_seq('pgmq.q') >> 40") == before:
        ask(connection, "select pgmb.rotate('pgmq.q')")
        assert time.monotonic() < deadline


def kept(connection: psycopg.Connection[Any]) -> int:
    """How many events the log still holds after maintenance."""
    ask(connection, "select pgmb.maintain()")
    ask(connection, "select pgmb.maintain()")
    [count] = ask(connection, 'select count(*) from pgmb."log_pgmq.q"')
    return int(count)


def test_the_log_is_dropped_when_everything_was_removed(ours: psycopg.Connection[Any]) -> None:
    assert send(ours, 60) == list(range(1, 61))
    held = read(ours, qty=20)
    rotated(ours)
    assert kept(ours) == 60
    # Numbers jump to the new segment, and are counted all the same.
    [number] = send(ours)
    assert number > 1 << 40
    assert ask(ours, "select queue_length, total_messages from pgmq.metrics('q')") == [(61, 61)]
    ask(ours, "select pgmq.delete('q', %s::bigint[])", held)
    assert read(ours) == [*range(21, 61), number]
    assert kept(ours) == 61
    # One that got its own time is copied out and holds nothing back.
    assert ask(ours, "select msg_id from pgmq.set_vt('q', 23::bigint, 0)") == [23]
    rest = [21, 22, *range(24, 61)]
    ask(ours, "select pgmq.archive('q', %s::bigint[])", rest)
    ask(ours, "select pgmq.delete('q', %s::bigint)", number)
    rotated(ours)
    assert kept(ours) == 0
    assert read(ours) == [23]
    assert ask(ours, "select msg_id from pgmq.a_q order by 1") == rest
    assert ask(ours, "select queue_length, total_messages from pgmq.metrics('q')") == [(1, 61)]


@pytest.mark.parametrize("qty", [6, 20])
def test_nothing_is_left_of_what_was_deleted(ours: psycopg.Connection[Any], qty: int) -> None:
    """Small reads copy messages, large ones hold a range."""
    send(ours, 10 * qty)
    for _ in range(10):
        for number in read(ours, qty=qty):
            assert ask(ours, "select pgmq.delete('q', %s::bigint)", number) == [True]
    for leftover in ("pgmq.reading", "pgmq.parked"):
        assert ask(ours, f"select count(*) from {leftover}") == [0]
    assert leases_in_flight(ours) == 0
    ask(ours, "select pgmb.clear_settled()")
    # But for those of the queue's position.
    assert settled_singly(ours) <= qty


def test_small_reads_share_a_claim(ours: psycopg.Connection[Any]) -> None:
    """Read one by one, a message costs a row of its own, as in PGMQ, and a hundredth of a claim."""
    before = kept_claims(ours)
    send(ours, 100)
    seen = []
    for _ in range(100):
        [number] = read(ours, qty=1)
        seen.append(number)
        assert ask(ours, "select pgmq.delete('q', %s::bigint[])", [number]) == [number]
    assert seen == sorted(seen)
    assert kept_claims(ours) == before + 1


def test_messages_that_wait_after_a_small_read(ours: psycopg.Connection[Any]) -> None:
    """They look and are read as if they were still in the log."""
    send(ours, 5)
    assert read(ours, qty=1) == [1]
    untouched = "read_ct = 0 and vt = enqueued_at and last_read_at is null"
    assert ask(ours, f"select msg_id from pgmq.q_q where {untouched} order by 1") == [2, 3, 4, 5]
    assert ask(ours, "select queue_length, queue_visible_length from pgmq.metrics('q')") == [(5, 4)]
    # Visible again, the first one is again the first.
    ask(ours, "select msg_id from pgmq.set_vt('q', 1::bigint, 0)")
    assert read(ours, qty=2) == [1, 2]
    assert ask(ours, "select msg_id, read_ct, vt = enqueued_at from pgmq.pop('q')") == [(3, 0, True)]
    assert ask(ours, "select pgmq.archive('q', 4::bigint)") == [True]
    assert ask(ours, "select msg_id, read_ct, vt = enqueued_at from pgmq.a_q") == [(4, 0, True)]
    assert ask(ours, "select msg_id from pgmq.read_with_poll('q', 60, 1, 5)") == [5]
    assert ask(ours, "select pgmq.delete('q', '{1,2,3,4,5}'::bigint[])") == [1, 2, 5]


def test_after_a_rebase_everything_is_there(ours: psycopg.Connection[Any]) -> None:
    send(ours, 26)
    # A range, and a message of its own.
    assert read(ours, qty=20) == list(range(1, 21))
    assert read(ours, qty=1) == [21]
    ask(ours, "select pgmq.delete('q', '{1,25}'::bigint[])")
    ask(ours, "select msg_id from pgmq.set_vt('q', 26::bigint, 3600)")
    ask(ours, "select pgmb.rebase()")
    assert ask(ours, "select queue_length from pgmq.metrics('q')") == [24]
    assert sorted(read(ours)) == [*range(2, 21), 22, 23, 24]
    everything = list(range(1, 27))
    assert sorted(ask(ours, "select pgmq.delete('q', %s::bigint[])", everything)) == [*range(2, 25), 26]
    assert ask(ours, "select queue_length from pgmq.metrics('q')") == [0]


def test_hidden_messages_do_not_slow_a_read(ours: psycopg.Connection[Any]) -> None:
    """PGMQ: 153 ms for a claim of ten with a million invisible rows ahead."""

    def best(count: int) -> float:
        times = []
        for _ in range(count):
            send(ours, 10)
            began = time.perf_counter()
            read(ours, 600, 10)
            times.append(time.perf_counter() - began)
        return min(times)

    before = best(20)
    ask(ours, "select count(*) from pgmq.send_batch('q', array_fill('{}'::jsonb, array[100000]), 3600)")
    send(ours, 20000)
    ask(ours, "select count(*) from pgmq.read('q', 3600, 20000)")
    assert best(20) < before * 5 + 0.002


def test_nonsense(ours: psycopg.Connection[Any]) -> None:
    send(ours, 3)
    for statement, error in (
        ("select pgmq.read('q', 30, -1)", errors.InvalidRowCountInLimitClause),
        ("select pgmq.pop('q', -1)", errors.InvalidRowCountInLimitClause),
        ("select pgmq.send('q', '{}', null::timestamptz)", errors.NotNullViolation),
        ("select pgmq.set_vt('q', 1::bigint, null::timestamptz)", errors.NotNullViolation),
        ("select pgmq.send_batch('q', '{}'::jsonb[])", errors.InvalidParameterValue),
        ("select pgmq.send_batch('q', null)", errors.InvalidParameterValue),
        ("select pgmq.create(null)", errors.InvalidParameterValue),
        ("select pgmq.create('')", errors.InvalidParameterValue),
        ("select pgmq.read(null, 1, 1)", errors.InvalidParameterValue),
        ("select pgmq.delete('none', 1::bigint)", errors.UndefinedTable),
    ):
        with pytest.raises(error):
            ask(ours, statement)
    assert ask(ours, "select pgmq.read('q', 30, 0)") == []
    assert ask(ours, "select pgmq.delete('q', '{}'::bigint[])") == []
    assert ask(ours, "select pgmq.delete('q', array[null, -1, 0, 99]::bigint[])") == []
    assert ask(ours, "select pgmq.delete('q', null::bigint[])") == []
    assert ask(ours, "select pgmq.delete('q', null::bigint)") == [False]
    assert sorted(ask(ours, "select pgmq.delete('q', array[2, 2, null, 2]::bigint[])")) == [2]
    assert ask(ours, "select msg_id from pgmq.read('q', -10, null)") == [1, 3]
    assert ask(ours, "select msg_id, read_ct from pgmq.read('q', 30, null, null)") == [(1, 2), (3, 2)]
    assert ask(ours, "select pgmq.delete('q', array[1, 3, 1]::bigint[])") == [1, 3]


def test_messages_of_any_kind(ours: psycopg.Connection[Any]) -> None:
    kinds = ["{}", "[]", "null", "1", '"text"', "true", '{"a": [1, {"b": null}]}']
    for kind in kinds:
        ask(ours, "select pgmq.send('q', %s::jsonb)", kind)
    assert ask(ours, "select pgmq.send('q', null::jsonb)") == [len(kinds) + 1]
    got = dict(ask(ours, "select msg_id, message::text from pgmq.read('q', 60, 100)"))
    assert [got[number] for number in sorted(got)] == [*kinds, None]


@pytest.fixture
def roles(
    server: Server, ours: psycopg.Connection[Any]
) -> Iterator[Callable[[str], psycopg.Connection[Any]]]:
    """Connections as a role made for the test, which has the rights of the role named."""
    made: list[str] = []
    opened: list[psycopg.Connection[Any]] = []

    def connect(right: str) -> psycopg.Connection[Any]:
        name = f"compat_{right or 'nobody'}"
        ours.execute(f"create role {name} login".encode())
        made.append(name)
        if right.startswith("pgmb_"):
            ours.execute(f"grant {right} to {name}".encode())
        opened.append(psycopg.connect(ours.info.dsn, user=name, autocommit=True))
        return opened[-1]

    yield connect
    for connection in opened:
        connection.close()
    for name in made:
        ours.execute(f"drop owned by {name}".encode())
        ours.execute(f"drop role {name}".encode())


SENDING = [
    "select pgmq.send('q', '{}')",
    "select pgmq.send('q', '{}', 60)",
    "select pgmq.send_batch('q', array['{}']::jsonb[])",
]
READING = [
    "select pgmq.read('q', 1, 1)",
    "select pgmq.read_with_poll('q', 1, 1, 0)",
    "select pgmq.read_grouped('q', 1, 1)",
    "select pgmq.pop('q')",
    "select pgmq.delete('q', 1::bigint)",
    "select pgmq.archive('q', 1::bigint)",
    "select pgmq.set_vt('q', 1::bigint, 1)",
    "select pgmq.metrics('q')",
]
MANAGING = [
    "select pgmq.create('more')",
    "select pgmq.purge_queue('q')",
    "select pgmq.bind_topic('#', 'q')",
    "select pgmq.unbind_topic('#', 'q')",
    "select pgmq.enable_notify_insert('q')",
    "select pgmq.disable_notify_insert('q')",
    "select pgmq.drop_queue('more')",
]
INSIDE = [
    "select pgmb.publish('t', '{}', stream => 'pgmq.q')",
    "select * from pgmq.parked",
    "select * from pgmq.reading",
    "delete from pgmq.topic_bindings",
    "select pgmq.take(q, '{1}', true) from pgmq.queue q",
    "select pgmq.make_queue('x', false, false, '1 day', 1)",
    "select pgmq.grant_functions('{read}', 'pgmb_publisher')",
]


@pytest.mark.parametrize(
    ("right", "allowed"),
    [
        ("", []),
        ("pgmb_publisher", SENDING),
        ("pgmb_consumer", READING),
        ("pgmb_admin", [*SENDING, *READING, *MANAGING]),
    ],
)
def test_rights(roles: Callable[[str], psycopg.Connection[Any]], right: str, allowed: list[str]) -> None:
    connection = roles(right)
    for statement in [*SENDING, *READING, *MANAGING, *INSIDE]:
        if statement in allowed:
            ask(connection, statement)
        else:
            with pytest.raises(errors.InsufficientPrivilege):
                ask(connection, statement)


def test_rights_on_one_queue(
    ours: psycopg.Connection[Any], roles: Callable[[str], psycopg.Connection[Any]]
) -> None:
    connection = roles("")
    ask(ours, "select pgmq.create('other')")
    ask(ours, "select pgmq.grant_send('q', 'compat_nobody'), pgmq.grant_read('q', 'compat_nobody')")
    # An upgrade leaves them.
    schema.install(ours.info.dsn)
    assert ask(connection, "select count(*) from pgmq.q_q") == [0]
    assert ask(connection, "select count(*) from pgmq.a_q") == [0]
    for statement in [*SENDING, *READING]:
        ask(connection, statement)
        with pytest.raises(errors.InsufficientPrivilege):
            ask(connection, statement.replace("'q'", "'other'"))
    ask(ours, "select pgmq.bind_topic('t', 'other')")
    with pytest.raises(errors.InsufficientPrivilege):
        ask(connection, "select pgmq.send_topic('t', '{}')")
    with pytest.raises(errors.InsufficientPrivilege):
        ask(connection, "select pgmq.drop_queue('q')")
