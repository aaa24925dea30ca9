"""Promises: the statement that claims and reads delivers what receive would, and refuses all else.

- it is used in the middle of a batch and where the next one begins, and its leases are those of receive;
- gaps in its range are counted, and a range without events is no lease;
- a role that may consume the queue but not read the stream receives as before, and so do clients of poolers;
- a queue that is created again under its name, on another stream, is not read from the old one;
- rotation and the end of a batch change nothing of what is delivered.
"""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

import pgmb
from harness.states import lose_leases
from pgmb._core import claiming, statements
from pgmb._core.lease import LeaseNumbers

pytestmark = pytest.mark.short_way

FIRST = 5000
"""Numbers that are skipped: the first of a segment are left to receive."""


def fill(db: psycopg.Connection[Any], events: int, stream: str = "main") -> None:
    db.execute(
        f"insert into pgmb.log_{stream} (topic, payload) select 'a.b', to_json(g)"
        f" from generate_series(1, {events}) g"
    )


class Watched:
    """A broker, and how often it claimed by the statement, was refused, and called receive."""

    def __init__(self, broker: pgmb.Broker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.broker = broker
        self.claims = self.refusals = self.receives = 0
        plain = broker._rows  # pyright: ignore[reportPrivateUsage]

        def rows(statement: statements.Statement, conn: Any) -> Any:
            got = plain(statement, conn)
            if "pgmb.claim_next" in statement.text:
                self.claims += bool(got[0][-1])
                self.refusals += got[0][-1] is None
            self.receives += "pgmb.receive(" in statement.text
            return got

        monkeypatch.setattr(broker, "_rows", rows)


@pytest.fixture
def watched(broker: pgmb.Broker, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(broker, monkeypatch)


def begin(db: psycopg.Connection[Any], broker: pgmb.Broker, events: int = 300) -> None:
    """A queue in the middle of a batch, past the first numbers of its segment: 10 events are leased."""
    skip(db)
    broker.create_queue("q")
    fill(db, events)
    assert len(broker.receive("q", 10)) == min(10, events)


def skip(db: psycopg.Connection[Any], stream: str = "main") -> None:
    last = f"coalesce(pg_sequence_last_value('pgmb.seq_{stream}'), 0)"
    db.execute(f"select setval('pgmb.seq_{stream}', ({last} >> 40 << 40) + {FIRST})")


def test_a_backlog_is_received_once_and_in_order(db: psycopg.Connection[Any], watched: Watched) -> None:
    begin(db, watched.broker)
    seqs: list[int] = []
    lease = watched.broker.receive("q", 20)
    while lease:
        seqs += [event.seq for event in lease]
        assert len({event.id for event in lease}) == len(lease)
        lease = watched.broker.receive("q", 20, ack=lease)
    assert seqs == list(range(FIRST + 11, FIRST + 301))
    assert watched.claims == 14
    status = next(s for s in watched.broker.queue_status() if s.queue == "q")
    assert (status.leases, status.leased_events) == (1, 10)


def test_events_that_come_one_by_one_are_received_by_it(
    db: psycopg.Connection[Any], watched: Watched
) -> None:
    """Looks that find nothing are made by it too."""
    begin(db, watched.broker, 5)
    lease, seqs, receives = None, [], watched.receives
    for _ in range(10):
        assert not watched.broker.receive("q", 10, ack=lease)
        fill(db, 2)
        lease = watched.broker.receive("q", 10)
        seqs += [event.seq for event in lease]
    assert seqs == list(range(FIRST + 6, FIRST + 26))
    assert (watched.claims, watched.refusals, watched.receives - receives) == (10, 0, 0)
    assert lease is not None
    assert lease.retry(lease.events[:1], after=0) == 1
    assert [event.attempt for event in watched.broker.receive("q", 10)] == [2], "retries come first"


def test_its_leases_are_settled_as_any(db: psycopg.Connection[Any], watched: Watched) -> None:
    begin(db, watched.broker)
    first = watched.broker.receive("q", 10)
    second = watched.broker.receive("q", 10)
    assert watched.claims == 2
    assert first.ack(first.events[:3]) == 3
    assert first.ack() == 7
    assert first.ack() == 0
    assert second.retry(second.events[:2], after=0) == 2
    assert [event.seq for event in watched.broker.receive("q", 10)] == [e.seq for e in second.events[:2]]
    assert second.ack() == 8
    third = watched.broker.receive("q", 10)
    assert {event.attempt for event in third} == {1}
    third.extend(0)
    again = watched.broker.receive("q", 10)
    while not again or again.events[0].attempt == 1:
        # Expiry is looked for every 50 ms.
        again = watched.broker.receive("q", 10)
    assert [event.seq for event in again] == [event.seq for event in third]
    assert {event.attempt for event in again} == {2}
    with pytest.raises(pgmb.LeaseLost):
        third.ack()


def test_a_lost_ack_refuses_the_claim_as_well(db: psycopg.Connection[Any], watched: Watched) -> None:
    begin(db, watched.broker)
    lost = watched.broker.receive("q", 10)
    lose_leases(db)
    claims = watched.claims
    with pytest.raises(pgmb.LeaseLost):
        watched.broker.receive("q", 10, ack=lost)
    assert (watched.claims, watched.refusals, watched.receives) == (claims, 0, 1)
    assert watched.broker.receive("q", 10).events[0].seq == FIRST + 21


def test_numbers_that_are_no_events_are_left_to_receive(
    db: psycopg.Connection[Any], connect: Any, watched: Watched
) -> None:
    skip(db)
    watched.broker.create_queue("q")
    fill(db, 35)
    with connect() as other, other.transaction(force_rollback=True):
        fill(other, 25)
    fill(db, 100)
    assert len(watched.broker.receive("q", 10)) == 10
    lengths = []
    while lease := watched.broker.receive("q", 10):
        lengths.append(len(lease))
        assert lease.ack() == len(lease)
    assert sum(lengths) == 125
    assert watched.refusals >= 1
    assert watched.claims >= 5
    status = next(s for s in watched.broker.queue_status() if s.queue == "q")
    assert (status.leases, status.leased_events) == (1, 10)


def test_a_role_without_the_stream_receives_as_before(db: psycopg.Connection[Any], dsn: str) -> None:
    db.execute("create role lone login")
    try:
        skip(db)
        db.execute("select pgmb.create_queue('q')")
        db.execute("select pgmb.grant_consume('q', 'lone')")
        fill(db, 100)
        with pgmb.connect(dsn, options="-c role=lone") as broker:
            got = [event.seq for _ in range(5) for event in broker.receive("q", 20)]
            assert len(set(got)) == 100
            assert db.execute(
                "select has_table_privilege('lone', 'pgmb.segment_1_0', 'select')"
            ).fetchone() == (False,)
        db.execute("select pgmb.grant_read('main', 'lone')")
        assert db.execute("select pgmb.rotate('main')").fetchone() is not None
        readable = (
            "select bool_and(has_table_privilege('lone', format('pgmb.segment_1_%s', number), 'select'))"
            " from pgmb.segment where stream = 1"
        )
        assert db.execute(readable).fetchone() == (True,)
        db.execute("select pgmb.revoke_stream('main', 'lone')")
        assert db.execute(readable.replace("bool_and", "not bool_or")).fetchone() == (True,)
    finally:
        db.execute("drop owned by lone")
        db.execute("drop role lone")


def test_rights_that_are_revoked_meanwhile_lead_back_to_receive(
    db: psycopg.Connection[Any], dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    db.execute("create role reading login")
    try:
        skip(db)
        db.execute("select pgmb.create_queue('q')")
        db.execute("select pgmb.grant_consume('q', 'reading'), pgmb.grant_read('main', 'reading')")
        fill(db, 100)
        with pgmb.connect(dsn, options="-c role=reading") as broker:
            watched = Watched(broker, monkeypatch)
            broker.receive("q", 20)
            broker.receive("q", 20)
            assert len(broker.receive("q", 20)) == 20
            assert watched.claims == 2
            db.execute("select pgmb.revoke_stream('main', 'reading')")
            assert broker.receive("q", 20).events[0].seq == FIRST + 61
    finally:
        db.execute("drop owned by reading")
        db.execute("drop role reading")


def test_a_queue_of_the_same_name_on_another_stream_is_read_from_there(
    db: psycopg.Connection[Any], watched: Watched
) -> None:
    begin(db, watched.broker)
    watched.broker.receive("q", 10)
    watched.broker.receive("q", 10)
    assert watched.claims == 2
    watched.broker.create_stream("other")
    watched.broker.drop_queue("q")
    watched.broker.create_queue("q", stream="other")
    skip(db, "other")
    claims = watched.claims
    for payload in range(30):
        watched.broker.publish("x", f"there {payload}", stream="other")
    received = [event.payload for _ in range(3) for event in watched.broker.receive("q", 10)]
    assert received == [f"there {payload}" for payload in range(30)]
    assert watched.claims > claims


def test_rotation_and_the_ends_of_batches_change_nothing(
    db: psycopg.Connection[Any], watched: Watched
) -> None:
    begin(db, watched.broker)
    db.execute("select pgmb.rotate('main')")
    skip(db)
    fill(db, 300)
    seqs = []
    while lease := watched.broker.receive("q", 9):
        seqs += [event.seq for event in lease]
    assert seqs == [*range(FIRST + 11, FIRST + 301), *range((1 << 40) + FIRST + 1, (1 << 40) + FIRST + 301)]
    assert watched.claims > 40


@pytest.mark.parametrize(
    "special",
    [
        "select pgmb.pause('q')",
        "select pgmb.bind('q', '{a.b}')",
        "select pgmb.retry(lease, after => '0'), pg_sleep(0.06) from pgmb.receive('q', 1)",
        "select pgmb.alter_queue('q', max_attempts => 5, rps => 1000)",
    ],
)
def test_what_receive_must_decide_is_refused(
    db: psycopg.Connection[Any], watched: Watched, special: str
) -> None:
    begin(db, watched.broker)
    watched.broker.receive("q", 10)
    watched.broker.receive("q", 10)
    claims = watched.claims
    db.execute(special)
    watched.broker.receive("q", 10)
    # The middle of a batch was tried, and a new batch.
    assert (watched.claims, watched.refusals) == (claims, 2)


def test_a_transaction_with_an_old_snapshot_or_an_xid_is_refused(
    db: psycopg.Connection[Any], connect: Any, watched: Watched
) -> None:
    begin(db, watched.broker)
    statement = statements.claim(
        LeaseNumbers(1, 0, 7), 10, None, None, stream=1, segment=0, start=0, opens=False
    )
    for opening in ("begin isolation level repeatable read", "begin; select pg_current_xact_id()"):
        with connect() as other:
            other.execute(opening)
            assert [row[-1] for row in other.execute(statement.text, statement.parameters)] == [None]
            other.execute("rollback")
    with connect() as other:
        claimed = other.execute(statement.text, statement.parameters).fetchall()[0][-1]
        assert isinstance(claimed, int)


def test_what_a_client_remembers_of_queues_is_bounded(
    broker: pgmb.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claiming, "_MOST_KNOWN", 2)
    for number in range(5):
        broker.create_stream(f"s{number}")
        broker.create_queue(f"q{number}", stream=f"s{number}")
    for attempt in (1, 2):
        for number in range(5):
            given = broker.publish("a", number, stream=f"s{number}") if attempt == 1 else None
            lease = broker.receive(f"q{number}")
            assert [(event.stream, event.payload, event.attempt) for event in lease] == [
                (f"s{number}", number, attempt)
            ]
            assert given in (None, lease.events[0].id)
            lease.retry(after=0)
    known = broker._known  # pyright: ignore[reportPrivateUsage]
    assert max(len(known.claiming), len(known.sources), len(known.salts)) <= 2
