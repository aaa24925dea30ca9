"""Lanes: what is urgent comes first, the rest is not forgotten, and each event is in one lane."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

from harness.sessions import Sessions
from harness.states import kept_of_queues, open_generations
from tests.contract.deliveries import Consumer


@pytest.fixture
def one(sessions: Sessions) -> Consumer:
    sessions["admin"].run(
        "select pgmb.create_queue('q', '{job.#}', lanes => '{job.urgent.#,job.soon}', max_attempts => 3)"
    )
    return Consumer(sessions["one"])


def fill(consumer: Consumer, each: int) -> None:
    for number in range(each):
        consumer.publish(None, 2000 + number, topic="job.whenever")
        consumer.publish(None, 1000 + number, topic="job.soon")
        consumer.publish(None, number, topic="job.urgent.now")
    consumer.publish(None, 9999, topic="other")


def test_the_urgent_come_first_mostly_and_the_rest_is_not_forgotten(one: Consumer) -> None:
    fill(one, 60)
    one.session.run("select setseed(0.3)")
    taken = one.take_all(1)
    assert sorted(taken) == [*range(60), *range(1000, 1060), *range(2000, 2060)]
    assert sum(name < 1000 for name in taken[:60]) >= 40
    assert any(name >= 2000 for name in taken[:60]), "one call in eight begins at the other end"


def test_each_lane_keeps_its_order(one: Consumer) -> None:
    fill(one, 20)
    taken = one.take_all(3)
    for lane in range(3):
        assert [n for n in taken if n // 1000 == lane] == [*range(lane * 1000, lane * 1000 + 20)]


@pytest.mark.slow
def test_opposite_orders_do_not_wait_for_each_other(one: Consumer, dsn: str) -> None:
    """Two that ask from opposite ends must neither deadlock nor take each other for a long transaction."""
    fill(one, 150)
    taken: list[int] = []

    def drain() -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            while rows := connection.execute(
                "select lease, payload::text::int from pgmb.receive('q', 1)"
            ).fetchall():
                connection.execute("select pgmb.ack(%s)", [rows[0][0]])
                taken.extend(name for _, name in rows)

    threads = [threading.Thread(target=drain) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(taken) == len(set(taken)) == 450
    assert open_generations(one.session) == 0


def test_settling_dead_letters_seek_and_drop_reach_every_lane(one: Consumer) -> None:
    fill(one, 3)
    while got := one.receive(2):
        one.bury(got)
    assert len(one.dead()) == 9
    assert one.session.value("select pgmb.redrive('q')") == 9
    assert len(one.take_all()) == 9
    one.session.run("select pgmb.seek('q', pgmb.earliest('main'))")
    assert len(one.take_all()) == 9
    one.session.run("select pgmb.drop_queue('q')")
    assert kept_of_queues(one.session) == {}


def test_new_patterns_hold_in_every_lane(one: Consumer) -> None:
    one.session.run("select pgmb.bind('q', '{job.soon,job.whenever}')")
    fill(one, 2)
    assert sorted(one.take_all()) == [1000, 1001, 2000, 2001]


def test_pause_stops_every_lane(one: Consumer) -> None:
    fill(one, 2)
    one.session.run("select pgmb.pause('q')")
    assert one.names() == []
    one.session.run("select pgmb.resume('q')")
    assert len(one.take_all()) == 6


def test_a_role_granted_the_queue_may_settle_in_every_lane(one: Consumer, sessions: Sessions) -> None:
    admin = sessions["admin"]
    role = admin.value("select 'lane_reader_' || pg_backend_pid()")
    admin.run(f"create role {role}")
    try:
        admin.run("select pgmb.grant_consume('q', %s)", [role])
        fill(one, 3)
        one.session.run(f"set role {role}")
        assert len(one.take_all(2)) == 9
    finally:
        one.session.run("reset role")
        admin.run(f"drop owned by {role}")
        admin.run(f"drop role {role}")


@pytest.mark.parametrize("options", ["ordered => true", "max_length => 5"])
def test_what_lanes_exclude(sessions: Sessions, options: str) -> None:
    with pytest.raises(psycopg.Error) as refused:
        sessions["admin"].run(f"select pgmb.create_queue('q', lanes => '{{a}}', {options})")
    assert refused.value.sqlstate == "MB005"


QUEUE_ARGUMENTS = {"queue": "'{}'", "queues": "array['{}']", "into_queue": "'{}'", "group_id": "'{}'"}
"""The arguments that name a queue, or a group that is read by one."""

TAKES_ANY_NAME = {"worker_heartbeat", "subscribe", "resume_subscriptions", "between_group"}
"""Functions that look up no queue: a worker and a group may name queues that do not exist."""

ARGUMENTS = {
    "stream": "'main'",
    "after": "pgmb.position('main')",
    "upto": "pgmb.position('main')",
    "to": "pgmb.position('main')",
    "patterns": "'{#}'",
    "role": "'pgmb_consumer'",
    "url": "'https://receiver.example/'",
    "worker": "gen_random_uuid()",
    "last": "0",
    "attempts": "100",
    "retries": "1",
}
"""What a function is given besides the name of a queue, by the argument's name. Others are the text x."""


def call_for(db: psycopg.Connection[Any], function: int, queue: str) -> str:
    """A call of a function with the name of a queue, and with its other arguments that have no default."""
    ((name, arguments),) = db.execute(
        "select p.proname, array(select row_to_json(a) from unnest(p.proargnames, p.proargmodes)"
        " with ordinality a (name, mode, nth) where coalesce(a.mode, 'i') = 'i'"
        "  and (a.nth <= p.pronargs - p.pronargdefaults or a.name = any (%s)))"
        " from pg_proc p where p.oid = %s",
        [[*QUEUE_ARGUMENTS], function],
    ).fetchall()
    given = {
        one["name"]: QUEUE_ARGUMENTS[one["name"]].format(queue)
        if one["name"] in QUEUE_ARGUMENTS
        else ARGUMENTS.get(one["name"], "'x'")
        for one in arguments
    }
    arguments = ", ".join(f'"{argument}" => {value}' for argument, value in given.items())
    return f"select pgmb.{name}({arguments})"


def test_every_function_refuses_the_name_of_a_lane_or_shard(db: psycopg.Connection[Any]) -> None:
    """A call on one of them would pass the limits of the queue, or lose the events of a part of its keys."""
    db.execute("select pgmb.create_queue('ledger', ordered => true, max_in_flight => 2)")
    db.execute("select pgmb.create_queue('urgent', lanes => '{a}')")
    before = kept_of_queues(db)
    functions = db.execute(
        "select p.oid, p.oid::regprocedure::text from pg_proc p where p.pronamespace = 'pgmb'::regnamespace"
        " and p.proname <> all (%s) and exists ("
        "  select from unnest(p.proargnames, p.proargtypes::oid[]) a (name, type)"
        "  where a.name = any (%s) and a.type in ('text'::regtype, 'text[]'::regtype)) order by 2",
        [[*TAKES_ANY_NAME], [*QUEUE_ARGUMENTS]],
    ).fetchall()
    assert len(functions) > 25
    accepted = []
    for oid, signature in functions:
        for queue in ("ledger/1", "urgent/1"):
            try:
                db.execute(call_for(db, oid, queue).encode())
                accepted.append(signature)
            except psycopg.Error as error:
                if error.sqlstate not in ("MB004", "MB006"):
                    accepted.append(f"{signature}: {error}")
    assert not accepted, "\n".join(accepted)
    assert kept_of_queues(db) == before
