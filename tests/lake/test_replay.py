"""A slice of history enters one queue or stream, each event once, and no other queue sees it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pyarrow.parquet as pq
import pytest

from harness.segments import seal
from harness.states import queue_names, retries
from pgmb.errors import Conflict, InvalidArgument, NotFound
from pgmb.lake.replay import Pace, Replayer
from tests.lake.conftest import Lake
from tests.lake.test_cli import Run, pgmb_lake  # noqa: F401

pytestmark = [pytest.mark.new_database]


@pytest.fixture
def replayer(lake: Lake) -> Replayer:
    return Replayer(lake.dsn, options=lake.options)


@pytest.fixture
def both_tiers(lake: Lake) -> Lake:
    """Segment 0 is dropped and in the lake alone, 1 is in both, 2 in the log; two queues have passed them."""
    for name in ("billing", "mail"):
        lake.db.execute("select pgmb.create_queue(%s, '{#}')", [name])
    lake.publish(300)
    lake.archive()
    drain(lake, "billing", "mail")
    lake.age()
    assert lake.dropped() == [0]
    lake.publish(200)
    lake.archive()
    lake.publish(100, sealed=False)
    drain(lake, "billing", "mail")
    return lake


def drain(lake: Lake, *queues: str) -> None:
    for queue in queues:
        while row := lake.db.execute("select lease from pgmb.receive(%s, 1000) limit 1", [queue]).fetchone():
            lake.db.execute("select pgmb.ack(%s)", row)


def waiting(lake: Lake, queue: str) -> list[tuple[Any, ...]]:
    return [
        (event.seq, event.id, event.topic, event.key, event.text, event.published_at)
        for event in retries(lake.db, queue)
    ]


def history(lake: Lake) -> list[tuple[Any, ...]]:
    """Every event of both tiers, as a queue gets it."""
    stored = [(seq, id, topic, key, payload, at) for seq, _, id, topic, key, payload, _, at in lake.stored()]
    logged = lake.db.execute(
        "select e.seq, coalesce(e.id, pgmb.derive_id(e.seq, e.published_at, s.salt))::text, e.topic::text,"
        " e.key::text, e.payload::text, e.published_at from pgmb.log_main e, pgmb.stream s"
        " where s.name = 'main' and e.seq > %s order by e.seq",
        [stored[-1][0]],
    ).fetchall()
    return [*stored, *logged]


def plain(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [(seq, str(id), *rest) for seq, id, *rest in rows]


def test_history_of_both_tiers_enters_one_queue_as_it_was(both_tiers: Lake, replayer: Replayer) -> None:
    chosen = replayer.choose("main", None, None, into_queue="billing")
    counted = replayer.count(chosen)
    id = replayer.start(chosen)
    *_, done = replayer.run(id)
    assert done == counted
    assert done.events == 600
    assert plain(waiting(both_tiers, "billing")) == history(both_tiers)
    assert waiting(both_tiers, "mail") == []
    received = both_tiers.db.execute("select headers, attempt from pgmb.receive('billing', 1000)").fetchall()
    assert len(received) == 600
    assert {(headers["pgmb-replay"], attempt) for headers, attempt in received} == {(str(id), 1)}
    assert [headers["trace"] for headers, _ in received if "trace" in headers] != []
    assert both_tiers.db.execute("select count(*) from pgmb.receive('mail')").fetchone() == (0,)
    assert replayer.find(id).ended_at is not None
    assert list(replayer.run(id)) == [], "it has ended"


def test_topics_times_and_filters_choose_in_both_tiers(both_tiers: Lake, replayer: Replayer) -> None:
    everything = history(both_tiers)
    since, until = everything[250][5], everything[-50][5]
    chosen = replayer.choose(
        "main",
        since,
        until,
        into_queue="mail",
        patterns=["order.1", "order.3"],
        filter="$.payload.n > $least",
        params={"least": 200},
    )
    wanted = [
        event
        for event in everything
        if since <= event[5] < until
        and event[2] in ("order.1", "order.3")
        and json.loads(event[4])["n"] > 200
    ]
    assert replayer.count(chosen).events == len(wanted) > 0
    list(replayer.run(replayer.start(chosen)))
    assert plain(waiting(both_tiers, "mail")) == wanted
    with pytest.raises(InvalidArgument, match="invalid filter"):
        replayer.start(replayer.choose("main", None, None, into_queue="mail", filter="$.("))


def test_files_of_other_times_are_not_read(lake: Lake, replayer: Replayer) -> None:
    """A replay of an hour does not read years."""
    for days in (3, 2, 1):
        lake.publish(50, sealed=False)
        lake.db.execute(
            "update pgmb.log_main set published_at = now() - %s * interval '1 day' where seq >> 40 = %s",
            [days, 3 - days],
        )
        seal(lake.db)
        lake.archive()
    lake.age()
    assert lake.dropped() == [0, 1, 2]
    lake.db.execute("select pgmb.create_queue('billing', '{#}')")
    wanted = lake.stored()[50:100]
    for file in lake.files():
        if pq.read_table(file, partitioning=None).column("seq")[0].as_py() != wanted[0][0]:
            file.unlink()
    begin, end = wanted[0][7], wanted[-1][7] + timedelta(microseconds=1)
    list(replayer.run(replayer.start(replayer.choose("main", begin, end, into_queue="billing"))))
    assert [event[0] for event in waiting(lake, "billing")] == [event[0] for event in wanted]


def test_a_target_has_one_unfinished_replay_and_one_process(both_tiers: Lake, replayer: Replayer) -> None:
    chosen = replayer.choose("main", None, None, into_queue="billing")
    id = replayer.start(chosen)
    with pytest.raises(Conflict, match="is not finished") as refused:
        replayer.start(chosen)
    assert f"--resume {id}" in (refused.value.hint or "")
    first, second = replayer.run(id, 1000), replayer.run(id, 1000)
    next(first)
    next(second)
    with pytest.raises(Conflict, match="continued by another process"):
        list(first)
    assert replayer.end(id)
    with pytest.raises(Conflict, match="has ended"):
        list(second)
    assert not replayer.end(id)
    replayer.start(replayer.choose("main", None, None, into_queue="mail"))
    with pytest.raises(NotFound):
        replayer.find(uuid4())


def test_a_replay_into_a_stream_keeps_ids_and_times(both_tiers: Lake, replayer: Replayer) -> None:
    both_tiers.db.execute("select pgmb.create_stream('again', keep_for => '1 hour')")
    both_tiers.db.execute("select pgmb.create_queue('copies', '{#}', stream => 'again')")
    id = replayer.start(replayer.choose("main", None, None, into_stream="again"))
    list(replayer.run(id))
    copies = both_tiers.db.execute(
        "select id::text, topic::text, key::text, payload::text, published_at"
        " from pgmb.log_again order by seq"
    ).fetchall()
    assert copies == [event[1:] for event in history(both_tiers)]
    assert waiting(both_tiers, "billing") == waiting(both_tiers, "mail") == []
    assert both_tiers.db.execute("select count(*) from pgmb.receive('copies', 1000)").fetchone() == (600,)


def test_retention_counts_from_when_old_events_were_replayed(lake: Lake, replayer: Replayer) -> None:
    """Their own times are long past: the segment would be dropped as soon as it is sealed."""
    lake.publish(10, sealed=False)
    lake.db.execute("update pgmb.log_main set published_at = now() - interval '3 days'")
    lake.db.execute("select pgmb.create_stream('again', keep_for => '1 hour')")
    lake.db.execute("select pgmb.rotate('again')")
    list(replayer.run(replayer.start(replayer.choose("main", None, None, into_stream="again"))))
    lake.db.execute("select pgmb.rotate('again')")
    lake.db.execute("select pgmb.seal('again')")
    assert lake.value("select count(*) from pgmb.log_again") == 10
    assert 1 not in [row[0] for row in lake.db.execute("select * from pgmb.droppable('again')")]


@pytest.mark.parametrize("options", ["ordered => true", "lanes => '{order.1,order.2}'"])
def test_lanes_and_shards_get_what_they_would_have_received(
    lake: Lake, replayer: Replayer, options: str
) -> None:
    lake.db.execute(f"select pgmb.create_queue('laned', '{{#}}', {options})".encode())
    lake.publish(200)
    lake.archive()
    given: dict[int, set[int]] = {}
    for kind in ("live", "replayed"):
        if kind == "replayed":
            list(replayer.run(replayer.start(replayer.choose("main", None, None, into_queue="laned"))))
        seen: dict[str, int] = {}
        while rows := lake.db.execute(
            "select lease::text, seq, key, ('x' || left(replace(lease::text, '-', ''), 6))::bit(24)::int"
            " from pgmb.receive('laned', 50)"
        ).fetchall():
            for _, seq, key, lane in rows:
                given.setdefault(seq, set()).add(lane)
                if options.startswith("ordered") and key is not None:
                    assert seen.get(key, 0) < seq, "events of a key arrive in order"
                    seen[key] = seq
            lake.db.execute("select pgmb.ack(%s)", [rows[0][0]])
    assert len(given) == 200
    assert all(len(lanes) == 1 for lanes in given.values()), "an event takes the same lane again"


def test_queues_of_endpoints_are_refused(lake: Lake, replayer: Replayer) -> None:
    lake.db.execute("select pgmb.create_endpoint('hook', 'https://example.com/', patterns => '{#}')")
    (name,) = [name for name in queue_names(lake.db) if "hook" in name]
    with pytest.raises(InvalidArgument, match="feeds endpoints"):
        replayer.start(replayer.choose("main", None, None, into_queue=name))


# -- Killed --------------------------------------------------------------------------------------------------


def test_a_replay_that_is_killed_continues_and_sends_each_event_once(
    both_tiers: Lake, replayer: Replayer
) -> None:
    """`python -m faults lake-replay` kills ten times."""
    id = replayer.start(replayer.choose("main", None, None, into_queue="billing"))
    command = [sys.executable, "-m", "pgmb", "lake", "replay", "--dsn", both_tiers.dsn, "--resume", str(id),
               "--rate", "400/s"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as killed:
        until_sent(replayer, id, 100, killed)
        os.kill(killed.pid, signal.SIGKILL)
        assert killed.wait() == -signal.SIGKILL
    found = replayer.find(id)
    assert 100 <= found.events < 600
    assert found.events == len(waiting(both_tiers, "billing"))
    list(replayer.run(id))
    assert plain(waiting(both_tiers, "billing")) == history(both_tiers)
    assert waiting(both_tiers, "mail") == []


def until_sent(replayer: Replayer, id: UUID, events: int, running: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 60
    while replayer.find(id).events < events and running.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.02)


# -- The command ---------------------------------------------------------------------------------------------


def test_the_command_counts_asks_and_sends(both_tiers: Lake, pgmb_lake: Run) -> None:  # noqa: F811
    code, said, _ = pgmb_lake(
        "replay", "--into", "queue:billing", "--topic", "order.2", "--dry-run", "--json"
    )
    counted = json.loads(said)
    assert code == 0
    assert counted["into"] == "queue billing"
    wanted = [event for event in history(both_tiers) if event[2] == "order.2"]
    assert counted["events"] == len(wanted)
    code, said, error = pgmb_lake("replay", "--into", "queue:billing", "--topic", "order.2")
    assert code == 2
    assert f"{len(wanted)} events" in said
    assert "--yes" in error
    assert waiting(both_tiers, "billing") == []
    code, said, error = pgmb_lake(
        "replay", "--into", "queue:billing", "--topic", "order.2", "--yes", "--json", "--rate", "6000000/min"
    )
    assert (code, json.loads(said)["events"]) == (0, len(wanted)), error
    assert json.loads(said)["bytes"] == counted["bytes"]
    assert plain(waiting(both_tiers, "billing")) == wanted
    (shown,) = json.loads(pgmb_lake("replays", "--json")[1])
    assert (shown["into_queue"], shown["events"]) == ("billing", len(wanted))
    assert (
        shown["id"] in pgmb_lake("replays")[1].replace("\n", "") or "queue billing" in pgmb_lake("replays")[1]
    )
    assert pgmb_lake("replay", "--resume", shown["id"])[0] == 1
    assert pgmb_lake("replay", "--cancel", shown["id"])[1] == f"Replay {shown['id']} had ended before.\n"
    for words in ([], ["--into", "billing"], ["--into", "queue:billing", "--rate", "fast"],
                  ["--into", "queue:billing", "--from", "latest", "--yes"]):  # fmt: skip
        assert pgmb_lake("replay", *words)[0] == 2, words


# -- The rate ------------------------------------------------------------------------------------------------


def test_a_pace_is_kept_and_pauses_are_caught_up_with(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = 100.0

        @classmethod
        def monotonic(cls) -> float:
            return cls.now

        @classmethod
        def sleep(cls, seconds: float) -> None:
            cls.now += seconds

    monkeypatch.setattr("pgmb.lake.replay.time", Clock)
    pace = Pace(500)
    assert pace.events == 50
    Clock.now += 30  # until the first events are read
    sent, began = 0, Clock.now
    while sent < 5000:
        pace.wait()
        Clock.now += 0.4 if sent % 1000 == 0 else 0.01
        pace.passed(pace.events)
        sent += pace.events
    assert 5000 / (Clock.now - began) == pytest.approx(500, rel=0.05)
    Clock.now += 60
    before = Clock.now
    for _ in range(100):
        pace.wait()
        pace.passed(pace.events)
    assert Clock.now - before > 4.5, "a minute's pause is not made up for at once"
    with pytest.raises(InvalidArgument):
        Pace(0)
