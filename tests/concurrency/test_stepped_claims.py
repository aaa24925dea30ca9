"""The statement that claims and reads, whose snapshot is older than the queue's lock.

Promises: it claims only what its snapshot shows as a whole; it goes on where others stopped; events that
commit late come once, whoever claimed the numbers around them. A cursor steps it: its snapshot is taken when
it is declared, and the claim is made when it is fetched.
"""

from __future__ import annotations

from typing import Any

import pytest

from harness.sessions import Session, Sessions
from pgmb._core import statements

FIRST = 5000


@pytest.fixture
def queue(sessions: Sessions) -> Sessions:
    """A batch of 100 events, past the first numbers of the segment, of which 10 are leased."""
    admin = sessions["admin"]
    admin.run(f"select setval('pgmb.seq_main', {FIRST})")
    admin.run("select pgmb.create_queue('q')")
    publish(admin, 100)
    assert receive(admin, 10) == list(range(FIRST + 1, FIRST + 11))
    return sessions


def publish(session: Session, events: int) -> None:
    session.run(
        "insert into pgmb.log_main (topic, payload) select 't', '1' from generate_series(1, %s)", [events]
    )


def receive(session: Session, size: int) -> list[int]:
    return [seq for (seq,) in session.run("select seq from pgmb.receive('q', %s)", [size])]


def claim(size: int) -> tuple[str, tuple[Any, ...]]:
    return statements.claim("q", size, None, None, known=0, stream=1, segment=0)


def seqs(rows: list[Any]) -> list[int] | None:
    """Of the events claimed; None: refused."""
    return None if rows[0][-1] is None else [row[0] for row in rows if row[0] is not None]


def declare(session: Session, size: int) -> None:
    text, parameters = claim(size)
    session.run("begin")
    session.run(f"declare c cursor for {text}", parameters)


def fetch(session: Session) -> list[int] | None:
    rows = session.run("fetch all from c")
    session.run("commit")
    return seqs(rows)


def test_a_batch_that_was_opened_after_the_snapshot_is_not_claimed(queue: Sessions) -> None:
    slow, other = queue.open("slow", "other")
    declare(slow, 10)
    assert len(receive(other, 90)) == 90
    publish(other, 50)
    assert len(receive(other, 5)) == 5
    assert fetch(slow) is None, "its snapshot shows none of them"
    assert seqs(other.run(*claim(10))) == list(range(FIRST + 106, FIRST + 116))
    assert receive(slow, 100) == list(range(FIRST + 116, FIRST + 151))


def test_a_batch_that_others_go_on_with_is_claimed_where_they_stopped(queue: Sessions) -> None:
    slow, other = queue.open("slow", "other")
    declare(slow, 10)
    assert receive(other, 15) == list(range(FIRST + 11, FIRST + 26))
    assert fetch(slow) == list(range(FIRST + 26, FIRST + 36))
    assert receive(other, 5) == list(range(FIRST + 36, FIRST + 41))


def test_it_waits_for_no_other_receive_and_takes_nothing_of_it(queue: Sessions) -> None:
    holder, other = queue.open("holder", "other")
    holder.run("begin")
    assert receive(holder, 10) == list(range(FIRST + 11, FIRST + 21))
    assert seqs(other.run(*claim(10))) is None
    holder.run("commit")
    assert seqs(other.run(*claim(10))) == list(range(FIRST + 21, FIRST + 31))


def test_a_lease_that_was_superseded_can_not_be_settled(queue: Sessions) -> None:
    holder, other = queue.open("holder", "other")
    declare(holder, 10)
    lease = holder.run("fetch all from c")[0][-1]
    assert receive(other, 10) == list(range(FIRST + 11, FIRST + 21)), "after a second"
    holder.run("commit")
    with pytest.raises(Exception, match="is lost"):
        other.run("select pgmb.ack(%s)", [lease])
    assert seqs(other.run(*claim(5))) is None, "a generation was opened"
    assert receive(other, 5) == list(range(FIRST + 21, FIRST + 26))


def test_events_that_commit_late_come_once(queue: Sessions) -> None:
    late, other = queue.open("late", "other")
    assert len(receive(other, 90)) == 90
    publish(other, 20)
    late.run("begin")
    publish(late, 5)
    publish(other, 30)
    assert len(receive(other, 12)) == 12
    late_ones = set(range(FIRST + 121, FIRST + 126))
    claimed = seqs(other.run(*claim(20)))
    assert claimed is not None
    assert set(claimed) == set(range(FIRST + 113, FIRST + 133)) - late_ones
    late.run("commit")
    rest = [seq for _ in range(5) for seq in receive(other, 30)]
    assert set(rest) == set(range(FIRST + 133, FIRST + 156)) | late_ones
    assert len(rest) == 28
