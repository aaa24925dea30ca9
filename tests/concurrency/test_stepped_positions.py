"""A reader never misses, repeats or misorders a commit, however late it comes.

Promises: an event is delivered once its transaction has committed, whatever order the transactions took their
ids and numbers in; what is rolled back is never seen; a prepared transaction counts from COMMIT PREPARED on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from harness.sessions import Session, Sessions
from harness.states import batch_xmax

PUBLISH = "select pgmb.publish('t', to_json(%s::int))"


def publish(session: Session, number: int) -> None:
    session.run(PUBLISH, [number])


def drain(session: Session, queue: str = "q", size: int = 100) -> list[Any]:
    """The payloads of everything there is to receive, acked."""
    payloads: list[Any] = []
    while rows := session.run("select lease, payload from pgmb.receive(%s, %s)", [queue, size]):
        payloads += [payload for _, payload in rows]
        assert session.value("select pgmb.ack(%s)", [rows[0][0]]) == len(rows)
    return payloads


def between(session: Session, after: str, upto: str, stream: str = "main") -> list[Any]:
    rows = session.run(
        "select payload from pgmb.between(%s, %s::pgmb.position, %s::pgmb.position)", [stream, after, upto]
    )
    return [payload for (payload,) in rows]


def position(session: Session) -> str:
    return str(session.value("select pgmb.position()::text"))


@pytest.fixture
def two_phase(sessions: Sessions) -> Iterator[None]:
    """Leaves no prepared transaction behind when the test fails half-way."""
    yield
    observer = sessions["cleaner"]
    for (name,) in observer.run("select gid from pg_prepared_xacts where database = current_database()"):
        observer.run(f"rollback prepared '{name}'")


@pytest.fixture(params=["queue", "positions"])
def reader(request: pytest.FixtureRequest, sessions: Sessions) -> Any:
    """Reads what is new, either as a queue or between positions: `reader()` gives the payloads."""
    session = sessions["reader"]
    if request.param == "queue":
        session.run("select pgmb.create_queue('q')")
        return lambda: drain(session)
    last = position(session)

    def read() -> list[Any]:
        nonlocal last
        after, last = last, position(session)
        return between(session, after, last)

    return read


def test_a_transaction_that_commits_late_is_delivered_late_not_lost(sessions: Sessions, reader: Any) -> None:
    late, other = sessions.open("late", "other")
    late.run("begin")
    publish(late, 1)
    publish(other, 2)
    assert reader() == [2]
    publish(other, 3)
    publish(late, 4)
    assert reader() == [3]
    late.run("commit")
    publish(other, 5)
    assert reader() == [1, 4, 5]
    assert reader() == []


def test_a_late_commit_is_found_though_nothing_is_published_after_it(sessions: Sessions, reader: Any) -> None:
    late, other = sessions.open("late", "other")
    late.run("begin")
    publish(late, 1)
    publish(other, 2)
    assert reader() == [2]
    late.run("commit")
    assert reader() == [1]
    assert reader() == []


def test_an_unlisted_transaction_above_the_snapshot_is_not_lost(sessions: Sessions) -> None:
    """The trap: late has an xid at or above the snapshot's xmax, so that no list names it, and a low
    number."""
    early, late, consumer = sessions.open("early", "late", "consumer")
    consumer.run("select pgmb.create_queue('q')")
    for attempt in range(10):
        early.run("begin")
        early.run("select pg_current_xact_id()")
        late.run("begin")
        late_xid = late.value("select pg_current_xact_id()::text::bigint")
        publish(late, 1)
        publish(early, 2)
        early.run("commit")
        assert drain(consumer, size=1) == [2]
        xmax = batch_xmax(consumer)
        late.run("commit")
        assert drain(consumer) == [1], f"attempt {attempt}"
        if xmax <= late_xid:
            return
    pytest.fail("other transactions ended in between each time: the trap was never set")


def test_an_unlisted_transaction_is_not_lost_between_positions(sessions: Sessions) -> None:
    late, reader = sessions.open("late", "reader")
    for _ in range(10):
        before = position(reader)
        late.run("begin")
        publish(late, 1)
        late_xid = late.value("select pg_current_xact_id()::text::bigint")
        middle = position(reader)
        publish(late, 2)
        late.run("commit")
        after = position(reader)
        assert between(reader, before, middle) == []
        assert between(reader, middle, after) == [1, 2]
        assert between(reader, before, after) == [1, 2]
        xmax = reader.value("select pg_snapshot_xmax((%s::pgmb.position).snapshot)::text::bigint", [middle])
        if xmax <= late_xid:
            return
    pytest.fail("other transactions ended in between each time: the trap was never set")


def test_a_transaction_that_took_its_xid_early_and_published_late(sessions: Sessions, reader: Any) -> None:
    early, other = sessions.open("early", "other")
    early.run("begin")
    early.run("select pg_current_xact_id()")
    for number in range(1, 4):
        publish(other, number)
        assert reader() == [number]
    publish(early, 4)
    publish(other, 5)
    assert reader() == [5]
    early.run("commit")
    assert reader() == [4]


@pytest.mark.parametrize("look_between", [False, True])
def test_writers_that_serialise_on_a_row_are_delivered_in_commit_order(
    sessions: Sessions, reader: Any, look_between: bool
) -> None:
    """B took its xid first, waited for A to publish and commit, then published: A's event comes first."""
    a, b = sessions.open("a", "b")
    a.run("create table account (id int primary key, balance int)")
    a.run("insert into account values (1, 0)")
    b.run("begin")
    b_xid = b.value("select pg_current_xact_id()::text::bigint")
    a.run("begin")
    a.run("update account set balance = 1 where id = 1")
    waiting = b.start("update account set balance = 2 where id = 1").blocked()
    a.run("select pgmb.publish('account', '\"a\"', key => '1')")
    assert a.value("select pg_current_xact_id()::text::bigint") > b_xid
    a.run("commit")
    waiting.result()
    seen = reader() if look_between else []
    b.run("select pgmb.publish('account', '\"b\"', key => '1')")
    b.run("commit")
    assert seen + reader() == ["a", "b"]


def test_a_position_shows_no_effect_without_its_cause(sessions: Sessions) -> None:
    """No snapshot sees B without A when B waited for A: at no cut does b stand alone."""
    a, b, reader = sessions.open("a", "b", "reader")
    a.run("create table account (id int primary key)")
    a.run("insert into account values (1)")
    start = position(reader)
    b.run("begin")
    b.run("select pg_current_xact_id()")
    a.run("begin")
    a.run("select from account where id = 1 for update")
    waiting = b.start("select from account where id = 1 for update").blocked()
    cuts = [position(reader)]
    publish(a, 1)
    cuts.append(position(reader))
    a.run("commit")
    waiting.result()
    cuts.append(position(reader))
    publish(b, 2)
    cuts.append(position(reader))
    b.run("commit")
    cuts.append(position(reader))
    assert [between(reader, start, cut) for cut in cuts] == [[], [], [1], [1], [1, 2]]


def test_savepoints_deliver_what_was_kept_once(sessions: Sessions, reader: Any) -> None:
    writer = sessions["writer"]
    writer.run("begin")
    publish(writer, 1)
    writer.run("savepoint a")
    publish(writer, 2)
    writer.run("savepoint b")
    publish(writer, 3)
    writer.run("rollback to a")
    publish(writer, 4)
    writer.run("release a")
    writer.run("savepoint c")
    publish(writer, 5)
    assert reader() == []
    writer.run("rollback to c")
    publish(writer, 6)
    writer.run("commit")
    assert reader() == [1, 4, 6]
    assert reader() == []


def test_a_savepoint_rolled_back_after_a_reader_looked_is_never_seen(sessions: Sessions, reader: Any) -> None:
    writer, other = sessions.open("writer", "other")
    writer.run("begin")
    writer.run("savepoint a")
    publish(writer, 1)
    publish(other, 2)
    assert reader() == [2]
    writer.run("rollback to a")
    publish(writer, 3)
    publish(other, 4)
    assert reader() == [4]
    writer.run("commit")
    assert reader() == [3]


def test_a_rollback_is_never_seen(sessions: Sessions, reader: Any) -> None:
    writer, other = sessions.open("writer", "other")
    writer.run("begin")
    publish(writer, 1)
    publish(other, 2)
    assert reader() == [2]
    writer.run("rollback")
    publish(other, 3)
    assert reader() == [3]
    assert reader() == []


def test_a_killed_publisher_is_never_seen(sessions: Sessions, reader: Any) -> None:
    writer, other = sessions.open("writer", "other")
    writer.run("begin")
    publish(writer, 1)
    publish(other, 2)
    assert reader() == [2]
    writer.terminate()
    publish(other, 3)
    assert reader() == [3]


@pytest.mark.usefixtures("two_phase")
def test_a_prepared_publish_is_delivered_once_it_is_committed(sessions: Sessions, reader: Any) -> None:
    writer, other = sessions.open("writer", "other")
    writer.run("begin")
    publish(writer, 1)
    writer.run("prepare transaction 'kept'")
    other.run("begin")
    publish(other, 2)
    other.run("prepare transaction 'dropped'")
    publish(other, 3)
    assert reader() == [3]
    writer.run("commit prepared 'kept'")
    writer.run("rollback prepared 'dropped'")
    assert reader() == [1]
    assert reader() == []


@pytest.mark.usefixtures("two_phase")
def test_a_prepared_publish_outlives_rotation_and_holds_off_sealing(sessions: Sessions, reader: Any) -> None:
    writer, janitor = sessions.open("writer", "janitor")
    publish(writer, 0)
    writer.run("begin")
    publish(writer, 1)
    writer.run("prepare transaction 'slow'")
    assert janitor.value("select pgmb.rotate()") == 1
    publish(writer, 2)
    for _ in range(2):
        assert janitor.value("select pgmb.seal()") == 0, "a writer can still reach the segment"
    assert reader() == [0, 2]
    janitor.run("commit prepared 'slow'")
    assert janitor.value("select pgmb.seal()") == 1
    publish(writer, 3)
    assert reader() == [1, 3]


def test_a_publisher_stopped_across_rotations_is_delivered(sessions: Sessions, reader: Any) -> None:
    """It took its number in segment 0 and sits there. The second segment after it waits for its end."""
    slow, other, janitor = sessions.open("slow", "other", "janitor")
    slow.run("begin")
    publish(slow, 1)
    opened = []
    for number in (2, 3):
        opened.append(janitor.value("select pgmb.rotate()"))
        publish(other, number)
        janitor.run("select pgmb.seal()")
        assert reader() == [number]
    assert opened == [1, None]
    assert janitor.value("select count(*) from pgmb.segment where sealed_at is not null and number = 0") == 0
    publish(slow, 4)
    slow.run("commit")
    assert janitor.value("select pgmb.rotate()") == 2
    janitor.run("select pgmb.seal()")
    assert janitor.value("select count(*) from pgmb.segment where sealed_at is not null") == 2
    assert reader() == [1, 4]


def test_a_rotation_that_was_rolled_back_leaves_nothing_unsealed(sessions: Sessions, reader: Any) -> None:
    """The sequence has moved on although the rotation is gone: its segment is closed by the next one."""
    writer, janitor = sessions.open("writer", "janitor")
    publish(writer, 1)
    janitor.run("begin")
    janitor.run("select pgmb.rotate()")
    janitor.run("rollback")
    publish(writer, 2)
    for _ in range(3):
        janitor.run("select pgmb.rotate()")
    janitor.run("select pgmb.seal()")
    publish(writer, 3)
    assert janitor.run("select number from pgmb.segment where last_seq is not null order by 1") == [
        (0,),
        (1,),
    ]
    assert reader() == [1, 2, 3]


def test_a_sealed_segment_refuses_a_stray_write_loudly(sessions: Sessions) -> None:
    writer, janitor = sessions.open("writer", "janitor")
    publish(writer, 1)
    janitor.run("select pgmb.rotate()")
    assert janitor.value("select pgmb.seal()") == 1
    with pytest.raises(Exception, match="sealed"):
        janitor.run("insert into pgmb.log_main (seq, topic, payload) values (5, 't', '1')")


def test_a_tick_in_a_long_transaction_stalls_nobody(sessions: Sessions) -> None:
    ticker, other, janitor = sessions.open("ticker", "other", "janitor")
    for session in (other, janitor):
        session.run("set lock_timeout = '1s'")
    publish(other, 1)
    ticker.run("begin")
    assert ticker.value("select pgmb.tick()") is not None
    publish(other, 2)
    first = other.value("select pgmb.tick()")
    assert first is not None
    publish(ticker, 3)
    publish(other, 4)
    assert other.value("select pgmb.tick()") > first
    other.run("select pgmb.create_queue('q', starting => pgmb.earliest())")
    assert drain(other) == [1, 2, 4]
    assert janitor.value("select pgmb.rotate()") == 1
    other.run("select pgmb.confirm('main', 'spark', pgmb.position())")
    ticker.run("commit")
    assert drain(other) == [3]
    assert janitor.value("select pgmb.seal()") == 1


def test_a_tick_sees_what_was_unfinished_at_the_last_one(sessions: Sessions) -> None:
    late, ticker = sessions.open("late", "ticker")
    late.run("begin")
    publish(late, 1)
    first = ticker.value("select pgmb.tick()")
    assert ticker.value("select pgmb.tick()") is None
    late.run("commit")
    second = ticker.value("select pgmb.tick()")
    assert second is not None, "the event would sit unseen until the next publish"
    assert ticker.value("select pgmb.tick()") is None
    assert ticker.run(
        "select payload from pgmb.between('main',"
        " coalesce(pgmb.position_of('main', %s), pgmb.earliest()), pgmb.position_of('main', %s))",
        [first, second],
    ) == [(1,)]
    late.run("begin")
    publish(late, 2)
    ticker.run("select pgmb.tick()")
    late.run("rollback")
    publish(late, 3)
    assert ticker.value("select pgmb.tick()") is not None


def test_a_pair_of_positions_gives_the_same_events_whenever_it_is_read(sessions: Sessions) -> None:
    writers = sessions.open("w0", "w1", "w2")
    reader = sessions["reader"]
    cuts = [position(reader)]
    for step in range(30):
        writer = writers[step % 3]
        if step % 3 == step // 9 % 3:
            writer.run("begin")
        publish(writer, step)
        cuts.append(position(reader))
        if step % 5 == 4:
            for each in writers:
                each.run("rollback" if step % 2 else "commit")
            cuts.append(position(reader))
    first = [between(reader, after, upto) for after, upto in itertools.pairwise(cuts)]
    for each in writers:
        each.run("commit")
    sessions["janitor"].run("select pgmb.rotate()")
    sessions["janitor"].run("select pgmb.seal()")
    again = [between(reader, after, upto) for after, upto in itertools.pairwise(cuts)]
    assert again == first
    flat = [payload for batch in first for payload in batch]
    assert len(flat) == len(set(flat))
    assert sorted(flat) == sorted(between(reader, cuts[0], cuts[-1]))


def test_pages_of_a_batch_join_without_gap_or_repeat(sessions: Sessions) -> None:
    late, other = sessions.open("late", "other")
    late.run("begin")
    publish(late, 1)
    publish(other, 0)
    after = position(other)
    for number in range(2, 8):
        publish(other, number)
    other.run("select pgmb.rotate()")
    publish(late, 8)
    publish(other, 9)
    late.run("commit")
    upto = position(other)
    pages: list[Any] = []
    place = 0
    while rows := other.run(
        "select seq, payload from pgmb.between('main', %s::pgmb.position, %s::pgmb.position, %s, 3)",
        [after, upto, place],
    ):
        pages += [payload for _, payload in rows]
        place = rows[-1][0]
    assert pages == [1, 2, 3, 4, 5, 6, 7, 8, 9]
