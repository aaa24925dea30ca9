"""What the README of @haathie/pgmb shows: its SQL to the letter, its calls as the how-to page says."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import psycopg
import pytest

import pgmb
from harness.waiting import until
from tests.app.stage import settled, working

USERS = """
CREATE TABLE users (
	id SERIAL PRIMARY KEY,
	created_at TIMESTAMPTZ NOT NULL DEFAULT NOW(),
	name TEXT NOT NULL,
	email TEXT NOT NULL UNIQUE
);
"""
EVERYTHING = "SELECT pgmb.push_table_mutations('public.users'::regclass);"
INSERTS_ALONE = """
SELECT pgmb.push_table_mutations(
	'public.users'::regclass,
	delete := FALSE,
	update := FALSE
);
"""
SERIALISER = """
REPLACE FUNCTION serialise_record_for_event(
	tabl oid,
	op TEXT, -- 'INSERT', 'UPDATE', 'DELETE'
	record RECORD,
	serialised OUT JSONB,
	emit OUT BOOLEAN
) AS $$
BEGIN
	if tabl = 'public.users'::regclass THEN
		serialised := jsonb_build_object(
			'id', record.id,
			'name', record.name
			-- note: we're omitting email & created_at from the event payload
		);
		-- don't emit events for spam users, just a demo condition
		emit := record.email NOT LIKE '%@spam.com';
		RETURN;
	END IF;

	-- add other table customisations here, if needed

	serialised := to_jsonb(record);
	emit := TRUE;
END
$$ LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE
	SECURITY INVOKER;
"""
TOPICS = "s.params @> jsonb_build_object('topics', ARRAY[e.topic])"
PARTITION = """s.params @> jsonb_build_object(
			'topics', ARRAY[e.topic],
			'partition', hashtext(e.id) % 3
		)"""


@pytest.fixture
def users(db: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    db.execute(USERS)
    db.execute("select pgmb.create_queue('all')")
    return db


def seen(db: psycopg.Connection[Any]) -> list[tuple[str, Any, Any]]:
    rows = db.execute("select topic, payload, headers from pgmb.receive('all')").fetchall()
    return [(topic, payload, headers) for topic, payload, headers in rows]


# -- automatic table events


def test_every_mutation_is_an_event(users: psycopg.Connection[Any]) -> None:
    users.execute(EVERYTHING)
    users.execute("insert into users (name, email) values ('Ann', 'ann@example.org')")
    users.execute("update users set name = 'Anna'")
    users.execute("delete from users")
    inserted, updated, deleted = seen(users)
    assert [inserted[0], updated[0], deleted[0]] == [
        "public.users.insert",
        "public.users.update",
        "public.users.delete",
    ]
    assert inserted[1]["email"] == "ann@example.org"
    assert (updated[1]["name"], updated[2]["old"]["name"]) == ("Anna", "Ann")
    assert deleted[1]["name"] == "Anna"


def test_some_kinds_of_mutation_may_be_left_out(users: psycopg.Connection[Any]) -> None:
    users.execute(INSERTS_ALONE)
    users.execute("insert into users (name, email) values ('Ann', 'ann@example.org')")
    users.execute("update users set name = 'Anna'")
    users.execute("delete from users")
    assert [topic for topic, _, _ in seen(users)] == ["public.users.insert"]


def test_what_is_rolled_back_is_no_event(users: psycopg.Connection[Any]) -> None:
    users.execute(EVERYTHING)
    with users.transaction(force_rollback=True):
        users.execute("insert into users (name, email) values ('Ann', 'ann@example.org')")
    assert seen(users) == []


def test_the_serialiser_decides_and_reshapes(users: psycopg.Connection[Any]) -> None:
    """As it stands there, but for `REPLACE FUNCTION`, which no PostgreSQL has, and the missing schema."""
    text = SERIALISER.replace("REPLACE FUNCTION ", "CREATE OR REPLACE FUNCTION pgmb.")
    users.execute(text)
    users.execute(EVERYTHING)
    users.execute("insert into users (name, email) values ('Ann', 'ann@example.org'), ('Spam', 'x@spam.com')")
    ((topic, payload, _),) = seen(users)
    assert (topic, payload) == ("public.users.insert", {"id": 1, "name": "Ann"})


async def test_table_events_are_heard_by_whoever_listens(dsn: str, users: psycopg.Connection[Any]) -> None:
    users.execute(EVERYTHING)
    async with await pgmb.aconnect(dsn) as broker, asyncio.timeout(60):
        asked: dict[str, Any] = {"condition": "e.metadata->'old'->>'id' = s.params->>'id'"}
        group = broker.group("my-node")
        async with group.listen(["public.users.update"], **asked, params={"id": "2"}) as feed:
            users.execute("insert into users (name, email) select n, n from generate_series(1, 3) n")
            users.execute("update users set name = name || '!'")
            async for batch in feed:
                assert [event.payload["name"] for event in batch] == ["2!"]
                break


# -- a queue and exchange system


def by_topic(events: list[pgmb.Event]) -> list[list[pgmb.Event]]:
    acc: dict[str, list[pgmb.Event]] = {}
    for item in events:
        acc.setdefault(item.topic, []).append(item)
    return list(acc.values())


async def test_a_reliable_handler(dsn: str) -> None:
    app, calls = pgmb.App(dsn), list[tuple[int, list[Any]]]()

    @app.group("my-node").handler(
        "log-data",
        condition=TOPICS,
        params={"topics": ["msg-created", "msg-updated"]},
        retry_after=[0.05, 0.1],
        split_by=by_topic,
    )
    async def log(items: list[pgmb.Event]) -> None:
        calls.append((items[0].attempt, [item.payload for item in items]))
        if items[0].topic == "msg-updated":
            raise RuntimeError("always")

    async with await pgmb.aconnect(dsn) as broker:
        await app.ahandle("my-node/log-data")
        await broker.publish_many(
            [pgmb.NewEvent(topic, number) for number, topic in enumerate(["msg-created", "msg-updated"] * 2)]
        )
    await app.aclose()
    async with working(app) as broker:
        await until(lambda: len(calls) >= 4)
        await until(lambda: settled(broker, "my-node/log-data"))
        dead = await broker.dead_letters("my-node/log-data")
    assert sorted(calls) == [(1, [0, 2]), (1, [1, 3]), (2, [1, 3]), (3, [1, 3])]
    # There they would be gone.
    assert [(letter.event.payload, letter.error) for letter in dead] == [
        (number, "RuntimeError: always") for number in (1, 3)
    ]


def test_partitions_by_a_condition(dsn: str) -> None:
    """To the letter it runs, and leaves out ids whose hash is negative; without the sign none."""
    corrected = PARTITION.replace("hashtext(e.id) % 3", "(hashtext(e.id) & 2147483647) % 3")
    with pgmb.connect(dsn) as broker:
        for number in range(3):
            params = {"topics": ["msg-created", "msg-updated"], "partition": number}
            broker.create_queue(f"letter-{number}", condition=PARTITION, params=params)
            broker.create_queue(f"corrected-{number}", condition=corrected, params=params)
        broker.publish_many("msg-created", range(200))
        broker.publish_many("other", range(200))
        found: dict[str, Counter[Any]] = {"letter": Counter(), "corrected": Counter()}
        for kind, counted in found.items():
            for number in range(3):
                counted.update(event.payload for event in broker.receive(f"{kind}-{number}", max=500))
    assert found["corrected"] == Counter(range(200)), "each in one part"
    assert max(found["letter"].values()) == 1
    assert 0 < len(found["letter"]) < 200, "two thirds of them on average"


async def test_fire_and_forget(dsn: str, db: psycopg.Connection[Any]) -> None:
    async with await pgmb.aconnect(dsn) as broker, asyncio.timeout(60):
        sub = broker.group("my-node").listen(
            condition=TOPICS, params={"topics": ["msg-created", "msg-updated"]}, expires_after=60
        )
        await sub.start()
        await broker.publish("other", 0)
        await broker.publish("msg-created", {"hello": "world"})
        async for items in sub:
            assert [item.payload for item in items] == [{"hello": "world"}]
            break
        await until(lambda: db.execute("select count(*) from pgmb.subscriptions").fetchone() == (0,))


def test_a_subscription_and_a_webhook_in_one_transaction(dsn: str, db: psycopg.Connection[Any]) -> None:
    db.execute("create table webhook_subscriptions (id serial, pgmb_sub_id uuid, url text)")
    with pgmb.connect(dsn) as broker, psycopg.connect(dsn) as cl:
        with cl.transaction():
            sub = broker.group("my-node").subscribe(
                condition=TOPICS, params={"topics": ["order-placed"]}, conn=cl
            )
            cl.execute(
                "INSERT INTO webhook_subscriptions (pgmb_sub_id, url) VALUES (%s, %s)",
                [sub, "https://webhook.site/12345"],
            )
        broker.publish("order-placed", 1)
        (event,) = broker.group("my-node").receive()
        rows = db.execute(
            'SELECT id, url, pgmb_sub_id as "subId" FROM webhook_subscriptions WHERE pgmb_sub_id = ANY(%s)',
            [list(event.subscriptions)],
        ).fetchall()
    assert rows == [(1, "https://webhook.site/12345", sub)]


def test_the_columns_of_subscriptions_are_those(db: psycopg.Connection[Any]) -> None:
    db.execute(
        "select pgmb.subscribe('my-node', condition => %s, params => %s, expires_after => '15 minutes')",
        [TOPICS, '{"topics": ["msg-created", "msg-updated"]}'],
    )
    ((group, condition, params, expiry),) = db.execute(
        "select group_id, conditions_sql, params, expiry_interval::text from pgmb.subscriptions"
    ).fetchall()
    assert (group, params, expiry) == ("my-node", {"topics": ["msg-created", "msg-updated"]}, "00:15:00")
    assert "@> jsonb_build_object('topics'" in condition


def test_messages_are_flushed_or_the_flush_raises(dsn: str) -> None:
    with pgmb.connect(dsn) as broker, broker.publisher(flush_every=1, max_batch=100) as publisher:
        broker.create_queue("all")
        publisher.enqueue("msg-created", {"id": 123, "hello": "world"})
        publisher.flush()
        assert [event.payload["id"] for event in broker.receive("all")] == [123]
