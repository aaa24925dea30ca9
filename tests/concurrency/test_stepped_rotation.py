"""Promise: a publishing transaction may be as long as it likes, and rotate as often as it likes beside it.

A transaction looks for new segments when it first locks the log, and not again. A number from a segment that
was attached later would find no partition: such a segment opens only when the transaction has ended.
"""

from __future__ import annotations

import pytest

from harness.sessions import Session, Sessions

LEVELS = ["read committed", "repeatable read", "serializable"]
STATEMENTS = {
    "publish": "select pgmb.publish('t', '1')",
    "publish_many": "select pgmb.publish_many('t', array['1']::json[])",
    "insert": "insert into pgmb.log_main (topic, payload) values ('t', '1')",
}


def rotate(session: Session) -> int | None:
    """Rotate at a slow pace: the segment before was closed an hour ago, so that one is attached ahead."""
    session.run("update pgmb.segment set closed_at = closed_at - interval '1 hour'")
    number: int | None = session.value("select pgmb.rotate()")
    return number


def events(session: Session) -> int:
    return int(session.value("select count(*) from pgmb.log_main"))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", STATEMENTS)
def test_a_transaction_publishes_across_any_number_of_rotations(
    sessions: Sessions, how: str, level: str
) -> None:
    writer, janitor = sessions.open("writer", "janitor")
    # From now on the statements' plans are cached, and nothing makes the session look into the catalog.
    for _ in range(10):
        writer.run(STATEMENTS[how])
    writer.run(f"begin isolation level {level}")
    for _ in range(3):
        writer.run(STATEMENTS[how])
        # Twice, as its first write to a segment makes a session look into the catalog.
        rotate(janitor)
        rotate(janitor)
    writer.run("commit")
    assert events(janitor) == 13


def test_a_copy_runs_across_any_number_of_rotations(sessions: Sessions) -> None:
    """One statement: it finds its segments at its beginning."""
    writer, janitor = sessions.open("writer", "janitor")
    with writer.connection.cursor().copy("copy pgmb.log_main (topic, payload) from stdin") as copy:
        for _ in range(5):
            # More than the client and the server keep back, so that the rows are written meanwhile.
            for _ in range(3000):
                copy.write_row(["t", '"' + "x" * 100 + '"'])
            rotate(janitor)
    assert events(janitor) == 15_000


def test_rotation_waits_for_transactions_that_do_not_see_the_next_segment(sessions: Sessions) -> None:
    """And for no others: one that began later does not hold it up."""
    early, late, janitor = sessions.open("early", "late", "janitor")
    early.run("begin")
    early.run("select pgmb.publish('t', '1')")
    assert rotate(janitor) == 1
    assert rotate(janitor) is None
    late.run("begin")
    late.run("select pgmb.publish('t', '1')")
    assert rotate(janitor) is None
    early.run("commit")
    assert rotate(janitor) == 2
    late.run("select pgmb.publish('t', '1')")
    late.run("commit")
    assert rotate(janitor) == 3
    assert events(janitor) == 3


def test_a_prepared_publisher_does_not_hold_rotation_up(sessions: Sessions) -> None:
    """It cannot write any more, however long it stays."""
    writer, janitor = sessions.open("writer", "janitor")
    writer.run("begin")
    writer.run("select pgmb.publish('t', '1')")
    assert rotate(janitor) == 1
    assert rotate(janitor) is None
    writer.run("prepare transaction 'publisher'")
    try:
        assert rotate(janitor) == 2
    finally:
        janitor.run("commit prepared 'publisher'")
    assert events(janitor) == 1


def test_a_transaction_that_rotates_publishes_on_both_sides(sessions: Sessions) -> None:
    both, janitor = sessions.open("both", "janitor")
    both.run("begin")
    both.run("select pgmb.publish('t', '1')")
    assert rotate(both) == 1
    both.run("select pgmb.publish('t', '1')")
    assert rotate(both) is None, "the next one was attached by this transaction: nobody else sees it"
    both.run("commit")
    assert rotate(janitor) == 2
    assert events(janitor) == 2


def test_a_stream_rotates_while_a_segment_is_vacuumed(sessions: Sessions) -> None:
    """Autovacuum of a large segment takes minutes, and on a busy stream it seldom rests."""
    writer, vacuum, janitor = sessions.open("writer", "vacuum", "janitor")
    writer.run(STATEMENTS["publish"])
    # The lock that it holds.
    vacuum.run("begin")
    vacuum.run("lock table only pgmb.segment_1_0 in share update exclusive mode")
    assert [rotate(janitor) for _ in range(3)] == [1, 2, 3]
    writer.run(STATEMENTS["publish"])
    vacuum.run("rollback")
    assert events(janitor) == 2
