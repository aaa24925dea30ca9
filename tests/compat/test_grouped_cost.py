"""PGMQ's grouped reads over a backlog: what one call costs, and that the backlog is passed call by call."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

from harness.explain import Cost, cost
from harness.waiting import until_true

GROUPS = 7
WAYS = ["read_grouped", "read_grouped_rr", "read_grouped_head"]


def send(db: psycopg.Connection[Any], messages: int, groups: int = GROUPS) -> None:
    """Messages of some groups in turn."""
    db.execute(
        "select pgmq.send_batch('q', array_agg('1'::jsonb),"
        " array_agg(jsonb_build_object('x-pgmq-group', 'group ' || n %% %s)))"
        " from generate_series(1, %s) n",
        [groups, messages],
    )


def send_last(db: psycopg.Connection[Any]) -> int:
    """A message of a group of its own, behind all others."""
    ((number,),) = db.execute(
        """select pgmq.send('q', '{"last": 1}', headers => '{"x-pgmq-group": "last"}'::jsonb)"""
    )
    return int(number)


def assert_costs_the_same(db: psycopg.Connection[Any], groups: int, preparing: str) -> None:
    """Over 300 messages and over 1,800: on both, indexes have more than one page."""

    def costs_with(messages: int) -> dict[str, Cost]:
        send(db, messages, groups)
        db.execute(preparing.encode())
        return {way: cost(db, f"select * from pgmq.{way}('q', 60, 7)") for way in WAYS}

    before = costs_with(300)
    after = costs_with(1500)
    for way in WAYS:
        assert after[way].pages <= before[way].pages * 2, (way, before[way], after[way])


def test_a_grouped_read_that_gives_nothing_costs_the_same_over_a_backlog(
    ours: psycopg.Connection[Any],
) -> None:
    """The first message of each group is hidden."""
    assert_costs_the_same(ours, GROUPS, f"select * from pgmq.read_grouped_head('q', 3600, {GROUPS})")


def test_a_grouped_read_of_many_groups_costs_the_same_over_a_backlog(ours: psycopg.Connection[Any]) -> None:
    """Each message has a group of its own, and all are parked."""
    assert_costs_the_same(ours, 10_000, "select * from pgmq.read_grouped_head('q', 0, 10000)")


def test_callers_pass_a_backlog_of_hidden_groups_together(dsn: str, ours: psycopg.Connection[Any]) -> None:
    send(ours, GROUPS)
    ours.execute("select * from pgmq.read_grouped_head('q', 3600, %s)", [GROUPS])
    send(ours, 4000)
    last = send_last(ours)
    found: list[int] = []
    failures: list[BaseException] = []

    def read() -> None:
        try:
            # A call that tried to pass all at once would be cancelled, or superseded by the other caller.
            with psycopg.connect(dsn, autocommit=True, options="-c statement_timeout=5s") as db:
                while not found:
                    rows = db.execute("select msg_id from pgmq.read_grouped_head('q', 3600, 7)").fetchall()
                    found.extend(number for (number,) in rows)
        except BaseException as failure:
            failures.append(failure)

    readers = [threading.Thread(target=read, daemon=True) for _ in range(2)]
    for reader in readers:
        reader.start()
    until_true(lambda: bool(found or failures))
    for reader in readers:
        reader.join()
    assert (found, failures) == ([last], [])


@pytest.mark.parametrize(
    "reading",
    [
        "pgmq.read_grouped_with_poll('q', 3600, 1, 1)",
        """pgmq.read_with_poll('q', 3600, 1, 1, conditional => '{"last": 1}')""",
    ],
)
def test_a_poll_keeps_how_far_it_came(ours: psycopg.Connection[Any], reading: str) -> None:
    """One call parks a part of the backlog only, and gives nothing."""
    send(ours, GROUPS)
    ours.execute("select * from pgmq.read_grouped_head('q', 3600, %s)", [GROUPS])
    send(ours, 8000)
    last = send_last(ours)
    ours.execute("set statement_timeout = '5s'")

    def rest() -> int:
        return int(ours.execute("select count(*) from pgmq.parked").fetchall()[0][0])

    for _ in range(20):
        before = rest()
        if found := ours.execute(f"select msg_id from {reading}".encode()).fetchall():
            assert found == [(last,)]
            break
        assert rest() > before
    else:
        pytest.fail("the message behind the backlog was not found")
