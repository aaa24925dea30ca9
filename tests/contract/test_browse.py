"""Looking through log and dead letters: newest first, bounded, for admins alone; and all at a glance."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import errors

from tests.contract.cast import Cast

# Costs are measured: rows that other tests left would count.
pytestmark = pytest.mark.new_database

DB = psycopg.Connection[Any]


def one(db: DB, statement: str, *parameters: Any) -> Any:
    found = db.execute(statement.encode(), parameters).fetchone()
    assert found is not None
    return found[0] if len(found) == 1 else found


def publish(db: DB, topic: str, count: int = 1, key: str | None = None) -> None:
    db.execute(
        "select count(pgmb.publish(%s, json_build_object('n', n), key => %s)) from generate_series(1, %s) n",
        (topic, key, count),
    )


def browse(db: DB, **asked: Any) -> dict[str, Any]:
    named = ", ".join(f"{name} => %s" for name in asked)
    found: dict[str, Any] = one(db, f"select pgmb.browse({named})", *asked.values())
    return found


def shown(found: dict[str, Any]) -> list[int]:
    return [json.loads(event["payload"])["n"] for event in found["events"]]


def walk(db: DB, **asked: Any) -> tuple[list[int], int]:
    """All pages of a search, and how many calls they took."""
    numbers: list[int] = []
    before, calls = None, 0
    while calls < 100:
        found = browse(db, **asked, before=before)
        assert before is None or found["next"] is None or found["next"] < before
        numbers += shown(found)
        calls += 1
        before = found["next"]
        if before is None:
            break
    return numbers, calls


def test_the_newest_come_first_page_by_page_across_segments(db: DB) -> None:
    for _ in range(3):
        publish(db, "a.b", 7)
        db.execute("select pgmb.rotate()")
    numbers, calls = walk(db, max=5)
    assert numbers == [7, 6, 5, 4, 3, 2, 1] * 3
    assert calls == 5


def test_a_search_looks_at_no_more_than_it_may_and_says_where_it_stopped(db: DB) -> None:
    publish(db, "rare")
    publish(db, "common", 250)
    first = browse(db, topic="rare", look=100)
    assert (first["events"], first["looked"]) == ([], 100)
    assert first["next"] is not None
    assert walk(db, topic="rare", look=100) == ([1], 3)


def test_topic_key_and_time_are_asked_together(db: DB) -> None:
    publish(db, "order.paid", 2, key="x")
    publish(db, "order.paid", 2, key="y")
    publish(db, "cart.updated", 2, key="x")
    assert shown(browse(db, topic="order.*", key="x")) == [2, 1]
    db.execute("select pgmb.tick()")
    middle = one(db, "select clock_timestamp()")
    publish(db, "order.paid", 3, key="x")
    assert shown(browse(db, key="x", since=middle)) == [3, 2, 1]
    assert shown(browse(db, topic="order.#", key="x", until=middle)) == [2, 1]
    assert shown(browse(db, since=middle, until=middle)) == []


def test_an_event_is_found_by_its_id(db: DB) -> None:
    derived: UUID = one(db, "select pgmb.publish('a', '{\"n\": 1}')")
    given = uuid4()
    one(db, "select pgmb.publish('a', '{\"n\": 2}', id => %s)", given)
    publish(db, "b", 50)
    assert shown(browse(db, id=derived, look=1)) == [1]
    assert shown(browse(db, id=given)) == [2]
    assert walk(db, id=given, look=10)[0] == [2]
    assert walk(db, id=uuid4(), look=40)[0] == []


def test_a_long_payload_comes_by_its_beginning(db: DB) -> None:
    db.execute("select pgmb.publish('a', to_json(repeat('x', 100000)))")
    event = browse(db)["events"][0]
    assert len(event["payload"]) == 300
    assert event["bytes"] == 100_002
    whole = one(db, "select length(payload::text) from pgmb.browse_event('main', %s)", event["seq"])
    assert whole == 100_002


@pytest.mark.slow
def test_what_a_search_costs_does_not_grow_with_the_log(db: DB) -> None:
    def blocks() -> int:
        statement = "select pgmb.browse(topic => 'nothing', look => 500)"
        db.execute(statement.encode())
        plan = one(db, f"explain (analyze, buffers, format json) {statement}")
        top = plan[0]["Plan"]
        return int(top["Shared Hit Blocks"]) + int(top["Shared Read Blocks"])

    publish(db, "a", 1000)
    few = blocks()
    publish(db, "a", 40_000)
    assert blocks() < few + 100


def bury(db: DB, queue: str, errors_: list[str]) -> None:
    publish(db, f"{queue}.event", len(errors_))
    for error in errors_:
        lease, seq = one(db, "select lease, seq from pgmb.receive(%s, max => 1)", queue)
        db.execute("select pgmb.bury(%s, array[%s]::bigint[], %s)", (lease, seq, error))


def find(db: DB, **asked: Any) -> tuple[list[int], int, int | None]:
    named = ", ".join(f"{name} => %s" for name in asked)
    found: tuple[list[int], int, int | None] = one(
        db, f"select ids, looked, next from pgmb.find_dead({named})", *asked.values()
    )
    return found


def test_dead_letters_are_found_across_queues_and_sent_back_by_id(db: DB) -> None:
    for queue in ("a", "b"):
        db.execute("select pgmb.create_queue(%s, array[%s])", (queue, f"{queue}.#"))
    bury(db, "a", ["Timeout after 3 s", "bad value"])
    bury(db, "b", ["timeout", "no", "TIMEOUT!"])
    ids, looked, following = find(db, error="timeout")
    assert (len(ids), looked, following) == (3, 5, None)
    assert ids == sorted(ids, reverse=True)
    assert len(find(db, queue="b", error="timeout")[0]) == 2
    assert len(find(db, topic="a.*")[0]) == 2
    newest, _, following = find(db, max=2)
    assert len(newest) == 2
    assert find(db, max=2, before=following)[0] == find(db)[0][2:4]
    assert find(db, error="value", look=2)[:2] == ([], 2)
    with pytest.raises(errors.Error) as raised:
        find(db, queue="c")
    assert raised.value.sqlstate == "MB002"

    common = db.execute("select error, letters from pgmb.common_errors(%s)", (find(db)[0],)).fetchall()
    assert dict(common) == dict.fromkeys(("bad value", "no", "timeout", "Timeout after", "TIMEOUT!"), 1)
    names = db.execute("select queue, error from pgmb.browse_dead(%s)", (ids,)).fetchall()
    assert names == [("b", "TIMEOUT!"), ("b", "timeout"), ("a", "Timeout after 3 s")]
    assert one(db, "select pgmb.redrive_dead(%s)", [*ids, 999_999]) == 3
    assert one(db, "select pgmb.drop_dead_letters(%s)", find(db)[0]) == 2
    assert find(db) == ([], 0, None)
    assert one(db, "select count(*) from pgmb.receive('b', max => 9)") == 2


def test_a_queues_leases_and_what_is_due_again(db: DB) -> None:
    db.execute("select pgmb.create_queue('q', '{#}')")
    publish(db, "a", 5)
    lease = one(db, "select min(lease::text)::uuid from pgmb.receive('q', max => 3)")
    held = db.execute("select kind, events, expires_at > now() from pgmb.queue_leases('q')").fetchall()
    assert held == [("event", 3, True)]
    db.execute("select pgmb.retry(%s, after => '30 seconds')", (lease,))
    assert db.execute("select * from pgmb.queue_leases('q')").fetchall() == []
    curve = db.execute("select within, events from pgmb.retry_curve('q')").fetchall()
    assert dict(curve)[60.0] == 3
    assert sum(events for _, events in curve) == 3
    assert curve[0][0] == 0
    assert curve[-1][0] is None


def test_segments_say_what_retention_would_drop(db: DB) -> None:
    publish(db, "a", 4)
    db.execute("select pgmb.rotate()")
    publish(db, "a", 2)
    db.execute("select pgmb.seal()")
    db.execute("select pgmb.alter_stream('main', keep_for => '0 s')")
    found = db.execute(
        "select state, events, droppable from pgmb.stream_segments('main') where state <> 'ready'"
    ).fetchall()
    assert found == [("open", 2, False), ("sealed", 4, True)]


def test_a_sample_tells_what_was_published_since(db: DB) -> None:
    db.execute("select pgmb.create_queue('q', '{#}')")
    first = one(db, "select pgmb.sample()")
    publish(db, "a", 6)
    seen = json.dumps({stream["stream"]: stream["last"] for stream in first["streams"]})
    second = one(db, "select pgmb.sample(%s::jsonb)", seen)
    assert [stream["published"] for stream in second["streams"]] == [6]
    assert [(queue["queue"], queue["waiting"]) for queue in second["queues"]] == [("q", 6)]
    assert second["at"] > first["at"]


@pytest.mark.parametrize(
    "statement",
    [
        "select pgmb.browse()",
        "select pgmb.browse_event('main', 1)",
        "select pgmb.find_dead()",
        "select pgmb.browse_dead('{1}')",
        "select pgmb.common_errors('{1}')",
        "select pgmb.redrive_dead('{1}')",
        "select pgmb.drop_dead_letters('{1}')",
        "select pgmb.stream_segments('main')",
        "select pgmb.queue_leases('q')",
        "select pgmb.retry_curve('q')",
        "select pgmb.sample()",
    ],
)
def test_only_an_admin_looks(db: DB, cast: Cast, statement: str) -> None:
    db.execute("select pgmb.create_queue('q', '{#}')")
    with pytest.raises(errors.InsufficientPrivilege):
        cast.acting(cast.role("consumer", "pgmb_consumer")).execute(statement.encode())
    cast.acting(cast.role("admin", "pgmb_admin")).execute(statement.encode())
