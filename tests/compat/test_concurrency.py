"""Promises: no two readers get the same message, none is lost when one is killed, nobody waits in vain."""

from __future__ import annotations

import collections
import random
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import psycopg
import pytest
from psycopg import errors

from harness.sessions import Sessions
from harness.waiting import until_true


def ask(connection: psycopg.Connection[Any], statement: str, *arguments: Any) -> list[Any]:
    rows = connection.execute(statement.encode(), arguments).fetchall()
    return [row[0] if len(row) == 1 else row for row in rows]


class Worker(threading.Thread):
    """Reads, and settles in one of the ways that there are, or not at all."""

    def __init__(self, dsn: str, seed: int, stop: threading.Event) -> None:
        super().__init__()
        self.dsn = dsn
        self.chance = random.Random(seed)
        self.stop = stop
        self.delivered: list[tuple[int, int]] = []
        self.removed: list[int] = []
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            with psycopg.connect(self.dsn, autocommit=True) as connection:
                while not self.stop.is_set():
                    try:
                        self.turn(connection)
                    except (errors.SerializationFailure, errors.DeadlockDetected):
                        continue
                    except psycopg.Error as error:
                        # Held up for a second by a loaded machine: what it read belongs to others now.
                        if error.sqlstate != "MB011":
                            raise
        except BaseException as failure:
            self.failure = failure

    def turn(self, connection: psycopg.Connection[Any]) -> None:
        if self.chance.random() < 0.2:
            self.removed += ask(connection, "select msg_id from pgmq.pop('q', 3)")
            return
        got = ask(
            connection,
            "select msg_id, read_ct from pgmq.read('q', %s, %s)",
            *(self.chance.choice([0, 1, 1, 2]), self.chance.choice([1, 5, 20])),
        )
        self.delivered += got
        numbers = [number for number, _ in got]
        if not numbers:
            time.sleep(0.05)
            return
        way = self.chance.choice(["whole", "whole", "some", "singly", "archive", "later", "forgotten"])
        if way == "whole":
            self.removed += ask(connection, "select pgmq.delete('q', %s::bigint[])", numbers)
        elif way == "some":
            self.removed += ask(connection, "select pgmq.delete('q', %s::bigint[])", numbers[::2])
        elif way == "archive":
            self.removed += ask(connection, "select pgmq.archive('q', %s::bigint[])", numbers)
        elif way == "later":
            ask(connection, "select msg_id from pgmq.set_vt('q', %s::bigint[], 0)", numbers[1:])
        elif way == "singly":
            for number in numbers:
                if ask(connection, "select pgmq.delete('q', %s::bigint)", number) == [True]:
                    self.removed.append(number)


def send(dsn: str, seed: int, count: int, sent: list[int]) -> None:
    chance = random.Random(seed)
    with psycopg.connect(dsn, autocommit=True) as connection:
        while len(sent) < count:
            with connection.transaction(force_rollback=chance.random() < 0.1) as transaction:
                size, delay = chance.choice([1, 3, 30]), chance.choice([0, 0, 0, 1])
                numbers = ask(
                    connection,
                    "select pgmq.send_batch('q', array_fill('{}'::jsonb, array[%s::int]), %s)",
                    *(size, delay),
                )
                time.sleep(chance.choice([0, 0, 0.01]))
            if not transaction.force_rollback:
                sent += numbers


def test_every_message_is_removed_once(dsn: str, ours: psycopg.Connection[Any]) -> None:
    stop = threading.Event()
    seed = random.randrange(1 << 30)
    workers = [Worker(dsn, seed + n, stop) for n in range(5)]
    sent: list[list[int]] = [[], []]
    senders = [threading.Thread(target=send, args=(dsn, seed + n, 200, mine)) for n, mine in enumerate(sent)]
    try:
        for thread in (*workers, *senders):
            thread.start()
        for sender in senders:
            sender.join()
        until_true(
            lambda: (
                any(worker.failure for worker in workers)
                or ask(ours, "select queue_length from pgmq.metrics('q')") == [0]
            )
        )
    finally:
        stop.set()
        for worker in workers:
            worker.join()
    assert [worker.failure for worker in workers] == [None] * len(workers)
    removed = collections.Counter(number for worker in workers for number in worker.removed)
    assert removed == collections.Counter([*sent[0], *sent[1]]), seed
    # Each reading of a message has a number of its own.
    delivered = collections.Counter(pair for worker in workers for pair in worker.delivered)
    assert [pair for pair, times in delivered.items() if times > 1] == [], seed
    assert ask(ours, "select count(*) from pgmq.parked") == [0]
    assert ask(ours, "select count(*) from pgmq.passed_over") == [0]


def test_a_reader_that_is_killed_loses_nothing(dsn: str, ours: psycopg.Connection[Any]) -> None:
    ask(ours, "select pgmq.send_batch('q', array_fill('{}'::jsonb, array[10]))")
    program = (
        "import psycopg, sys, time\n"
        "connection = psycopg.connect(sys.argv[1], autocommit=True)\n"
        "print(len(connection.execute(\"select * from pgmq.read('q', 1, 10)\").fetchall()), flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, dsn], stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout
        assert reader.stdout.readline() == "10\n"
        reader.send_signal(signal.SIGKILL)
    seen: set[tuple[int, int]] = set()

    def came_back() -> bool:
        seen.update(ask(ours, "select msg_id, read_ct from pgmq.read('q', 600, 10)"))
        return len(seen) == 10

    until_true(came_back)
    assert seen == {(number, 2) for number in range(1, 11)}


def test_a_late_commit_is_read(ours: psycopg.Connection[Any], sessions: Sessions) -> None:
    late = sessions["late"]
    late.run("begin")
    assert late.run("select pgmq.send('q', '{}')") == [(1,)]
    assert ask(ours, "select pgmq.send('q', '{}')") == [2]
    assert ask(ours, "select msg_id from pgmq.read('q', 60, 10)") == [2]
    assert ask(ours, "select pgmq.delete('q', 1::bigint)") == [False]
    late.run("commit")
    assert ask(ours, "select queue_length from pgmq.metrics('q')") == [2]
    assert ask(ours, "select msg_id from pgmq.read('q', 60, 10)") == [1]
    assert sorted(ask(ours, "select pgmq.delete('q', '{1,2}'::bigint[])")) == [1, 2]


def test_who_reads_and_stays_open_loses_it(ours: psycopg.Connection[Any], sessions: Sessions) -> None:
    ask(ours, "select pgmq.send('q', '{}')")
    slow = sessions["slow"]
    slow.run("begin")
    assert slow.run("select msg_id from pgmq.read('q', 60, 10)") == [(1,)]
    assert ask(ours, "select msg_id from pgmq.read('q', 60, 10)") == [1]
    with pytest.raises(psycopg.Error) as refused:
        slow.run("commit")
    assert refused.value.sqlstate == "MB011"
    assert ask(ours, "select pgmq.delete('q', 1::bigint)") == [True]


def test_a_message_that_is_being_read_can_be_deleted(
    ours: psycopg.Connection[Any], sessions: Sessions
) -> None:
    ask(ours, "select pgmq.send('q', '{}')")
    reader, other = sessions["reader"], sessions["other"]
    reader.run("begin")
    reader.run("select msg_id from pgmq.read('q', 60, 10)")
    deleting = other.start("select pgmq.delete('q', 1::bigint)").blocked()
    reader.run("commit")
    assert deleting.result() == [(True,)]
    assert ask(ours, "select queue_length from pgmq.metrics('q')") == [0]


def test_settling_parts_of_one_read_does_not_wait(ours: psycopg.Connection[Any], sessions: Sessions) -> None:
    ask(ours, "select pgmq.send_batch('q', array_fill('{}'::jsonb, array[20]))")
    ask(ours, "select msg_id from pgmq.read('q', 1, 20)")
    one = sessions["one"]
    one.run("begin")
    assert one.run("select pgmq.delete('q', 20::bigint)") == [(True,)]
    assert ask(ours, "select pgmq.delete('q', 1::bigint)") == [True]
    # Its time passes: a read leaves it to the one who settles it.
    time.sleep(1.2)
    assert ask(ours, "select msg_id from pgmq.read('q', 60, 10)") == []
    one.run("rollback")
    assert ask(ours, "select msg_id from pgmq.read('q', 60, 20)") == list(range(2, 21))


def test_senders_do_not_wait_for_each_other_when_they_notify(
    ours: psycopg.Connection[Any], sessions: Sessions
) -> None:
    """PGMQ: the second waits for the first one's commit, for the row that holds the throttle."""
    ask(ours, "select pgmq.enable_notify_insert('q', 0)")
    first, second = sessions["first"], sessions["second"]
    for sender in (first, second):
        sender.run("begin")
        sender.run("select pgmq.send('q', '{}')")
    second.run("commit")
    first.run("commit")
    ours.execute('listen "pgmq.q_q.INSERT"')
    ask(ours, "select pgmb.tick('pgmq.q')")
    assert [note.channel for note in ours.notifies(timeout=30, stop_after=1)] == ["pgmq.q_q.INSERT"]
    assert ask(
        ours, "select last_notified_at > now() - interval '1 minute' from pgmq.list_notify_insert_throttles()"
    ) == [True]
    ask(ours, "select pgmq.update_notify_insert('q', 3600000)")
    for _ in range(2):
        ask(ours, "select pgmq.send('q', '{}')")
        ask(ours, "select pgmb.tick('pgmq.q')")
    assert len(list(ours.notifies(timeout=1))) == 1


def test_groups_are_read_side_by_side(ours: psycopg.Connection[Any], sessions: Sessions) -> None:
    """PGMQ: one caller locks the heads of all groups, and the others get nothing."""
    ask(
        ours,
        "select pgmq.send_batch('q', array_fill('{}'::jsonb, array[6]),"
        " array(select jsonb_build_object('x-pgmq-group', g) from unnest('{a,a,b,b,c,c}'::text[]) g))",
    )
    assert ask(ours, "select msg_id from pgmq.read_grouped('q', 0, 1)") == [1]
    first, second = sessions["first"], sessions["second"]
    first.run("begin")
    assert first.run("select msg_id from pgmq.read_grouped('q', 60, 2)") == [(1,), (2,)]
    second.run("begin")
    assert second.run("select msg_id from pgmq.read_grouped('q', 60, 2)") == [(3,), (4,)]
    assert ask(ours, "select msg_id from pgmq.read_grouped_rr('q', 60, 9)") == [5, 6]
    first.run("commit")
    second.run("commit")
    assert ask(ours, "select msg_id from pgmq.read_grouped('q', 60, 9)") == []


def test_a_grouped_read_ends_a_group_before_a_message_that_another_read_holds(
    ours: psycopg.Connection[Any], sessions: Sessions
) -> None:
    ask(ours, "select pgmq.send_batch('q', array(select to_jsonb(n) from generate_series(1, 3) n))")
    other = sessions["other"]
    ours.execute("set lock_timeout = '5s'")
    for way in ("read_grouped", "read_grouped_rr"):
        # Parks the messages and leaves them visible.
        ask(ours, "select msg_id from pgmq.read_grouped('q', 0, 3)")
        other.run("begin")
        assert other.run("select msg_id from pgmq.read('q', 60, 1, '2')") == [(2,)]
        assert ask(ours, f"select msg_id from pgmq.{way}('q', 0, 3)") == [1]
        other.run("rollback")
        assert ask(ours, f"select msg_id from pgmq.{way}('q', 0, 3)") == [1, 2, 3]


def test_a_grouped_read_waits_for_messages_of_a_read_that_another_settles(
    ours: psycopg.Connection[Any], sessions: Sessions
) -> None:
    """Those that it leaves come back, and the rest of their group comes after them."""
    ask(ours, "select pgmq.send_batch('q', array_fill('{}'::jsonb, array[21]))")
    assert len(ask(ours, "select msg_id from pgmq.read('q', 60, 20)")) == 20
    other = sessions["other"]
    other.run("begin")
    assert other.run("select pgmq.delete('q', 20::bigint)") == [(True,)]
    assert ask(ours, "select msg_id from pgmq.read_grouped('q', 60, 1)") == []
    other.run("rollback")
    assert ask(ours, "select msg_id from pgmq.read_grouped('q', 60, 1)") == []
    ask(ours, "select pgmq.delete('q', array(select n from generate_series(1, 20) n)::bigint[])")
    assert ask(ours, "select msg_id from pgmq.read_grouped('q', 60, 1)") == [21]


def test_polling_holds_nobody_up(ours: psycopg.Connection[Any], sessions: Sessions) -> None:
    waiting = sessions["waiting"]
    ask(ours, "select pgmq.send('q', '{}', 3600)")
    polling = waiting.start("select msg_id from pgmq.read_with_poll('q', 60, 1, 60, 20)")
    time.sleep(0.1)
    assert ask(ours, "select msg_id from pgmq.read('q', 60, 1)") == []
    assert not polling.done()
    ask(ours, "select pgmq.send('q', '{}')")
    assert polling.result(60) == [(2,)]
