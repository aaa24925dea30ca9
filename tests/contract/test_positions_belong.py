"""Promise: a position is accepted only by the stream, the epoch and the history that it was taken from.

Every function that takes a position refuses one of another stream (MB026), of another epoch (MB021), of a
history that was lost (MB023) and of events that retention dropped (MB012). None of them skips events instead.
"""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from harness.sessions import Sessions

ENTRIES = {
    "between, after": "select * from pgmb.between('s', %(given)s, pgmb.position('s'))",
    "between, upto": "select * from pgmb.between('s', pgmb.earliest('s'), %(given)s)",
    "between_filtered": (
        "select * from pgmb.between_filtered('s', %(given)s, pgmb.position('s'), filter => '$.key == null')"
    ),
    "between_group": "select * from pgmb.between_group('g', 's', %(given)s, pgmb.position('s'))",
    "assert_between": "select pgmb.assert_between('s', %(given)s, pgmb.position('s'))",
    "assert_between, part": "select pgmb.assert_between('s', %(given)s, pgmb.position('s'), 0, 1 << 50)",
    "divide, after": "select * from pgmb.divide('s', %(given)s, pgmb.position('s'), 0, 1000)",
    "divide, upto": "select * from pgmb.divide('s', pgmb.earliest('s'), %(given)s, 0, 1000)",
    "seek": "select pgmb.seek('q', %(given)s)",
    "create_queue": "select pgmb.create_queue('new', stream => 's', starting => %(given)s)",
    "confirm": "select pgmb.confirm('s', 'reader', %(given)s)",
}


def value(db: psycopg.Connection[Any], statement: str, *parameters: Any) -> Any:
    ((only,),) = db.execute(statement, parameters).fetchall()
    return only


def refused(db: psycopg.Connection[Any], sqlstate: str, entry: str, given: str) -> None:
    statement = ENTRIES[entry].replace("%(given)s", "%(given)s::pgmb.position")
    with pytest.raises(psycopg.Error) as caught:
        db.execute(statement, {"given": given})
    assert caught.value.sqlstate == sqlstate, caught.value
    assert caught.value.diag.message_hint


@pytest.fixture
def s(db: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    """A stream s with ten events, and a queue q that reads it."""
    db.execute("select pgmb.create_stream('s')")
    publish(db, 10)
    db.execute("select pgmb.create_queue('q', stream => 's')")
    return db


def publish(db: psycopg.Connection[Any], count: int) -> None:
    db.execute("select pgmb.publish('t', to_json(n), stream => 's') from generate_series(1, %s) n", [count])


@pytest.mark.parametrize("taken", ["position", "earliest"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_stream_that_was_created_again_refuses_positions_of_the_one_before(
    s: psycopg.Connection[Any], entry: str, taken: str
) -> None:
    old = value(s, f"select pgmb.{taken}('s')::text")
    s.execute("select pgmb.drop_queue('q')")
    s.execute("select pgmb.drop_stream('s')")
    s.execute("select pgmb.create_stream('s')")
    s.execute("select pgmb.create_queue('q', stream => 's')")
    publish(s, 60)
    refused(s, "MB026", entry, old)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_position_of_another_stream_is_refused(s: psycopg.Connection[Any], entry: str) -> None:
    refused(s, "MB026", entry, value(s, "select pgmb.position('main')::text"))


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_position_of_another_epoch_is_refused(s: psycopg.Connection[Any], entry: str) -> None:
    old = value(s, "select pgmb.position('s')::text")
    s.execute("select pgmb.rebase()")
    publish(s, 10)
    refused(s, "MB021", entry, old)


# Reading up to a position whose history is gone gives what is left, as failOnDataLoss=false does in Spark.
STRICT = [
    entry for entry in ENTRIES if "upto" not in entry and entry not in ("assert_between", "divide, after")
]


@pytest.mark.parametrize("entry", STRICT)
def test_a_position_whose_history_was_dropped_is_refused(s: psycopg.Connection[Any], entry: str) -> None:
    old = value(s, "select pgmb.position('s')::text")
    publish(s, 10)
    drop(s)
    refused(s, "MB012", entry, old)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_position_that_was_rolled_back_is_refused(s: psycopg.Connection[Any], entry: str) -> None:
    with s.transaction(force_rollback=True):
        publish(s, 1)
        lost = value(s, "select pgmb.position('s')::text")
    publish(s, 10)
    refused(s, "MB023", entry, lost)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_position_is_accepted_where_it_belongs(s: psycopg.Connection[Any], entry: str) -> None:
    given = value(s, "select pgmb.position('s')::text")
    publish(s, 10)
    s.execute(ENTRIES[entry].replace("%(given)s", "%(given)s::pgmb.position"), {"given": given})


def drop(db: psycopg.Connection[Any]) -> None:
    """Retention drops all but the newest segment."""
    db.execute("select pgmb.alter_stream('s', keep_for => '0 s', drop_unread => true)")
    db.execute("select pgmb.rotate('s')")
    db.execute("select pgmb.seal('s')")
    assert value(db, "select pgmb.drop_segments('s')") == 1


MOVES = ("seek", "create_queue", "confirm")


@pytest.mark.parametrize("entry", MOVES)
def test_a_position_is_not_accepted_while_its_history_is_being_dropped(
    sessions: Sessions, entry: str
) -> None:
    janitor, reader = sessions.open("janitor", "reader")
    janitor.run("select pgmb.create_stream('s')")
    janitor.run("select pgmb.create_queue('q', stream => 's')")
    start = reader.value("select pgmb.position('s')::text")
    for number in range(3):
        janitor.run("select pgmb.publish('t', to_json(%s::int), stream => 's')", [number])
    janitor.run("select pgmb.alter_stream('s', keep_for => '0 s', drop_unread => true)")
    janitor.run("select pgmb.rotate('s')")
    janitor.run("select pgmb.seal('s')")
    janitor.run("begin")
    assert janitor.value("select pgmb.drop_segments('s')") == 1
    statement = ENTRIES[entry].replace("%(given)s", "%(given)s::pgmb.position")
    moving = reader.start(statement, {"given": start}).blocked()
    janitor.run("commit")
    with pytest.raises(psycopg.Error) as caught:
        moving.result()
    assert caught.value.sqlstate == "MB012"


@pytest.mark.parametrize("entry", MOVES)
def test_retention_waits_for_a_transaction_that_moved_a_reader_back(sessions: Sessions, entry: str) -> None:
    janitor, reader = sessions.open("janitor", "reader")
    janitor.run("select pgmb.create_stream('s', keep_for => '0 s')")
    janitor.run("select pgmb.create_queue('q', stream => 's')")
    start = reader.value("select pgmb.position('s')::text")
    for number in range(3):
        janitor.run("select pgmb.publish('t', to_json(%s::int), stream => 's')", [number])
    janitor.run("select pgmb.ack((select lease from pgmb.receive('q', 10) limit 1))")
    janitor.run("select pgmb.rotate('s')")
    janitor.run("select pgmb.seal('s')")
    reader.run("begin")
    reader.run(ENTRIES[entry].replace("%(given)s", "%(given)s::pgmb.position"), {"given": start})
    assert janitor.value("select pgmb.drop_segments('s')") == 0
    reader.run("commit")
    assert janitor.value("select pgmb.drop_segments('s')") == 0
    read = "select payload from pgmb.between('s', %s::pgmb.position, pgmb.position('s'))"
    assert reader.run(read, [start]) == [(0,), (1,), (2,)]


def test_a_queue_that_exists_is_not_asked_for_the_position_it_started_from(
    s: psycopg.Connection[Any],
) -> None:
    """An application that declares its queue at every start passes the same position for years."""
    start = value(s, "select pgmb.position('s')::text")
    create = "select pgmb.create_queue('new', stream => 's', starting => %s::pgmb.position)"
    assert value(s, create, start) is True
    publish(s, 10)
    drop(s)
    assert value(s, create, start) is False
