"""Every method of every client of PyPI's `pgmq`, on PGMQ and on pgmb: the same calls, the same assertions."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from harness.waiting import until_true
from tests.compat.clients import Client, Steps


def test_every_method_is_called_here() -> None:
    from pgmq.sync_operations import SyncPGMQueueOperationsMixin

    methods = {name for name, _ in inspect.getmembers(SyncPGMQueueOperationsMixin, inspect.isfunction)}
    here = Path(__file__).read_text()
    assert [
        name for name in sorted(methods) if not name.startswith("_") and f"client.{name}(" not in here
    ] == []


def ids(messages: list[Any]) -> list[int]:
    return [message.msg_id for message in messages]


# Queues


def test_create_list_and_drop(client: Client) -> None:
    client.create_queue("made_here")
    client.create_queue("made_here")
    client.create_queue("made_unlogged", unlogged=True)
    listed = {record.queue_name: record for record in client.list_queues()}
    assert (listed["made_here"].is_unlogged, listed["made_here"].is_partitioned) == (False, False)
    assert listed["made_unlogged"].is_unlogged
    assert listed["made_here"].created_at.tzinfo is not None
    assert client.drop_queue("made_here") is True
    assert client.drop_queue("made_unlogged") is True
    assert client.drop_queue("made_here") is False
    assert "made_here" not in {record.queue_name for record in client.list_queues()}


def test_a_partitioned_queue(client: Client, system: str) -> None:
    if system == "pgmq":
        with pytest.raises(Exception, match="pg_partman"):
            client.create_partitioned_queue("in_parts")
        return
    client.create_partitioned_queue("in_parts", partition_interval=1000)
    assert [record.is_partitioned for record in client.list_queues() if record.queue_name == "in_parts"] == [
        True
    ]
    assert client.send("in_parts", {"n": 1}) == 1
    assert client.drop_queue("in_parts") is True


def test_names(client: Client) -> None:
    assert client.validate_queue_name("a" * 47) is True
    with pytest.raises(Exception, match="too long"):
        client.validate_queue_name("a" * 48)
    for name in ("Mixed-Case.and dots", "x" * 47, "naïve"):
        client.create_queue(name)
        assert client.send(name, {"n": 1}) == 1
        assert client.read(name, vt=30).message == {"n": 1}
        assert client.drop_queue(name) is True
    for name in ("a;b", "a--b", "a$b", "a'b"):
        with pytest.raises(Exception, match="invalid characters"):
            client.create_queue(name)


def test_a_queue_that_does_not_exist(client: Client) -> None:
    for call, *args in (
        (client.send, {}),
        (client.read,),
        (client.pop,),
        (client.delete, 1),
        (client.metrics,),
    ):
        with pytest.raises(Exception, match="does not exist"):
            call("nowhere", *args)


# Sending and reading


def test_send_and_read(client: Client, queue: str) -> None:
    assert client.send(queue, {"n": 1, "deep": {"list": [1, None, "ü"]}}) == 1
    assert client.send(queue, {"n": 2}, headers={"trace": "abc"}) == 2
    first = client.read(queue, vt=30)
    assert (first.msg_id, first.read_ct) == (1, 1)
    assert first.message == {"n": 1, "deep": {"list": [1, None, "ü"]}}
    assert first.headers is None
    assert first.enqueued_at <= first.last_read_at < first.vt
    assert timedelta(seconds=29) < first.vt - first.last_read_at < timedelta(seconds=31)
    second = client.read(queue, vt=30)
    assert (second.msg_id, second.message, second.headers) == (2, {"n": 2}, {"trace": "abc"})
    assert client.read(queue) is None


def test_send_and_read_batches(client: Client, queue: str) -> None:
    assert client.send_batch(queue, [{"n": 1}, {"n": 2}]) == [1, 2]
    assert client.send_batch(queue, [{"n": 3}, {"n": 4}], headers=[{"h": 3}, {"h": 4}]) == [3, 4]
    got = client.read_batch(queue, vt=30, batch_size=3)
    assert sorted(ids(got)) == [1, 2, 3]
    assert {message.msg_id: message.headers for message in got} == {1: None, 2: None, 3: {"h": 3}}
    assert ids(client.read(queue, vt=30, qty=10)) == [4]
    assert client.read(queue, vt=30, qty=10) == []


def test_delays(client: Client, queue: str) -> None:
    hour = datetime.now(UTC) + timedelta(hours=1)
    past = datetime.now(UTC) - timedelta(hours=1)
    assert client.send(queue, {"n": 1}, delay=3600) == 1
    assert client.send(queue, {"n": 2}, delay=hour) == 2
    assert client.send(queue, {"n": 3}, headers={"h": 3}, delay=3600) == 3
    assert client.send(queue, {"n": 4}, headers={"h": 4}, delay=hour) == 4
    assert client.send_batch(queue, [{"n": 5}], delay=3600) == [5]
    assert client.send_batch(queue, [{"n": 6}], delay=hour) == [6]
    assert client.send_batch(queue, [{"n": 7}], headers=[{"h": 7}], delay=3600) == [7]
    assert client.send_batch(queue, [{"n": 8}], headers=[{"h": 8}], delay=hour) == [8]
    assert client.send(queue, {"n": 9}, delay=0) == 9
    assert client.send(queue, {"n": 10}, delay=past) == 10
    assert client.send(queue, {"n": 11}, tz=1) == 11
    assert sorted(ids(client.read(queue, vt=3600, qty=20))) == [9, 10]
    measured = client.metrics(queue)
    assert (measured.queue_length, measured.total_messages) == (11, 11)
    assert until_true(lambda: client.read(queue, vt=30)).message == {"n": 11}
    assert client.set_vt(queue, 3, 0).headers == {"h": 3}
    assert client.read(queue).message == {"n": 3}
    assert client.delete(queue, 4) is True
    assert sorted(client.delete_batch(queue, list(range(1, 12)))) == [1, 2, 3, 5, 6, 7, 8, 9, 10, 11]


def test_a_message_comes_back_after_its_timeout(client: Client, queue: str) -> None:
    client.send_batch(queue, [{"n": 1}, {"n": 2}, {"n": 3}])
    first = client.read(queue, vt=1)
    assert (first.msg_id, first.read_ct) == (1, 1)
    again = until_true(lambda: [m for m in [client.read(queue, vt=1)] if m and m.msg_id == 1])[0]
    assert again.read_ct >= 2
    assert again.message == {"n": 1}
    assert again.last_read_at > first.last_read_at
    assert client.delete(queue, 1) is True
    seen: set[int] = set()

    def all_seen() -> bool:
        seen.update(ids(client.read(queue, vt=1, qty=10)))
        return seen == {2, 3}

    until_true(all_seen)
    assert client.metrics(queue).queue_length == 2


def test_conditional_reads(client: Client, queue: str) -> None:
    client.send_batch(queue, [{"kind": kind, "n": n} for n, kind in enumerate("abcabc")])
    assert ids([client.read(queue, vt=30, conditional={"kind": "b"})]) == [2]
    assert sorted(ids(client.read(queue, vt=30, qty=5, conditional={"kind": "c"}))) == [3, 6]
    assert client.read(queue, vt=30, qty=5, conditional={"kind": "z"}) == []
    assert ids(client.read_with_poll(queue, vt=30, max_poll_seconds=1, conditional={"kind": "b"})) == [5]
    assert sorted(ids(client.read(queue, vt=30, qty=10))) == [1, 4]
    assert client.metrics(queue).queue_length == 6


def test_polling(client: Client, queue: str) -> None:
    began = time.monotonic()
    assert client.read_with_poll(queue, vt=30, qty=2, max_poll_seconds=1, poll_interval_ms=50) == []
    assert time.monotonic() - began >= 0.9
    client.send(queue, {"n": 1})
    assert ids(client.read_with_poll(queue, vt=30, qty=2, max_poll_seconds=30, poll_interval_ms=50)) == [1]
    client.send(queue, {"n": 2}, delay=1)
    assert ids(client.read_with_poll(queue, vt=30, qty=2, max_poll_seconds=30, poll_interval_ms=50)) == [2]


# Removing


def test_pop(client: Client, queue: str) -> None:
    client.send_batch(queue, [{"n": n} for n in range(1, 7)])
    popped = client.pop(queue)
    assert (popped.msg_id, popped.read_ct, popped.message) == (1, 0, {"n": 1})
    assert sorted(ids(client.pop(queue, qty=2))) == [2, 3]
    assert client.read(queue, vt=1).msg_id == 4
    assert sorted(ids(client.pop(queue, qty=10))) == [5, 6]
    late = until_true(lambda: client.pop(queue))
    assert (late.msg_id, late.read_ct) == (4, 1)
    assert client.pop(queue) is None
    assert client.pop(queue, qty=3) == []
    assert client.metrics(queue).queue_length == 0


def test_delete(client: Client, queue: str) -> None:
    client.send_batch(queue, [{"n": n} for n in range(1, 11)])
    read = ids(client.read(queue, vt=30, qty=4))
    assert client.delete(queue, 2) is True
    assert client.delete(queue, 2) is False
    # One that is gone, those that are read, one that nobody has read, one that never was.
    assert sorted(client.delete_batch(queue, [*read, 9, 99])) == [1, 3, 4, 9]
    assert client.delete_batch(queue, read) == []
    assert client.delete(queue, 5) is True
    assert client.delete(queue, 99) is False
    assert sorted(ids(client.read(queue, vt=30, qty=10))) == [6, 7, 8, 10]
    assert sorted(client.delete_batch(queue, [6, 7, 8, 10])) == [6, 7, 8, 10]
    assert client.metrics(queue).queue_length == 0
    assert client.metrics(queue).total_messages == 10


def test_archive(client: Client, queue: str, sql: psycopg.Connection[Any]) -> None:
    client.send_batch(queue, [{"n": n} for n in range(1, 8)], headers=[{"h": n} for n in range(1, 8)])
    read = client.read(queue, vt=30, qty=3)
    assert client.archive(queue, 2) is True
    assert client.archive(queue, 2) is False
    assert sorted(client.archive_batch(queue, [1, 3, 6, 99])) == [1, 3, 6]
    rest = ids(client.read(queue, vt=30, qty=10))
    assert sorted(rest) == [4, 5, 7]
    assert sorted(client.archive_batch(queue, rest)) == [4, 5, 7]
    kept = sql.execute(
        "select msg_id, read_ct, enqueued_at, last_read_at, vt, message, headers, archived_at is not null"
        f" from pgmq.a_{queue} order by msg_id"
    ).fetchall()
    assert [row[0] for row in kept] == [1, 2, 3, 4, 5, 6, 7]
    assert [row[1] for row in kept] == [1, 1, 1, 1, 1, 0, 1]
    first = next(message for message in read if message.msg_id == 1)
    assert kept[0] == (
        1, 1, first.enqueued_at, first.last_read_at, first.vt, {"n": 1}, {"h": 1}, True
    )  # fmt: skip
    assert client.metrics(queue).queue_length == 0
    client.detach_archive(queue)


def test_purge(client: Client, queue: str) -> None:
    client.send_batch(queue, [{"n": n} for n in range(1, 7)])
    client.send(queue, {"n": 7}, delay=3600)
    client.read(queue, vt=30, qty=2)
    client.delete(queue, 1)
    client.archive(queue, 5)
    assert client.purge(queue) == 5
    assert client.purge(queue) == 0
    assert client.read(queue, vt=30, qty=10) == []
    assert client.delete(queue, 2) is False
    assert client.send(queue, {"n": 8}) == 8
    assert ids(client.read(queue, vt=30, qty=10)) == [8]


def test_set_vt(client: Client, queue: str) -> None:
    client.send_batch(queue, [{"n": n} for n in range(1, 6)])
    assert sorted(ids(client.read(queue, vt=30, qty=2))) == [1, 2]
    hidden = client.set_vt(queue, 1, 3600)
    assert (hidden.msg_id, hidden.read_ct, hidden.message) == (1, 1, {"n": 1})
    assert timedelta(minutes=59) < hidden.vt - datetime.now(UTC) < timedelta(minutes=61)
    # One that nobody has read yet.
    moment = datetime.now(UTC) + timedelta(hours=2)
    unread = client.set_vt(queue, 4, moment)
    assert (unread.msg_id, unread.read_ct, unread.last_read_at, unread.vt) == (4, 0, None, moment)
    assert sorted(ids(client.read(queue, vt=30, qty=10))) == [3, 5]
    assert sorted(ids(client.set_vt(queue, [1, 2, 99], 0))) == [1, 2]
    assert sorted(ids(client.set_vt(queue, [4, 3], datetime.now(UTC) - timedelta(seconds=1)))) == [3, 4]
    again = {message.msg_id: message.read_ct for message in client.read(queue, vt=30, qty=10)}
    assert again == {1: 2, 2: 2, 3: 2, 4: 1}
    assert client.set_vt(queue, 99, 10) is None
    assert sorted(client.delete_batch(queue, [1, 2, 3, 4, 5])) == [1, 2, 3, 4, 5]


def test_a_whole_read_can_be_hidden_longer(client: Client, queue: str) -> None:
    client.send_batch(queue, [{"n": n} for n in range(1, 4)])
    read = ids(client.read(queue, vt=1, qty=10))
    assert client.delete(queue, 2) is True
    assert sorted(ids(client.set_vt(queue, read, 3600))) == [1, 3]
    time.sleep(1.2)
    assert client.read(queue, vt=30, qty=10) == []
    assert sorted(client.delete_batch(queue, read)) == [1, 3]


# Groups


def grouped(client: Client, queue: str, *groups: str) -> None:
    client.send_batch(
        queue,
        [{"n": n} for n in range(1, len(groups) + 1)],
        headers=[{"x-pgmq-group": group} if group else {} for group in groups],
    )


def test_grouped_reads_fill_from_one_group(client: Client, queue: str) -> None:
    client.create_fifo_index(queue)
    client.create_fifo_indexes_all()
    grouped(client, queue, "a", "b", "a", "b", "a")
    assert sorted(ids(client.read_grouped(queue, vt=30, qty=4))) == [1, 2, 3, 5]
    # The rest of b waits for its first.
    assert client.read_grouped(queue, vt=30, qty=4) == []
    client.delete(queue, 2)
    assert ids(client.read_grouped(queue, vt=30, qty=4)) == [4]


def test_grouped_reads_in_turn(client: Client, queue: str) -> None:
    grouped(client, queue, "a", "a", "a", "b", "c", "b")
    assert ids(client.read_grouped_rr(queue, vt=30, qty=4)) == [1, 4, 5, 2]
    assert client.read_grouped_rr(queue, vt=30, qty=4) == []
    client.delete_batch(queue, [1, 2])
    assert ids(client.read_grouped_rr(queue, vt=30, qty=4)) == [3]


def test_grouped_reads_know_what_was_read_otherwise(client: Client, queue: str) -> None:
    grouped(client, queue, "a", "a", "b", "", "")
    assert client.read(queue, vt=3600).msg_id == 1
    assert sorted(ids(client.read_grouped(queue, vt=3600, qty=5))) == [3, 4, 5]
    assert client.delete(queue, 1) is True
    assert ids(client.read_grouped(queue, vt=3600, qty=5)) == [2]


def test_polling_grouped_reads(client: Client, queue: str) -> None:
    assert client.read_grouped_with_poll(queue, vt=30, qty=2, max_poll_seconds=1, poll_interval_ms=50) == []
    assert (
        client.read_grouped_rr_with_poll(queue, vt=30, qty=2, max_poll_seconds=1, poll_interval_ms=50) == []
    )
    grouped(client, queue, "a", "a", "b", "b")
    assert ids(client.read_grouped_with_poll(queue, vt=30, qty=1, max_poll_seconds=30)) == [1]
    assert ids(client.read_grouped_rr_with_poll(queue, vt=30, qty=1, max_poll_seconds=30)) == [3]


# Topics


def test_topics(client: Client, new_queue: Callable[[], str]) -> None:
    every, orders, errors = new_queue(), new_queue(), new_queue()
    client.bind_topic("#", every)
    client.bind_topic("orders.*", orders)
    client.bind_topic("orders.#", orders)
    client.bind_topic("orders.*", orders)
    client.bind_topic("*.error", errors)
    bound = {(binding.pattern, binding.queue_name) for binding in client.list_topic_bindings()}
    assert bound >= {("#", every), ("orders.*", orders), ("orders.#", orders), ("*.error", errors)}
    assert {binding.pattern for binding in client.list_topic_bindings(orders)} == {"orders.*", "orders.#"}
    routes = {
        (route.pattern, route.queue_name, route.compiled_regex)
        for route in client.test_routing("orders.error")
    }
    assert routes == {
        ("#", every, "^.*$"),
        ("orders.*", orders, r"^orders\.[^.]+$"),
        ("orders.#", orders, r"^orders\..*$"),
        ("*.error", errors, r"^[^.]+\.error$"),
    }
    assert client.send_topic("orders.error", {"n": 1}) == 3
    assert client.send_topic("orders.eu.paid", {"n": 2}, headers={"h": 2}, delay=0) == 2
    assert client.send_topic("anything", {"n": 3}, delay=3600) == 1
    sent = client.send_batch_topic("orders.new", [{"n": 4}, {"n": 5}])
    assert {(result.queue_name, result.msg_id) for result in sent} == {
        (every, 4), (every, 5), (orders, 3), (orders, 4),
    }  # fmt: skip
    assert len(client.send_batch_topic("x.error", [{"n": 6}], headers=[{"h": 6}])) == 2
    assert len(client.send_batch_topic("x.error", [{"n": 7}], delay=3600)) == 2
    assert len(client.send_batch_topic("x.error", [{"n": 8}], delay=datetime.now(UTC))) == 2
    assert len(client.send_batch_topic("x.error", [{"n": 9}], headers=[{"h": 9}], delay=3600)) == 2
    assert (
        len(client.send_batch_topic("x.error", [{"n": 9}], headers=[{"h": 9}], delay=datetime.now(UTC))) == 2
    )
    assert [m.message["n"] for m in client.read(orders, vt=30, qty=10)] == [1, 2, 4, 5]
    assert client.unbind_topic("orders.*", orders) is True
    assert client.unbind_topic("orders.*", orders) is False
    assert client.unbind_topic("#", every) is True
    assert client.send_topic("nobody", {}) == 0


def test_a_topic_with_headers_alone(client: Client, queue: str, system: str) -> None:
    client.bind_topic("with.headers", queue)
    if system == "pgmq":
        # Its client calls a function that it does not have.
        with pytest.raises(Exception, match="does not exist"):
            client.send_topic("with.headers", {"n": 1}, headers={"h": 1})
        return
    assert client.send_topic("with.headers", {"n": 1}, headers={"h": 1}) == 1
    assert client.read(queue).headers == {"h": 1}


@pytest.mark.parametrize(
    "key", ["", ".a", "a.", "a..b", "a!", "a b", "a.*", "x" * 256], ids=lambda key: repr(key)[:12]
)
def test_what_is_no_routing_key(client: Client, key: str) -> None:
    assert client.validate_routing_key(key) is False
    with pytest.raises(Exception, match=r"routing.key"):
        client.send_topic(key, {})


def test_routing_keys_and_patterns(client: Client, queue: str) -> None:
    for key in ("a", "a.b-c_d.E9", "x" * 255):
        assert client.validate_routing_key(key) is True
    for pattern in ("#", "*", "a.*.#", "a.b", "x*.y"):
        assert client.validate_topic_pattern(pattern) is True
    for pattern in ("", ".a", "a.", "a..b", "a.**", "a.##", "a.*#", "a.#*", "a!", "x" * 256):
        assert client.validate_topic_pattern(pattern) is False
        with pytest.raises(Exception, match="pattern"):
            client.bind_topic(pattern, queue)
    with pytest.raises(Exception, match="does not exist"):
        client.bind_topic("a", "nowhere")


# Metrics


def test_metrics(client: Client, queue: str) -> None:
    empty = client.metrics(queue)
    assert (empty.queue_length, empty.total_messages, empty.queue_visible_length) == (0, 0, 0)
    assert (empty.newest_msg_age_sec, empty.oldest_msg_age_sec) == (None, None)
    client.send_batch(queue, [{"n": n} for n in range(1, 6)])
    client.send(queue, {"n": 6}, delay=3600)
    client.read(queue, vt=3600, qty=2)
    client.delete(queue, 1)
    client.archive(queue, 4)
    measured = client.metrics(queue)
    assert measured.queue_name == queue
    assert (measured.queue_length, measured.queue_visible_length, measured.total_messages) == (4, 2, 6)
    assert 0 <= measured.newest_msg_age_sec <= measured.oldest_msg_age_sec < 100
    assert abs(measured.scrape_time - datetime.now(UTC)) < timedelta(seconds=60)
    assert [m.queue_length for m in client.metrics_all() if m.queue_name == queue] == [4]


def test_the_queue_can_be_looked_at(client: Client, queue: str, sql: psycopg.Connection[Any]) -> None:
    client.send_batch(queue, [{"n": n} for n in range(1, 5)])
    client.send(queue, {"n": 5}, delay=3600)
    client.read(queue, vt=3600, qty=2)
    client.delete(queue, 1)
    assert sql.execute(
        f"select msg_id, read_ct, message, vt > now() from pgmq.q_{queue} order by msg_id"
    ).fetchall() == [
        (2, 1, {"n": 2}, True),
        (3, 0, {"n": 3}, False),
        (4, 0, {"n": 4}, False),
        (5, 0, {"n": 5}, True),
    ]
    assert sql.execute("select is_partitioned from pgmq.meta where queue_name = %s", (queue,)).fetchone() == (
        False,
    )


# Notifications


def test_notification_settings(client: Client, queue: str) -> None:
    def throttle() -> list[int]:
        return [t.throttle_interval_ms for t in client.list_notify_throttles() if t.queue_name == queue]

    with pytest.raises(Exception, match="notify_insert"):
        client.update_notify(queue, 10)
    client.enable_notify(queue)
    assert throttle() == [250]
    client.enable_notify(queue, throttle_interval_ms=20)
    assert throttle() == [20]
    client.update_notify(queue, 30)
    assert throttle() == [30]
    for call in (client.enable_notify, client.update_notify):
        with pytest.raises(Exception, match="non-negative"):
            call(queue, -1)
    client.disable_notify(queue)
    assert throttle() == []
    with pytest.raises(Exception, match="does not exist"):
        client.enable_notify("nowhere")


# Transactions


def test_several_calls_in_one_transaction(client: Client, queue: str) -> None:
    client.send_batch(queue, [{"n": 1}, {"n": 2}, {"n": 3}])

    def steps() -> Steps:
        assert (yield "read", queue, 30).msg_id == 1
        assert (yield "delete", queue, 1) is True
        assert (yield "pop", queue).msg_id == 2
        assert (yield "metrics", queue).queue_length == 1
        assert (yield "delete", queue, 3) is True
        assert (yield "send", queue, {"n": 4}) == 4
        assert (yield "send_batch", queue, [{"n": 5}, {"n": 6}]) == [5, 6]
        assert (yield "metrics", queue).queue_length == 3

    client.in_transaction(steps())
    assert client.metrics(queue).queue_length == 3
    assert ids(client.read(queue, vt=30, qty=10)) == [4, 5, 6]


def test_what_is_rolled_back_did_not_happen(client: Client, queue: str) -> None:
    client.send_batch(queue, [{"n": 1}, {"n": 2}])

    def steps() -> Steps:
        yield "send", queue, {"n": 3}
        assert (yield "read", queue, 30).msg_id == 1
        assert (yield "delete", queue, 1) is True
        assert (yield "delete", queue, 2) is True
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        client.in_transaction(steps())
    assert client.metrics(queue).queue_length == 2
    assert sorted(ids(client.read(queue, vt=30, qty=10))) == [1, 2]


def test_the_archive_stays_one_table(client: Client, queue: str, system: str) -> None:
    if system == "pgmq":
        with pytest.raises(Exception, match=r"."):
            client.convert_archive_partitioned(queue)
    else:
        client.convert_archive_partitioned(queue)
