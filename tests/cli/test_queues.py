"""pgmb queues, streams, route: create, look, change, drop; and what asks first."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg
import pytest

import pgmb
from harness.terminal import Terminal
from harness.waiting import until_true
from tests.cli.conftest import OpenTerminal, Run

# What the commands ask of the server is tested on every major, elsewhere.
pytestmark = pytest.mark.once(15)

Done = Callable[..., str]


def test_a_queue_from_its_creation_to_its_end(done: Done, run: Run) -> None:
    assert done("queues", "create", "billing", "order.*", "refund.#", "--lease-for", "2m") == (
        "Created queue billing.\n"
    )
    assert "nothing changed" in done("queues", "create", "billing", "order.*", "refund.#")
    shown = run("queues", "show", "billing", "--json").json
    assert shown["patterns"] == ["order.*", "refund.#"]
    assert shown["lease_for"] == "PT120S"
    assert shown["stream"] == "main"
    done("queues", "alter", "billing", "--max-attempts", "3", "--backoff-base", "500ms")
    done("queues", "bind", "billing", "order.#")
    done("queues", "pause", "billing", "--reason", "deploy")
    shown = run("queues", "show", "billing", "--json").json
    assert (shown["max_attempts"], shown["backoff_base"], shown["patterns"]) == (3, "PT0.5S", ["order.#"])
    assert shown["paused_reason"] == "deploy"
    assert "deploy" in done("queues", "list")
    done("queues", "resume", "billing")
    assert done("queues", "hand-over", "billing", "crm") == "Queue billing belongs to app crm.\n"
    done("publish", "order.paid", "1")
    shown = run("queues", "show", "billing", "--depth", "--json").json
    assert (shown["paused_at"], shown["depth"]) == (None, 1)
    assert "lease for" in done("queues", "show", "billing")
    done("queues", "drop", "billing", "--yes")
    assert run("queues", "list", "--json").json == []


def test_new_patterns_keep_the_filter_unless_it_is_removed(done: Done, run: Run) -> None:
    filtered = ("--filter", "$.payload.n > $least", "--param", "least=5")
    done("queues", "create", "billing", "order.*", "old", *filtered)

    def found() -> tuple[Any, ...]:
        shown = run("queues", "show", "billing", "--json").json
        return shown["patterns"], shown["filter"], shown["params"]

    done("queues", "bind", "billing", "order.*", "refund.*")
    assert found() == (["order.*", "refund.*"], "$.payload.n > $least", {"least": 5})
    refused = run("queues", "bind", "billing", "order.*", "--no-filter", "--filter", "$.payload.n > 1")
    assert "no_filter cannot be combined with a filter" in refused.err
    done("queues", "bind", "billing", "order.*", "--no-filter")
    assert found() == (["order.*"], None, None)


def test_a_list_shows_where_workers_disagree(done: Done, run: Run, db: psycopg.Connection[Any]) -> None:
    done("queues", "create", "billing", "order.*", "old")
    db.execute("select pgmb.worker_heartbeat(gen_random_uuid(), 'host7', 4711, '{billing}')")
    db.execute("select pgmb.declare_queue((select id from pgmb.worker), 'billing', '{order.*}')")
    told = "it is bound to patterns that no live worker declares: old"
    assert f"Queue billing: {told}. pgmb work --prune" in run("queues", "list").err
    ((one,),) = [queue["disagreements"] for queue in run("queues", "list", "--json").json]
    assert (one["kind"], one["message"]) == ("undeclared", told)


def test_a_queue_is_converted_with_what_waits_in_it(done: Done, run: Run) -> None:
    done("queues", "create", "billing", "order.*")
    for n in range(3):
        done("publish", "order.paid", str(n), "--key", "k")
    assert done("queues", "convert", "billing", "--ordered", "--shards", "2") == "Converted queue billing.\n"
    shown = run("queues", "show", "billing", "--depth", "--json").json
    assert (shown["ordered"], shown["shards"], shown["depth"], shown["paused_at"]) == (True, 2, 3, None)
    done("receive", "billing", "--no-ack")
    held = run("queues", "convert", "billing", "--plain", "--wait", "0s")
    assert (held.code, "leases of queue 'billing' hold 1 events" in held.err) == (1, True)
    assert run("queues", "show", "billing", "--json").json["paused_at"] is None
    done("queues", "create", "mail")
    done("queues", "convert", "mail", "--fair-by", "key")
    done("queues", "convert", "mail", "--lane", "urgent.#")
    assert run("queues", "show", "mail", "--json").json["lanes"] == ["urgent.#"]
    assert run("queues", "convert", "mail").code == 1


def test_a_conversion_that_is_ended_leaves_the_queue_as_it_was(dsn: str, db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.create_queue('billing')")
    db.execute("select pgmb.publish('a', '1')")
    db.execute("select * from pgmb.receive('billing')")
    paused = "select paused_at is not null from pgmb.queue_status"
    command = [sys.executable, "-m", "pgmb", "queues", "convert", "billing", "--ordered", "--dsn", dsn]
    for number in (signal.SIGTERM, signal.SIGHUP):
        with subprocess.Popen(command) as process:
            until_true(lambda: db.execute(paused).fetchone() == (True,), 60)
            process.send_signal(number)
            assert process.wait(60) != 0
        assert db.execute(paused).fetchone() == (False,)


def test_a_conversion_resumes_a_queue_that_a_killed_one_left_paused(
    dsn: str, done: Done, db: psycopg.Connection[Any]
) -> None:
    db.execute("select pgmb.create_queue('billing')")
    db.execute("select pgmb.publish('a', '1')")
    db.execute("select * from pgmb.receive('billing')")
    paused = "select paused_at is not null from pgmb.queue_status"
    command = [sys.executable, "-m", "pgmb", "queues", "convert", "billing", "--ordered", "--dsn", dsn]
    with subprocess.Popen(command) as process:
        until_true(lambda: db.execute(paused).fetchone() == (True,), 60)
        process.kill()
    db.execute("select pgmb.purge('billing')")
    assert done("queues", "convert", "billing", "--ordered") == "Converted queue billing.\n"
    assert db.execute(paused).fetchone() == (False,)
    done("queues", "pause", "billing", "--reason", "incident")
    done("queues", "convert", "billing", "--plain")
    assert db.execute(paused).fetchone() == (True,)


def test_what_comes_next_is_shown_and_stays(done: Done, run: Run) -> None:
    done("queues", "create", "billing", "order.*")
    assert done("queues", "peek", "billing") == "Nothing is due.\n"
    for n in range(3):
        done("publish", "order.paid", f'{{"n": {n}, "text": "{"x" * 100}"}}', "--key", "k")
    shown = done("queues", "peek", "billing", "--max", "2")
    assert shown.count("order.paid") == 2
    assert "bytes)" in shown
    assert "Stopped before the end of the log" in shown
    found = run("queues", "peek", "billing", "--json").json
    assert [event["payload"][:7] for event in found["events"]] == ['{"n": 0', '{"n": 1', '{"n": 2']
    assert run("queues", "show", "billing", "--depth", "--json").json["depth"] == 3
    assert run("queues", "peek", "gone").code == 1


def test_peek_counts_the_next_events_by_topic(done: Done, run: Run, dsn: str) -> None:
    with pgmb.connect(dsn) as broker:
        broker.create_queue("billing", ["order.#"])
        broker.publish_many("order.paid", [1, 2, 3])
        broker.publish("order.sent", 4)
    assert run("queues", "peek", "billing", "--topics", "--json").json["topics"] == {
        "order.paid": 3,
        "order.sent": 1,
    }
    shown = done("queues", "peek", "billing", "--topics", "--max", "2")
    assert ["order.paid", "2"] in [re.findall(r"[\w.]+", line) for line in shown.splitlines()]
    assert "order.sent" not in shown
    assert "Stopped before the end of the log" in shown


def test_peek_does_not_hide_events_that_are_leased_or_retried_later(done: Done, dsn: str) -> None:
    with pgmb.connect(dsn) as broker:
        broker.create_queue("billing", ["order.#"])
        broker.publish_many("order.old", [1, 2, 3])
        lease = broker.receive("billing", 3)
        lease.retry(lease.events[0], after=3600)
    shown = done("queues", "peek", "billing")
    assert shown == "Nothing is due.\nLeased: 2 events. Retries, due or not: 1.\n"


def test_queues_with_limits_and_lanes(done: Done, run: Run) -> None:
    done("queues", "create", "slow", "--ordered", "--max-in-flight", "5", "--rps", "10", "--ttl", "1h")
    done("queues", "create", "short", "--max-length", "7", "--when-full", "drop_oldest")
    done("queues", "create", "urgent", "job.#", "--lane", "job.now", "--lane", "job.soon")
    shown = run("queues", "show", "slow", "--json").json
    assert (shown["ordered"], shown["max_in_flight"], shown["rps"], shown["ttl"]) == (True, 5, 10, "PT3600S")
    shown = run("queues", "show", "short", "--json").json
    assert (shown["max_length"], shown["when_full"]) == (7, "drop_oldest")
    assert run("queues", "show", "urgent", "--json").json["lanes"] == ["job.now", "job.soon"]
    assert [one["queue"] for one in run("queues", "list", "--json").json] == ["short", "slow", "urgent"]


def test_queues_and_tails_with_filters(done: Done, run: Run) -> None:
    asked = (
        "--equals",
        "payload.status=paid",
        "--filter",
        "$.payload.total > $least",
        "--param",
        "least=100",
    )
    done("queues", "create", "large", "order.*", *asked)
    shown = run("queues", "show", "large", "--json").json
    assert shown["equals"] == {"payload": {"status": "paid"}}
    assert (shown["filter"], shown["params"]) == ("$.payload.total > $least", {"least": 100})
    for status, total in (("paid", 50), ("open", 500), ("paid", 500)):
        done("publish", "order.made", f'{{"status": "{status}", "total": {total}}}')
    followed = run("tail", "order.*", *asked, "--since", "earliest", "--no-follow", "--json").out
    received = run("receive", "large").out
    assert followed.count("\n") == received.count("\n") == 1
    for found in (followed, received):
        assert '{"status": "paid", "total": 500}' in found
    done("queues", "bind", "large", "order.*", "--equals", "topic=order.made")
    shown = run("queues", "show", "large", "--json").json
    assert (shown["equals"], shown["filter"], shown["params"]) == ({"topic": "order.made"}, None, None)


def test_a_filter_that_failed_is_shown_with_its_error(done: Done, run: Run) -> None:
    done(
        "queues", "create", "dated", "--filter", '$.payload.datetime() < "2030-01-01T00:00:00+00".datetime()'
    )
    done("publish", "a", '"2020-01-01"')
    done("receive", "dated")
    for shown in (done("queues", "show", "dated"), done("queues", "list")):
        assert "filter failed" in " ".join(shown.split())
    assert "without time zone usage" in run("queues", "show", "dated", "--json").json["paused_reason"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--equals", "nonsense"), "not NAME=VALUE"),
        (("--equals", "payload.a=1", "--equals", "payload.a.b=2"), "lies inside another"),
        (("--equals", "size=1"), "invalid equals"),
        (("--filter", "$.payload >"), "invalid filter"),
        (("--filter", "$.payload > $least"), "$least, which params do not give"),
        (("--condition", "e.payload >"), "invalid condition"),
        (("--condition", "true; drop table x"), "invalid condition"),
    ],
)
def test_what_is_no_filter_is_refused(run: Run, options: tuple[str, ...], said: str) -> None:
    outcome = run("queues", "create", "q", *options)
    assert outcome.code != 0
    assert said in " ".join(outcome.err.split())


def test_seeking_and_purging_move_a_queue(done: Done, run: Run, db: psycopg.Connection[Any]) -> None:
    done("queues", "create", "q")
    done("publish", "t", "1")
    position = db.execute("select pgmb.position()::text").fetchone()
    assert position is not None
    done("publish", "t", "2")

    def waiting() -> int:
        return int(run("queues", "show", "q", "--depth", "--json").json["depth"])

    assert waiting() == 2
    done("queues", "purge", "q", "--yes")
    assert waiting() == 0
    for point, left in (("earliest", 2), ("latest", 0), (position[0], 1), ("1h", 2), ("2001-01-01", 2)):
        done("queues", "seek", "q", "--to", point, "--yes")
        assert waiting() == left, point


def test_a_time_before_every_tick_means_the_beginning_and_is_said(
    done: Done, run: Run, db: psycopg.Connection[Any]
) -> None:
    done("queues", "create", "q")
    done("publish", "t", "1")
    outcome = run("queues", "seek", "q", "--to", "0s", "--yes")
    assert (outcome.code, "No tick is that old" in outcome.err) == (0, True)
    db.execute("select pgmb.tick()")
    assert run("queues", "seek", "q", "--to", "0s", "--yes").err == ""


def test_a_queue_may_start_in_the_past(done: Done) -> None:
    done("publish", "t", "1")
    done("queues", "create", "q", "--starting", "earliest")
    assert '"payload":1' in done("receive", "q")


@pytest.mark.parametrize("point", ["yesterday", "1x", "(1,2)", "", "99999999999d"])
def test_nonsense_points_in_time_are_refused(run: Run, point: str) -> None:
    outcome = run("queues", "seek", "q", "--to", point, "--yes")
    assert outcome.code == 2
    assert "Invalid value" in outcome.err


def test_a_stream_from_its_creation_to_its_end(done: Done, run: Run) -> None:
    done("streams", "create", "audit", "--keep-for", "7d", "--rotate-every", "10m", "--archive")
    shown = run("streams", "show", "audit", "--json").json
    assert (shown["keep_for"], shown["rotate_every"], shown["archive"]) == ("P7D", "PT600S", True)
    assert "nothing changed" in done("streams", "create", "audit")
    done("streams", "alter", "audit", "--keep-for", "off", "--no-archive", "--drop-unread")
    shown = run("streams", "show", "audit", "--json").json
    assert (shown["keep_for"], shown["archive"], shown["drop_unread"]) == (None, False, True)
    assert "rotate every" in done("streams", "show", "audit")
    done("queues", "create", "q", "--stream", "audit")
    assert run("streams", "show", "audit", "--json").json["queues"] == ["q"]
    refused = run("streams", "drop", "audit", "--yes")
    assert refused.code == 1
    assert "queues still read stream" in refused.err
    done("queues", "drop", "q", "--yes")
    done("streams", "drop", "audit", "--yes")
    assert [one["stream"] for one in run("streams", "list", "--json").json] == ["main"]
    assert "main" in done("streams", "list")


def test_route_test_names_queues_patterns_and_handlers(
    done: Done, run: Run, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "routed_shop.py").write_text(
        "import pgmb\nfrom pgmb.app import App\napp = App()\n\n"
        "@app.on('order.paid', queue='billing')\nasync def charge(order: dict) -> None: ...\n\n"
        "@app.on('order.sent', queue='billing')\nasync def note(order: dict) -> None: ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    done("queues", "create", "billing", "order.paid", "order.*", "refund.#")
    done("queues", "create", "mail", "#.late")
    route = run("route", "test", "order.paid", "--json", "--app", "routed_shop:app").json
    assert route["queues"] == [
        {
            "queue": "billing",
            "patterns": ["order.paid", "order.*"],
            "endpoints": [],
            "paused": False,
            "handlers": ["charge"],
        }
    ]
    assert "billing" in done("route", "test", "order.paid")
    assert "No queue" in done("route", "test", "user.created")
    for wrong in ("routed_shop:other", "no_such_module:app"):
        refused = run("route", "test", "order.paid", "--app", wrong)
        assert (refused.code, "Traceback" in refused.err) == (1, False)


def test_a_topic_that_no_endpoint_wants_goes_nowhere(done: Done, run: Run) -> None:
    """The queue that endpoints share takes every topic."""
    done("endpoints", "create", "hook", "https://hook.example/", "order.*")
    done("endpoints", "create", "gone", "https://gone.example/", "user.*")
    done("endpoints", "disable", "gone")
    for topic in ("user.created", "mail.sent"):
        assert run("route", "test", topic, "--json").json["queues"] == []
        assert "No queue" in done("route", "test", topic)
    (row,) = run("route", "test", "order.paid", "--json").json["queues"]
    assert (row["patterns"], row["endpoints"]) == (["order.*"], ["hook"])


DESTROYING = (
    ("queues", "drop", "q"),
    ("queues", "purge", "q"),
    ("queues", "seek", "q", "--to", "earliest"),
    ("streams", "drop", "s"),
    ("dlq", "drop", "q"),
    ("uninstall",),
)


@pytest.mark.parametrize("command", DESTROYING, ids=lambda command: " ".join(command[:2]))
def test_what_destroys_is_refused_where_nobody_can_be_asked(run: Run, done: Done, command: Any) -> None:
    done("queues", "create", "q")
    done("streams", "create", "s")
    outcome = run(*command)
    assert outcome.code == 2
    assert "--yes" in outcome.err
    assert "Traceback" not in outcome.err
    assert len(run("queues", "list", "--json").json) == 1
    assert len(run("streams", "list", "--json").json) == 2


def test_what_destroys_asks_on_a_terminal(done: Done, run: Run, terminal: OpenTerminal) -> None:
    done("queues", "create", "q")
    for answer, code, left in (("n", 1, 1), ("y", 0, 0)):
        with terminal("queues", "drop", "q") as asked:
            asked.wait_for(partial(_asks, asked))
            asked.send(f"{answer}\n")
            assert asked.finish() == code
        assert len(run("queues", "list", "--json").json) == left


def _asks(shown: Terminal) -> bool:
    return "[y/N]" in shown.text
