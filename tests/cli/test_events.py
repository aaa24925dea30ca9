"""pgmb publish, receive, tail, dlq, erase."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

from harness.terminal import Terminal
from tests.cli.conftest import OpenTerminal, Run

# What the commands ask of the server is tested on every major, elsewhere.
pytestmark = pytest.mark.once(15)

Done = Callable[..., str]


def lines(text: str) -> list[Any]:
    return [msgspec.json.decode(line) for line in text.splitlines()]


def test_publishing_one_event_prints_its_id(done: Done) -> None:
    done("queues", "create", "q")
    printed = done("publish", "order.paid", '{"total": 1.50}', "--key", "k", "--headers", '{"h": 1}')
    (event,) = lines(done("receive", "q"))
    assert event["id"] == printed.strip()
    assert (event["topic"], event["key"], event["headers"]) == ("order.paid", "k", {"h": 1})


def test_payloads_and_events_a_line(done: Done) -> None:
    done("queues", "create", "q")
    assert done("publish", "t", "-", stdin=b'1\n\n{"a": "\xc3\xa9"}\n') == "2\n"
    given = b"""{"topic": "a", "payload": null, "id": "01900000-0000-7000-8000-000000000001"}
        {"topic": "b", "payload": [1], "key": "k", "headers": {"h": true}}"""
    assert done("publish", "--events", stdin=given) == "2\n"
    events = lines(done("receive", "q", "--max", "10"))
    assert [(one["topic"], one["payload"]) for one in events] == [
        ("t", 1),
        ("t", {"a": "é"}),
        ("a", None),
        ("b", [1]),
    ]
    assert events[2]["id"] == "01900000-0000-7000-8000-000000000001"
    assert (events[3]["key"], events[3]["headers"]) == ("k", {"h": True})


@pytest.mark.parametrize(
    "bad", [b"{", b"hello", b"NaN", b"\xff", b'"\x00"', b"[" * 100_000], ids=lambda bad: repr(bad[:5])
)
def test_a_line_that_is_not_json_is_named_and_nothing_is_published(
    run: Run, done: Done, db: psycopg.Connection[Any], bad: bytes
) -> None:
    outcome = run("publish", "t", "-", stdin=b"1\n2\n" + bad + b"\n4\n")
    assert outcome.code == 1
    assert "line 3" in outcome.err
    assert "Nothing was published" in outcome.err
    assert db.execute("select count(*) from pgmb.log_main").fetchone() == (0,)
    assert run("publish", "--events", stdin=b'{"topic": "t", "payload": ' + bad + b"}\n").code == 1


@pytest.mark.parametrize(
    "bad", [b"1", b'{"topic": "t"}', b'{"payload": 1}', b'{"topic": "t", "payload": 1, "colour": 1}']
)
def test_a_line_that_is_no_event_is_named(run: Run, bad: bytes) -> None:
    outcome = run("publish", "--events", stdin=bad)
    assert outcome.code == 1
    assert "line 1" in outcome.err


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("t",),
        ("t", "1", "--events"),
        ("t", "-", "--key", "k"),
        ("t", "-", "--delay", "1s"),
        ("t", "1", "--delay", "soon"),
    ],
)
def test_wrong_usage_of_publish(run: Run, arguments: tuple[str, ...]) -> None:
    assert run("publish", *arguments).code == 2


def test_delays_and_deduplication_keys(done: Done, db: psycopg.Connection[Any]) -> None:
    done("publish", "t", "1", "--delay", "1h")
    assert db.execute("select count(*) from pgmb.delayed").fetchone() == (1,)
    first = done("publish", "t", "1", "--dedup-key", "k")
    assert done("publish", "t", "2", "--dedup-key", "k") == first


def test_a_progress_bar_is_shown_on_a_terminal(dsn: str, tmp_path: Path) -> None:
    given = tmp_path / "payloads"
    given.write_text("".join(f"{number}\n" for number in range(5000)))
    command = ["/bin/sh", "-c", f"{sys.executable} -m pgmb publish t - < {given}"]
    with Terminal(command, env={**os.environ, "PGMB_DSN": dsn}) as shown:
        assert shown.finish() == 0
        assert "5,000 events" in shown.text
        assert "100 %" in shown.text
        assert shown.text.rstrip().endswith("5000")


def test_receive_leaves_what_it_does_not_ack(done: Done, db: psycopg.Connection[Any]) -> None:
    done("queues", "create", "q")
    done("publish", "t", "1")
    assert len(lines(done("receive", "q", "--no-ack"))) == 1
    assert db.execute("select leased_events from pgmb.queue_status").fetchone() == (1,)
    assert done("receive", "q") == ""


def test_tail_prints_what_matches(done: Done) -> None:
    done("publish", "order.paid", '{"a": 1}', "--key", "k")
    done("publish", "user.created", "2")
    done("publish", "order.sent", "3")
    events = lines(done("tail", "order.*", "--since", "earliest", "--no-follow", "--json"))
    assert [one["topic"] for one in events] == ["order.paid", "order.sent"]
    assert done("tail", "--since", "0s", "--no-follow") == "", "though no tick has a name for that time"
    printed = done("tail", "--since", "1h", "--no-follow", "--max", "1")
    assert printed.endswith('order.paid [k] {"a": 1}\n')
    assert done("tail", "--no-follow") == ""


def test_tail_follows_until_it_is_interrupted(terminal: OpenTerminal, done: Done) -> None:
    with terminal("tail", "order.*", "--since", "earliest") as watching:
        for number in (1, 2):
            done("publish", "order.paid", str(number))
            watching.wait_for(partial(_shows, watching, f"order.paid {number}"))
        watching.process.send_signal(signal.SIGINT)
        assert watching.finish() == 0
        assert "Traceback" not in watching.text


def _shows(watching: Terminal, text: str) -> bool:
    return text in watching.text


def test_the_reader_of_a_pipe_may_leave(dsn: str, done: Done) -> None:
    done("publish", "t", "-", stdin=b"1\n" * 3000)
    command = f"{sys.executable} -m pgmb tail --since earliest --no-follow --json | head -n 1"
    ended = subprocess.run(
        ["/bin/sh", "-c", command],
        env={**os.environ, "PGMB_DSN": dsn},
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(ended.stdout.splitlines()) == 1
    assert ended.stderr == ""


@pytest.fixture
def dead(db: psycopg.Connection[Any]) -> list[int]:
    """Ids of dead letters of queue q: order.paid (timeout), order.sent (100% wrong), user.new (no error)."""
    db.execute("select pgmb.create_queue('q')")
    for topic, error in (("order.paid", "timeout_1"), ("order.sent", "100% wrong"), ("user.new", None)):
        db.execute("select pgmb.publish(%s, '{\"n\": 1}', key => 'k')", [topic])
        db.execute("select pgmb.bury(lease, error => %s) from pgmb.receive('q', 1)", [error])
    return [row[0] for row in db.execute("select id from pgmb.dead order by id").fetchall()]


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        ((), [0, 1, 2]),
        (("--topic", "order.*"), [0, 1]),
        (("--error", "timeout_"), [0]),
        (("--error", "timeoutx"), []),
        (("--error", "t%"), [0]),
        (("--topic", "order.*", "--error", "wrong"), [1]),
    ],
)
def test_dead_letters_are_filtered_alike_by_every_command(
    run: Run, done: Done, db: psycopg.Connection[Any], dead: list[int], filters: Any, found: list[int]
) -> None:
    listed = [one["id"] for one in run("dlq", "list", "q", "--json", *filters).json]
    assert listed == [dead[number] for number in found]
    if dead and not filters:
        assert f"Dropped {len(found)} dead" in done("dlq", "drop", "q", "--yes")
        assert done("dlq", "list", "q") == "No dead letters.\n"
        return
    assert f"Redrove {len(found)} dead" in done("dlq", "redrive", "q", *filters)
    done("dlq", "drop", "q", *filters, "--yes")
    assert db.execute("select count(*) from pgmb.dead").fetchone() == (3 - len(found),)


def test_one_dead_letter_by_its_id(run: Run, done: Done, dead: list[int]) -> None:
    letter = run("dlq", "show", "q", str(dead[1]), "--json").json
    assert (letter["id"], letter["error"], letter["payload"]) == (dead[1], "100% wrong", {"n": 1})
    assert "100% wrong" in done("dlq", "show", "q", str(dead[1]))
    assert "order.sent" in done("dlq", "list", "q")
    assert run("dlq", "show", "q", "999999").code == 1
    assert "Redrove 1" in done("dlq", "redrive", "q", "--id", str(dead[1]))
    assert "Dropped 1" in done("dlq", "drop", "q", "--id", str(dead[0]), "--id", "999999", "--yes")
    assert [one["id"] for one in run("dlq", "list", "q", "--json").json] == [dead[2]]


def test_a_long_list_of_dead_letters_goes_on(run: Run, done: Done, dead: list[int]) -> None:
    assert f"--after {dead[1]}" in done("dlq", "list", "q", "--max", "2")
    rest = run("dlq", "list", "q", "--max", "2", "--after", str(dead[1]), "--json").json
    assert [one["id"] for one in rest] == [dead[2]]


def test_what_became_of_an_event_is_printed(run: Run, done: Done, db: psycopg.Connection[Any]) -> None:
    done("queues", "create", "q", "--max-attempts", "2")
    done("queues", "create", "other", "x")
    event = done("publish", "order.paid", '{"total": 1}', "--key", "k").strip()
    assert "waiting" in done("event", event)
    lease = "(select distinct lease from pgmb.receive('q'))"
    db.execute(
        f"select pgmb.retry({lease}, after => '0', error => 'first', detail => 'File \"a.py\", line 7')"
    )
    printed = done("event", event)
    for told in ("order.paid", "retrying", "attempt 2", "first", 'File "a.py", line 7', "not taken"):
        assert told in printed
    db.execute(f"select pgmb.retry({lease}, error => 'second')")
    assert "dead letter" in done("event", event)
    (found,) = lines(done("event", event, "--json"))
    fates = {one["name"]: one for one in found["consumers"]}
    assert [one["error"] for one in fates["q"]["errors"]] == ["first", "second"]
    assert (found["found"], fates["other"]["state"]) == ("log", "not taken")
    unknown = run("event", "01900000-0000-4000-8000-000000000001", "--around", "10m")
    assert (unknown.code, "no event" in unknown.err, "--around" in unknown.err) == (1, True, True)
    assert done("workers") == "No workers.\n"
    db.execute("select pgmb.worker_heartbeat(gen_random_uuid(), 'host7', 4711, '{q}')")
    assert "host7:4711" in done("workers")
    assert lines(done("workers", "--json"))[0][0]["alive"]


def test_erase_counts_asks_for_a_reason_and_is_recorded(run: Run, db: psycopg.Connection[Any]) -> None:
    run("publish", "customer.created", '{"name": "A Customer"}', "--key", "customer-7")
    run("publish", "customer.created", '{"name": "Another"}', "--key", "customer-8")
    assert "pgmb.log_main │    1" in run("erase", "--key", "customer-7", "--dry-run").out
    assert run("erase", "--key", "customer-9", "--dry-run").out == "No rows have such a key.\n"
    assert run("erase", "--key", "customer-7", "--yes").code == 2
    refused = run("erase", "--key", "customer-7", "--reason", "of customer-7", "--yes")
    assert (refused.code, "must not contain the key" in refused.err) == (1, True)
    assert run("erasures").out == "No erasures.\n"
    done = run("erase", "--key", "customer-7", "--reason", "request 17", "--yes", "--json").json
    assert [(table["name"], table["events"]) for table in done["tables"]] == [("pgmb.segment_1_0", 1)]
    assert db.execute("select key, payload from pgmb.log_main order by seq").fetchall() == [
        (None, None),
        ("customer-8", {"name": "Another"}),
    ]
    (recorded,) = run("erasures", "--key", "customer-7", "--json").json
    assert (recorded["id"], recorded["reason"], recorded["keys"]) == (done["id"], "request 17", 1)
    assert run("erasures", "--key", "customer-8", "--json").json == []
    assert "request 17" in run("erasures").out
    assert "No rows have such a key." in run("erase", "--key", "customer-7", "--reason", "r", "--yes").out
