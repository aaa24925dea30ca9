"""The statement that claims and reads, whose snapshot is older than the queue's lock.

Promises: it claims only what its snapshot shows as a whole; it goes on where others stopped; it opens a batch
only where nothing can be late; events that commit late come once, whoever claimed the numbers around them. A
cursor steps it: its snapshot is taken when it is declared, and the claim is made when it is fetched.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from harness.sessions import Session, Sessions
from harness.states import batch_start, lease_state, lose_leases, newest_claim
from pgmb._core import statements
from pgmb._core.lease import LeaseNumbers

FIRST = 5000
NEXT = LeaseNumbers(queue=1, claim=0, token=7)
"""Of the first queue, whose claims are not known, and the token of the new lease."""


@pytest.fixture
def batch(sessions: Sessions) -> Sessions:
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


def claim(
    size: int, start: int | None = None, lease: LeaseNumbers = NEXT, *, opens: bool | None = None
) -> tuple[str, tuple[Any, ...]]:
    opens = start is not None if opens is None else opens
    return statements.claim(lease, size, None, None, stream=1, segment=0, start=start or 0, opens=opens)


def known(session: Session) -> LeaseNumbers:
    """The newest claim, and the token of the next lease."""
    return NEXT._replace(claim=newest_claim(session))


def seqs(rows: list[Any]) -> list[int] | None:
    """Numbers of the events claimed; None: refused."""
    return None if rows[0][-1] is None else [row[0] for row in rows if row[0] is not None]


def declare(session: Session, size: int, start: int | None = None) -> None:
    text, parameters = claim(size, start)
    session.run("begin")
    session.run(f"declare c cursor for {text}", parameters)


def fetch(session: Session) -> list[int] | None:
    rows = session.run("fetch all from c")
    session.run("commit")
    return seqs(rows)


def test_a_batch_that_was_opened_after_the_snapshot_is_not_claimed(batch: Sessions) -> None:
    slow, other = batch.open("slow", "other")
    declare(slow, 10)
    assert len(receive(other, 90)) == 90
    publish(other, 50)
    assert len(receive(other, 5)) == 5
    assert fetch(slow) is None, "its snapshot shows none of them"
    assert seqs(other.run(*claim(10))) == list(range(FIRST + 106, FIRST + 116))
    assert receive(slow, 100) == list(range(FIRST + 116, FIRST + 151))


def test_a_batch_that_others_go_on_with_is_claimed_where_they_stopped(batch: Sessions) -> None:
    slow, other = batch.open("slow", "other")
    declare(slow, 10)
    assert receive(other, 15) == list(range(FIRST + 11, FIRST + 26))
    assert fetch(slow) == list(range(FIRST + 26, FIRST + 36))
    assert receive(other, 5) == list(range(FIRST + 36, FIRST + 41))


def test_it_waits_for_no_other_receive_and_takes_nothing_of_it(batch: Sessions) -> None:
    holder, other = batch.open("holder", "other")
    holder.run("begin")
    assert receive(holder, 10) == list(range(FIRST + 11, FIRST + 21))
    assert seqs(other.run(*claim(10))) is None
    holder.run("commit")
    assert seqs(other.run(*claim(10))) == list(range(FIRST + 21, FIRST + 31))


def test_a_lease_that_was_superseded_can_not_be_settled(batch: Sessions) -> None:
    holder, other = batch.open("holder", "other")
    declare(holder, 10)
    claimed = holder.run("fetch all from c")[0][-1]
    assert claimed is not None
    lease = UUID(bytes=bytes(NEXT._replace(claim=claimed)))
    assert receive(other, 10) == list(range(FIRST + 11, FIRST + 21)), "after a second"
    holder.run("commit")
    with pytest.raises(Exception, match="is lost"):
        other.run("select pgmb.ack(%s)", [lease])
    assert seqs(other.run(*claim(5))) is None, "a generation was opened"
    assert receive(other, 5) == list(range(FIRST + 21, FIRST + 26))


def test_it_refuses_while_a_generation_is_being_opened(batch: Sessions) -> None:
    """What it leased beside the opener would be void."""
    holder, opener, third = batch.open("holder", "opener", "third")
    declare(holder, 10)
    assert len(holder.run("fetch all from c")) == 10
    opener.run("begin")
    assert receive(opener, 10) == list(range(FIRST + 11, FIRST + 21)), "after a second"
    holder.run("commit")
    assert seqs(third.run(*claim(10))) is None
    opener.run("commit")
    assert receive(third, 10) == list(range(FIRST + 21, FIRST + 31))


@pytest.mark.short_way
def test_events_that_commit_late_come_once(batch: Sessions) -> None:
    late, other = batch.open("late", "other")
    assert len(receive(other, 90)) == 90
    publish(other, 20)
    late.run("begin")
    publish(late, 5)
    publish(other, 30)
    assert len(receive(other, 12)) == 12
    late_ones = set(range(FIRST + 121, FIRST + 126))
    assert seqs(other.run(*claim(20))) is None, "a lease holds all numbers of its range"
    assert set(receive(other, 20)) == set(range(FIRST + 113, FIRST + 133)) - late_ones
    late.run("commit")
    rest = [seq for _ in range(5) for seq in receive(other, 30)]
    assert set(rest) == set(range(FIRST + 133, FIRST + 156)) | late_ones
    assert len(rest) == 28


# -- the next batch ------------------------------------------------------------------------------------------


@pytest.fixture
def ended(batch: Sessions) -> Sessions:
    """The batch of 100 events is consumed; the next one starts after LAST."""
    assert len(receive(batch["admin"], 90)) == 90
    return batch


LAST = FIRST + 100


def test_it_opens_batches_one_after_the_other(ended: Sessions) -> None:
    admin, other = ended.open("admin", "other")
    assert admin.run(*claim(10, LAST))[0][-1] == 0, "there is nothing"
    publish(admin, 3)
    assert seqs(admin.run(*claim(10, LAST))) == [LAST + 1, LAST + 2, LAST + 3]
    assert receive(other, 10) == []
    publish(admin, 10)
    assert seqs(other.run(*claim(10, LAST + 3))) == list(range(LAST + 4, LAST + 14))
    assert seqs(admin.run(*claim(20, LAST + 3))) is None, "others went on"
    publish(admin, 11)
    rows = other.run(*claim(10, LAST + 13))
    assert (seqs(rows), rows[0][-1] < 0) == (list(range(LAST + 14, LAST + 24)), True), "a longer batch"
    assert receive(other, 10) == [LAST + 24]
    assert admin.run(*claim(10, LAST + 24, known(admin)))[0][-1] == 0


def test_it_passes_no_number_that_is_not_committed(ended: Sessions) -> None:
    late, other = ended.open("late", "other")
    late.run("begin")
    publish(late, 2)
    assert other.run(*claim(10, LAST))[0][-1] == 0, "nothing is there yet"
    publish(other, 3)
    assert seqs(other.run(*claim(10, LAST))) is None
    late.run("commit")
    assert seqs(other.run(*claim(10, LAST))) == list(range(LAST + 1, LAST + 6))


def test_events_behind_its_batch_may_commit_late(ended: Sessions) -> None:
    late, other = ended.open("late", "other")
    publish(other, 3)
    late.run("begin")
    publish(late, 2)
    assert seqs(other.run(*claim(10, LAST))) == [LAST + 1, LAST + 2, LAST + 3]
    publish(other, 1)
    assert seqs(other.run(*claim(10, LAST + 3))) is None
    assert receive(other, 10) == [LAST + 6]
    late.run("commit")
    assert receive(other, 10) == [LAST + 4, LAST + 5]
    publish(other, 1)
    assert [seq for _ in range(3) for seq in receive(other, 10)] == [LAST + 7]


def test_it_opens_no_batch_where_an_event_may_be_late(ended: Sessions) -> None:
    late, other = ended.open("late", "other")
    late.run("begin")
    publish(late, 2)
    publish(other, 3)
    assert receive(other, 10) == [LAST + 3, LAST + 4, LAST + 5]
    late.run("commit")
    publish(other, 1)
    start = batch_start(other)
    claimed = seqs(other.run(*claim(10, start)))
    got = (claimed or []) + [seq for _ in range(3) for seq in receive(other, 10)]
    assert sorted(got) == [LAST + 1, LAST + 2, LAST + 6]


def test_it_takes_over_from_a_batch_whose_rest_is_in_flight(ended: Sessions) -> None:
    """Without a look at what was in flight: all numbers up to the last event are there."""
    late, other = ended.open("late", "other")
    publish(other, 3)
    late.run("begin")
    publish(late, 2)
    assert receive(other, 10) == [LAST + 1, LAST + 2, LAST + 3]
    assert seqs(other.run(*claim(10, LAST + 3))) is None, "whose lease that was is not known"
    assert other.run(*claim(10, LAST + 3, known(other)))[0][-1] == 0
    publish(late, 1)
    late.run("commit")
    publish(other, 1)
    claimed = other.run(*claim(10, LAST + 3, known(other)))
    assert seqs(claimed) == [LAST + 4, LAST + 5, LAST + 6, LAST + 7]
    publish(other, 2)
    assert seqs(other.run(*claim(10, LAST + 7))) == [LAST + 8, LAST + 9]
    assert receive(other, 10) == []


@pytest.mark.short_way
def test_a_long_batch_is_left_where_its_numbers_have_a_gap(ended: Sessions) -> None:
    late, other = ended.open("late", "other")
    publish(other, 12)
    late.run("begin")
    publish(late, 2)
    publish(other, 20)
    rows = other.run(*claim(10, LAST))
    assert (seqs(rows), rows[0][-1] < 0) == (list(range(LAST + 1, LAST + 11)), True)
    rows = other.run(*claim(10, LAST + 10, known(other), opens=False))
    assert seqs(rows) is None
    assert receive(other, 10) == [LAST + 11, LAST + 12, *range(LAST + 15, LAST + 21)]
    rows = other.run(*claim(10, LAST + 20, known(other), opens=False))
    assert seqs(rows) == list(range(LAST + 21, LAST + 31))
    late.run("commit")
    publish(other, 3)
    got: list[int] = []
    for _ in range(8):
        lease = known(other)
        start = got[-1] if got else LAST + 30
        claimed = seqs(other.run(*claim(3, start, lease))) or receive(other, 3)
        got += claimed
    assert sorted(got) == [LAST + 13, LAST + 14, *range(LAST + 31, LAST + 38)]


def test_it_opens_no_batch_that_others_opened_after_its_snapshot(ended: Sessions) -> None:
    slow, other = ended.open("slow", "other")
    publish(other, 2)
    declare(slow, 10, LAST)
    assert receive(other, 10) == [LAST + 1, LAST + 2]
    publish(other, 2)
    assert fetch(slow) is None
    assert receive(slow, 10) == [LAST + 3, LAST + 4]


def test_a_snapshot_from_before_the_last_batch_opens_none(ended: Sessions) -> None:
    """Where others found nothing, the queue's position has not moved, but its snapshot may be newer."""
    slow, other, late = ended.open("slow", "other", "late")
    late.run("begin")
    publish(late, 1)
    declare(slow, 10, LAST + 1)
    late.run("commit")
    assert receive(other, 10) == [LAST + 1]
    assert fetch(slow) is None
    publish(other, 1)
    assert [seq for _ in range(3) for seq in receive(other, 10)] == [LAST + 2]


def test_a_rotation_after_its_snapshot_hides_nothing(ended: Sessions) -> None:
    slow, other = ended.open("slow", "other")
    publish(other, 1)
    declare(slow, 10, LAST)
    other.run("select pgmb.rotate('main')")
    publish(other, 1)
    assert fetch(slow) is None
    assert seqs(other.run(*claim(10, LAST))) is None
    assert [seq for _ in range(2) for seq in receive(other, 10)] == [LAST + 1, (1 << 40) + 1]


def test_made_up_snapshots_do_not_become_the_position(ended: Sessions) -> None:
    admin = ended["admin"]
    publish(admin, 1)
    text, parameters = claim(10, LAST)
    made_up = "'5:9000000000:'::pg_snapshot"
    assert seqs(admin.run(text.replace("pg_current_snapshot()", made_up), parameters)) is None
    assert seqs(admin.run(text, parameters)) == [LAST + 1]


def test_it_settles_also_where_there_is_nothing(ended: Sessions) -> None:
    admin = ended["admin"]
    publish(admin, 1)
    claimed = admin.run(*claim(10, LAST))[0][-1]
    acked = NEXT._replace(claim=claimed)
    settling = statements.claim(NEXT, 10, None, acked, stream=1, segment=0, start=LAST + 1, opens=True)
    assert admin.run(*settling)[0][-1] == 0
    assert lease_state(admin, claimed) == "settled"
    lose_leases(admin, claimed)
    publish(admin, 1)
    with pytest.raises(Exception, match="is lost"):
        admin.run(*settling)
    assert receive(admin, 10) == [LAST + 2]


def test_it_opens_no_batch_over_events_that_came_before_late_ones(ended: Sessions) -> None:
    """They lie behind the end of a lease without a gap, which alone would not tell that they were read."""
    late, other, third = ended.open("late", "other", "third")
    late.run("begin")
    publish(late, 3)
    publish(other, 2)
    assert receive(other, 10) == [LAST + 4, LAST + 5]
    third.run("begin")
    publish(third, 1)
    late.run("commit")
    publish(other, 1)
    assert receive(other, 3) == [LAST + 1, LAST + 2, LAST + 3]
    lease = known(other)
    got = seqs(other.run(*claim(1, LAST + 3, lease))) or []
    third.run("commit")
    got += seqs(other.run(*claim(10, LAST + 3, lease))) or []
    got += [seq for _ in range(3) for seq in receive(other, 10)]
    assert sorted(got) == [LAST + 6, LAST + 7]


def test_a_lease_of_retried_events_tells_nothing_of_the_log(ended: Sessions) -> None:
    admin = ended["admin"]
    publish(admin, 1)
    assert seqs(admin.run(*claim(10, LAST))) == [LAST + 1]
    lease = UUID(bytes=bytes(NEXT._replace(claim=known(admin).claim)))
    admin.run("select pgmb.retry(%s, after => '0')", [lease])
    publish(admin, 2)
    assert receive(admin, 10) == [LAST + 1], "the retried one comes first"
    assert seqs(admin.run(*claim(10, LAST + 2, known(admin)))) is None, "it was not read"
    assert seqs(admin.run(*claim(10, LAST + 1, known(admin)))) == [LAST + 2, LAST + 3]
