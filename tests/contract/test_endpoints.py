"""Endpoints: created, changed, dropped, held and let go from SQL, by admins alone.

A name is one endpoint, whatever becomes of its settings. Those that share a queue are subscriptions of its
group; one that is ordered or takes batches has a queue of its own. Secrets are sealed before they come here.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psycopg
import pytest

from harness.sessions import Sessions
from harness.states import claimed_deliveries, lane_settings, queue_names, queue_settings
from tests.conftest import Connect
from tests.contract.cast import Cast
from tests.contract.endpoints import (
    URL,
    claim,
    create,
    dead,
    publish,
    receive,
    refused,
    settle,
    value,
    waiting,
)
from tests.contract.test_privileges import refused as forbidden


def shown(db: psycopg.Connection[Any], name: str, columns: str) -> Any:
    (row,) = db.execute(f"select {columns} from pgmb.endpoints where name = %s", [name]).fetchall()
    return row


def test_an_endpoint_is_what_it_was_said_to_be(db: psycopg.Connection[Any]) -> None:
    made = create(
        db,
        "hook",
        "{order.*,invoice.#}",
        equals='{"payload": {"region": "eu"}}',
        filter="$.payload.total > $least",
        params='{"least": 10}',
        rps=50,
        max_in_flight=4,
        timeout="3 s",
        headers='{"authorization": "Bearer x", "x-a": "b"}',
        gzip_above=1000,
        retry_after="{1 s,1 min}",
        body="cloudevents",
        log="all",
        keep_response=True,
        description="The shop's",
        metadata='{"team": "a"}',
    )
    assert shown(db, "hook", "id, url, state, reason, queue, stream, patterns, equals, filter, params") == (
        made,
        URL,
        "active",
        None,
        "webhooks",
        "main",
        ["order.*", "invoice.#"],
        {"payload": {"region": "eu"}},
        '($."payload"."total" > $"least")',
        {"least": 10},
    )
    assert shown(
        db,
        "hook",
        "ordered, batch, body, rps, max_in_flight, extract(epoch from timeout)::int, headers,"
        " retry_after::text, gzip_above, log, keep_response, description, metadata, secrets, delivered,"
        " failed, waiting",
    ) == (
        False,
        1,
        "cloudevents",
        50,
        4,
        3,
        ["authorization", "x-a"],
        "{00:00:01,00:01:00}",
        1000,
        "all",
        True,
        "The shop's",
        {"team": "a"},
        0,
        0,
        0,
        0,
    )
    (known,) = db.execute(
        "select id, headers, ordered, source, secrets, state from pgmb.dispatched_endpoints()"
    ).fetchall()
    assert known == (made, {"authorization": "Bearer x", "x-a": "b"}, False, "/pgmb/main", [], "active")
    assert db.execute("select queue, endpoint from pgmb.dispatched_queues()").fetchall() == [
        ("webhooks", None)
    ]


def test_a_name_created_again_keeps_its_id_its_state_its_secrets_and_what_waits(
    db: psycopg.Connection[Any],
) -> None:
    made = create(db, "hook", "{a}", rps=5)
    db.execute("select pgmb.add_endpoint_secret('hook', 'sealed')")
    publish(db, 1, topic="a")
    got = receive(db)
    settle(db, got.lease, None, [(got.seqs(1)[0], made, "0", "no", True, False)])
    db.execute("select pgmb.set_endpoint_state('hook', 'paused', 'holiday')")
    assert create(db, "hook", "{b}") == made
    assert shown(db, "hook", "rps, state, reason, secrets, patterns") == (None, "paused", "holiday", 1, ["b"])
    assert waiting(db) == [(made, 1, 2, "no")]
    assert value(db, "select count(*) from pgmb.subscription") == 1, "what it asked before is forgotten"
    publish(db, 2, topic="a")
    publish(db, 3, topic="b")
    assert receive(db).names == [3]


def test_endpoints_that_ask_the_same_share_what_they_ask_until_the_last_is_dropped(
    db: psycopg.Connection[Any],
) -> None:
    first, second = create(db, "first", "{a}"), create(db, "second", "{a}")
    assert value(db, "select count(*) from pgmb.subscription") == 1
    publish(db, 1, topic="a")
    got = receive(db)
    assert got.meant == {1: {first, second}}
    settle(db, got.lease)
    assert value(db, "select pgmb.drop_endpoint('first')") is True
    publish(db, 2, topic="a")
    assert receive(db).meant == {2: {second}}
    assert value(db, "select pgmb.drop_endpoint('second')") is True
    assert value(db, "select pgmb.drop_endpoint('second')") is False
    assert value(db, "select count(*) from pgmb.subscription") == 0


def test_the_queue_that_endpoints_share_goes_with_the_last_of_them(db: psycopg.Connection[Any]) -> None:
    """Nobody would move it on: the log would be kept for it, and the next endpoint get what is long past."""
    create(db, "first")
    create(db, "elsewhere", queue="partners")
    db.execute("select pgmb.drop_endpoint('first')")
    db.execute("select pgmb.drop_endpoint('elsewhere')")
    assert queue_names(db) == ["partners"], "that somebody named"
    publish(db, 1)
    create(db, "next")
    publish(db, 2)
    assert receive(db).names == [2]


def test_an_endpoint_created_while_the_last_other_is_dropped_has_a_queue(
    db: psycopg.Connection[Any], connect: Connect
) -> None:
    create(db, "first")
    with db.transaction():
        create(db, "second")
        other = connect()
        other.execute("set lock_timeout = '50ms'")
        with refused("55P03"):
            other.execute("select pgmb.drop_endpoint('first')")
    db.execute("select pgmb.drop_endpoint('first')")
    assert "webhooks" in queue_names(db)
    with db.transaction():
        db.execute("select pgmb.drop_endpoint('second')")
        with refused("55P03"):
            create(other, "third")
    create(other, "third")
    assert "webhooks" in queue_names(db)


@pytest.mark.parametrize(("ordered", "batch"), [(True, 1), (False, 10)])
def test_one_that_is_ordered_or_takes_batches_has_a_queue_of_its_own(
    db: psycopg.Connection[Any], ordered: bool, batch: int
) -> None:
    wanted = {"ordered": ordered, "batch": batch, "retry_after": "{0 s,1 s}"}
    made = create(db, "hook", "{a.*}", **wanted)
    assert shown(db, "hook", "queue, ordered, batch, patterns") == ("endpoint/hook", ordered, batch, ["a.*"])
    assert db.execute("select queue, endpoint from pgmb.dispatched_queues()").fetchall() == [
        ("endpoint/hook", made)
    ]
    assert lane_settings(db, "max_attempts", "endpoint/hook") == [3]
    assert create(db, "hook", "{b.*}", **{**wanted, "retry_after": "{0 s}"}) == made
    assert shown(db, "hook", "patterns") == (["b.*"],)
    assert lane_settings(db, "max_attempts", "endpoint/hook") == [2]
    publish(db, 1, topic="b.c")
    assert receive(db, "endpoint/hook").meant == {1: {made}}
    with refused("MB006"):
        create(db, "hook", "{b.*}")
    with refused("MB004"):
        db.execute("select pgmb.drop_queue('endpoint/hook')")
    assert value(db, "select pgmb.drop_endpoint('hook')") is True
    assert queue_names(db) == []


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("", {}, "MB003"),
    ("a\nb", {}, "MB003"),
    ("x" * 101, {}, "MB003"),
    ("x" * 82, {"batch": 2}, "MB003"),
    ("hook", {"rps": 0}, "23514"),
    ("hook", {"max_in_flight": 0}, "23514"),
    ("hook", {"timeout": "0 s"}, "23514"),
    ("hook", {"timeout": "11 min"}, "23514"),
    ("hook", {"batch": 0}, "23514"),
    ("hook", {"batch": 1001}, "23514"),
    ("hook", {"batch": 2, "queue": "q"}, "MB005"),
    ("hook", {"body": "xml"}, "23514"),
    ("hook", {"log": "none"}, "23514"),
    ("hook", {"gzip_above": -1}, "23514"),
    ("hook", {"retry_after": "{1 s,null}"}, "23514"),
    ("hook", {"headers": "[]"}, "MB005"),
    ("hook", {"headers": '{"a b": "c"}'}, "MB005"),
    ("hook", {"headers": '{"a": 1}'}, "MB005"),
    ("hook", {"headers": '{"a": "b\\r\\nc: d"}'}, "MB005"),
    ("hook", {"headers": '{"Host": "other"}'}, "MB005"),
    ("hook", {"headers": '{"webhook-signature": "x"}'}, "MB005"),
    ("hook", {"stream": "none"}, "MB001"),
    ("hook", {"patterns": "{a*}"}, "MB007"),
    ("hook", {"filter": "$.payload >"}, "MB009"),
    ("hook", {"condition": "pg_sleep(1) is null"}, "MB010"),
]


def test_what_is_no_endpoint_is_refused_and_leaves_nothing(db: psycopg.Connection[Any]) -> None:
    for name, settings, sqlstate in REFUSED:
        with refused(sqlstate):
            create(db, name, **settings)
    assert queue_names(db) == []
    for table in ("endpoint", "subscription"):
        assert value(db, f"select count(*) from pgmb.{table}") == 0


def test_queues_of_another_kind_are_not_shared(db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.create_stream('other')")
    db.execute("select pgmb.create_queue('ordered', ordered => true)")
    db.execute("select pgmb.create_queue('elsewhere', stream => 'other')")
    db.execute("select pgmb.create_queue('endpoint/hook')")
    db.execute("select pgmb.create('fed', 'a', 5, pgmb.worker('w', 'http://localhost/', 1))")
    for queue in ("ordered", "ordered/1", "elsewhere", "fed"):
        with refused("MB006"):
            create(db, "hook", queue=queue)
    with refused("MB006"):
        create(db, "hook", batch=5)
    create(db, "hook")
    for settings in ({"queue": "another"}, {"stream": "other"}):
        with refused("MB006"):
            create(db, "hook", **settings)
    with refused("MB006"):
        create(db, "w")
    create(db, "there", stream="other")
    assert shown(db, "there", "queue, stream") == ("webhooks/other", "other")
    with refused("MB004"):
        db.execute("select pgmb.drop_stream('other')")


def test_some_settings_are_changed_and_the_others_stay(db: psycopg.Connection[Any]) -> None:
    made = create(db, "hook", rps=5, gzip_above=10, headers='{"x-a": "b"}')
    own = create(db, "own", batch=5)
    db.execute(
        "select pgmb.alter_endpoint('hook', url => 'https://else.example/', timeout => '1 s', rps => 7)"
    )
    changed = shown(db, "hook", "id, url, extract(epoch from timeout)::int, rps, gzip_above, headers")
    assert changed == (made, "https://else.example/", 1, 7, 10, ["x-a"])
    db.execute("select pgmb.alter_endpoint('hook', rps => 0, gzip_above => -1, headers => '{}')")
    assert shown(db, "hook", "rps, gzip_above, headers") == (None, None, [])
    db.execute("select pgmb.alter_endpoint('own', batch => 1, retry_after => '{1 s}')")
    assert shown(db, "own", "id, batch, queue") == (own, 1, "endpoint/own")
    assert queue_settings(db, "endpoint/own")["max_attempts"] == 2
    for wrong, sqlstate in (
        ("'none', rps => 1", "MB060"),
        ("'hook', url => 'ftp://x/'", "MB005"),
        ("'hook', headers => '{\"host\": \"x\"}'", "MB005"),
        ("'hook', rps => -1", "23514"),
        ("'hook', batch => 2", "MB006"),
    ):
        with refused(sqlstate):
            db.execute(f"select pgmb.alter_endpoint({wrong})")


def test_what_it_asks_for_is_changed_from_the_queues_position_on(db: psycopg.Connection[Any]) -> None:
    shared, own = create(db, "shared", "{a}"), create(db, "own", "{a}", batch=5)
    for name in ("shared", "own"):
        db.execute("select pgmb.bind_endpoint(%s, '{b}', filter => '$.payload > 1')", [name])
    publish(db, 1, 2, topic="b")
    assert receive(db).meant == {2: {shared}}
    assert receive(db, "endpoint/own").meant == {2: {own}}
    with refused("MB060"):
        db.execute("select pgmb.bind_endpoint('none', '{a}')")
    db.execute("select pgmb.worker('w', 'http://localhost/', 1)")
    with refused("MB002"):
        db.execute("select pgmb.bind_endpoint('w', '{a}')")


def test_states_by_an_operator(db: psycopg.Connection[Any]) -> None:
    made = create(db, "hook")
    change = "select pgmb.set_endpoint_state('hook', %s, %s)"
    assert value(db, change, "active", None) is False
    assert value(db, change, "paused", "holiday") is True
    assert value(db, change, "paused", "holiday") is False
    assert shown(db, "hook", "state, reason") == ("paused", "holiday")
    publish(db, 1)
    got = receive(db)
    assert got.meant == {1: {made}}, "what comes waits for it"
    settle(db, got.lease, None, [(got.seqs(1)[0], made, "0", None, False, False)])
    assert value(db, change, "disabled", "sold") is True
    publish(db, 2)
    assert not receive(db), "one that is off gets nothing any more"
    assert not claim(db)
    db.execute("update pgmb.endpoint_activity set failing_since = now()")
    assert value(db, change, "active", None) is True
    assert shown(db, "hook", "state, reason, failing_since") == ("active", None, None)
    assert list(claim(db)) == [1], "what waited comes"
    for name, state, sqlstate in (
        ("none", "active", "MB060"),
        ("hook", "tripped", "MB005"),
        ("hook", None, "MB005"),
    ):
        with refused(sqlstate):
            db.execute("select pgmb.set_endpoint_state(%s, %s)", [name, state])


def test_one_whose_filter_raises_is_paused_with_what_it_said_until_it_is_resumed(
    db: psycopg.Connection[Any],
) -> None:
    """Of a shared queue the others go on."""
    good = create(db, "good")
    create(db, "bad", filter='$.payload.datetime() > "2020-01-01".datetime()', params="{}")
    create(db, "own", filter='$.payload.datetime() > "2020-01-01".datetime()', batch=5)
    publish(db, 1)
    db.execute("select pgmb.publish('t', '\"2020-01-02T00:00:00+01\"')")
    rows = db.execute("select endpoints from pgmb.receive_deliveries('webhooks')").fetchall()
    assert rows == [([good],), ([good],)]
    assert receive(db, "endpoint/own").rows == []
    for name in ("bad", "own"):
        state, reason = shown(db, name, "state, reason")
        assert state == "paused"
        assert "time zone" in reason
        assert value(db, "select pgmb.set_endpoint_state(%s, 'active')", name) is True
        assert shown(db, name, "state, reason") == ("active", None)


def test_secrets_are_replaced_with_an_overlap(db: psycopg.Connection[Any]) -> None:
    create(db, "hook")
    before = value(db, "select changed_at from pgmb.dispatched_endpoints()")
    first = value(db, "select pgmb.add_endpoint_secret('hook', 'one')")
    assert value(db, "select secrets from pgmb.dispatched_endpoints()") == [b"one"]
    assert value(db, "select changed_at from pgmb.dispatched_endpoints()") > before
    second = value(db, "select pgmb.add_endpoint_secret('hook', 'two', '1 hour')")
    assert second != first
    assert value(db, "select secrets from pgmb.dispatched_endpoints()") == [b"two", b"one"], (
        "the newest first"
    )
    assert shown(db, "hook", "secrets") == (2,)

    changed = value(db, "select changed_at from pgmb.dispatched_endpoints()")
    db.execute("update pgmb.endpoint_secret set expires_at = clock_timestamp() where id = %s", [first])
    assert value(db, "select secrets from pgmb.dispatched_endpoints()") == [b"two"]
    assert value(db, "select changed_at from pgmb.dispatched_endpoints()") > changed, (
        "whoever has a copy hears"
    )
    value(db, "select pgmb.add_endpoint_secret('hook', 'more', '1 day')")
    value(db, "select pgmb.add_endpoint_secret('hook', 'three', '0 s')")
    assert value(db, "select secrets from pgmb.dispatched_endpoints()") == [b"three"]
    assert value(db, "select count(*) from pgmb.endpoint_secret") == 3, "the one that expired is gone"

    assert value(db, "select pgmb.drop_endpoint_secret('hook', %s)", first) == 0
    assert value(db, "select pgmb.drop_endpoint_secret('hook')") == 3
    assert value(db, "select secrets from pgmb.dispatched_endpoints()") == []
    for call in ("add_endpoint_secret('none', 'x')", "drop_endpoint_secret('none')"):
        with refused("MB060"):
            db.execute(f"select pgmb.{call}")


def test_dropping_one_takes_all_that_is_its_own(db: psycopg.Connection[Any]) -> None:
    gone, stays = create(db, "gone"), create(db, "stays")
    db.execute("select pgmb.add_endpoint_secret('gone', 'x')")
    db.execute(
        "select pgmb.log_attempts(%s, '{1}', array[gen_random_uuid()], '{t}', '{1}', '{500}', '{0.1}',"
        " '{status}', '{no}', '{}')",
        [[gone]],
    )
    publish(db, 1, 2)
    got = receive(db)
    (one,), (two,) = got.seqs(1), got.seqs(2)
    failed = [(one, by, "0", "no", True, False) for by in (gone, stays)]
    given_up = [(two, by, "0", "no", True, True) for by in (gone, stays)]
    settle(db, got.lease, None, failed + given_up)
    held = claim(db)
    db.execute("select pgmb.drop_endpoint('gone')")
    assert [row[0] for row in waiting(db)] == [stays]
    assert [row[0] for row in dead(db)] == [stays]
    for table in ("endpoint_secret", "attempt"):
        assert value(db, f"select count(*) from pgmb.{table}") == 0
    assert settle_held(db, held.lease) == 1, "what it was being sent settles without it"


def settle_held(db: psycopg.Connection[Any], lease: UUID | None) -> int:
    rows = [*claimed_deliveries(db, lease), 0]
    return int(value(db, "select pgmb.settle_claimed(%s, %s::bigint[])", lease, rows))


def test_what_is_settled_while_its_endpoint_is_dropped_is_no_error(
    db: psycopg.Connection[Any], sessions: Sessions
) -> None:
    gone, stays = create(db, "gone"), create(db, "stays")
    publish(db, 1)
    got = receive(db)
    dropping, settling = sessions.open("dropping", "settling")
    dropping.run("begin")
    dropping.run("select pgmb.drop_endpoint('gone')")
    waits = settling.start(
        "select pgmb.settle_deliveries(%s, null, array[%s, %s]::bigint[], %s, '{0 s,0 s}', '{no,no}',"
        " '{t,t}', '{f,f}')",
        [got.lease, *got.seqs(1) * 2, [gone, stays]],
    ).blocked()
    dropping.run("commit")
    waits.result()
    assert [row[0] for row in waiting(db)] == [stays]


def test_the_subscription_of_an_endpoint_neither_expires_nor_is_taken_away(
    db: psycopg.Connection[Any], cast: Cast
) -> None:
    made = create(db, "hook", "{a}")
    reader = cast.acting(cast.role("reader", "pgmb_consumer"))
    with refused("42501"):
        reader.execute("select pgmb.subscribe('webhooks', '{a}', expires_after => '1 microsecond')")
    (asked,) = db.execute("select subscription from pgmb.endpoint").fetchone() or (None,)
    db.execute("select pgmb.maintain()")
    with refused("MB004"):
        reader.execute("select pgmb.unsubscribe(%s)", [asked])
    publish(db, 1, topic="a")
    assert receive(db).meant == {1: {made}}


EVERY = [
    "select pgmb.create_endpoint('x', 'http://localhost/')",
    "select pgmb.alter_endpoint('hook', rps => 1)",
    "select pgmb.bind_endpoint('hook', '{a}')",
    "select pgmb.set_endpoint_state('hook', 'paused')",
    "select pgmb.add_endpoint_secret('hook', 'x')",
    "select pgmb.drop_endpoint_secret('hook')",
    "select pgmb.receive_deliveries('webhooks')",
    "select pgmb.claim_deliveries()",
    "select pgmb.settle_claimed(gen_random_uuid(), '{}')",
    "select pgmb.extend_claimed('{}')",
    "select pgmb.heartbeat(gen_random_uuid(), 'h', 1)",
    "select pgmb.depart(gen_random_uuid())",
    "select pgmb.take_requests('{}', '{}')",
    "select pgmb.trip_endpoint(gen_random_uuid(), 'x')",
    "select pgmb.throttle_endpoint(gen_random_uuid(), '1 s', 'x')",
    "select pgmb.probe_endpoint(gen_random_uuid(), '1 s')",
    "select pgmb.claim_probe(gen_random_uuid())",
    "select pgmb.hasten_retry(gen_random_uuid())",
    "select pgmb.end_probe(gen_random_uuid(), true)",
    "select pgmb.disable_endpoint(gen_random_uuid(), 'x')",
    "select pgmb.log_attempts('{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}')",
    "select pgmb.dispatched_endpoints()",
    "select pgmb.dispatched_queues()",
    "select * from pgmb.endpoints",
    "select * from pgmb.attempt",
    "select * from pgmb.dispatcher",
    "select pgmb.drop_endpoint('x')",
]
NOBODY = [
    "select * from pgmb.endpoint",
    "select * from pgmb.endpoint_secret",
    "select * from pgmb.endpoint_activity",
    "select * from pgmb.delivery",
    "insert into pgmb.attempt (endpoint, attempt, seconds) select id, 1, 0 from pgmb.endpoints",
    "delete from pgmb.dispatcher",
]


def test_only_admins_have_to_do_with_endpoints(db: psycopg.Connection[Any], cast: Cast) -> None:
    create(db, "hook")
    plain = cast.role("plain", "pgmb_publisher", "pgmb_consumer")
    db.execute("select pgmb.grant_consume('webhooks', %s)", [plain])
    others = [cast.acting(plain), cast.acting(cast.role("stranger"))]
    for statement in EVERY + NOBODY:
        for other in others:
            forbidden(other, statement)
    lease = value(db, "select gen_random_uuid()")
    forbidden(others[0], "select pgmb.settle_deliveries(%s)", lease)
    admin = cast.acting(cast.role("admin", "pgmb_admin"))
    for statement in EVERY:
        admin.execute(statement)
    for statement in NOBODY:
        forbidden(admin, statement)
