"""Promise: a clock that goes back, and is right again later, destroys nothing and lets nothing come early.

One server's clock goes back by ten days, once for three seconds and once for an hour. The rows of the table
in docs/explanation/clock.md are looked at when the clock is right again. A clock that was ahead, and may not
stop anything, is test_clock.py's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

import pgmb
from harness.clock import Clock, clocked
from harness.databases import create_database
from harness.server import Server
from harness.states import deliveries, retries
from pgmb import schema
from pgmb.services import Scheduler
from pgmb.services.scheduler import STANDS_AFTER

BACK = timedelta(days=10)
AGAIN = timedelta(minutes=4)
"""Between two calls of maintain() while the clock is wrong for long: not a jump of the clock."""
WRONG_FOR = {"three seconds": [timedelta(seconds=3)], "an hour": [AGAIN * turn for turn in range(1, 16)]}

Connection = psycopg.Connection[Any]


@dataclass
class Stepped:
    """A database whose clock was back, and is right again."""

    db: Connection
    known: dict[str, Any] = field(default_factory=dict)
    """What was known before the clock went back."""
    meanwhile: dict[str, Any] = field(default_factory=dict)
    """What was found while it was back."""

    def row(self, statement: str, *parameters: Any) -> Any:
        row = self.db.execute(statement.encode(), parameters).fetchone()
        assert row is not None
        return row[0] if len(row) == 1 else row

    def receive(self, queue: str, lease_for: str = "2 hours") -> tuple[UUID | None, list[Any]]:
        rows = self.db.execute("select lease, payload from pgmb.receive(%s, 100, %s)", [queue, lease_for])
        got = rows.fetchall()
        return (got[0][0] if got else None), [payload for _, payload in got]

    def publish(self, topic: str, payload: int = 1, more: str = "") -> Any:
        return self.row(f"select pgmb.publish(%s, to_json(%s::int){more})", topic, payload)

    def maintain(self) -> None:
        while self.row("select pgmb.maintain()"):
            pass


@pytest.fixture(scope="module")
def clocked_server(pg_major: int) -> Iterator[tuple[Server, Clock]]:
    with clocked(pg_major, name="back") as (server, clock):
        yield server, clock


@pytest.fixture(scope="module", params=WRONG_FOR)
def stepped(clocked_server: tuple[Server, Clock], request: pytest.FixtureRequest) -> Iterator[Stepped]:
    server, clock = clocked_server
    dsn = server.dsn(create_database(server))
    schema.install(dsn)
    with psycopg.connect(dsn, autocommit=True) as db:
        found = Stepped(db)
        asyncio.run(scenario(found, dsn, clock, WRONG_FOR[request.param]))
        yield found


async def scenario(s: Stepped, dsn: str, clock: Clock, wrong_for: list[timedelta]) -> None:
    at = 0.0
    clock.set(timedelta())
    async with await pgmb.aconnect(dsn) as broker:
        scheduler = Scheduler(clock=lambda: at)
        before(s)
        await broker.create_schedule("hourly", "0 * * * *", "hourly", missed="all")
        await scheduler.turn(broker)
        s.maintain()
        clock.set(-BACK)
        s.maintain()
        await scheduler.turn(broker)
        while_back(s)
        for passed in wrong_for:
            clock.set(passed - BACK)
            at = passed.total_seconds()
            s.maintain()
            await scheduler.turn(broker)
        while_back_again(s)
        clock.set(timedelta(seconds=at))
        for _ in range(4):
            s.maintain()
            await scheduler.turn(broker)
            at += STANDS_AFTER


def before(s: Stepped) -> None:
    # Retention looks at age alone: no queue of this test holds it.
    s.row("select pgmb.alter_stream('main', drop_unread => true)::text")
    for queue, options in {
        "history": "",
        "leased": "",
        "retried": "",
        "keyed": ", ordered => true, shards => 1",
        "paced": ", rps => 10",
        "aging": ", ttl => '20 days'",
    }.items():
        s.row(f"select pgmb.create_queue('{queue}', '{{{queue}}}'{options})::text")
    for number in range(3):
        s.publish("history", number)
        s.row("select pgmb.tick()")
        s.known["seek"] = s.row("select clock_timestamp()") if number == 1 else s.known.get("seek")
        lease, _ = s.receive("history")
        s.row("select pgmb.ack(%s)", lease)
        s.row("select pgmb.rotate()")
        s.maintain()
    for topic in ("leased", "retried", "paced", "aging"):
        s.publish(topic)
    s.publish("keyed", 1, ", key => 'a'")
    s.known["lease"], _ = s.receive("leased")
    s.receive("keyed")
    lease, _ = s.receive("retried")
    s.row("select pgmb.retry(%s, after => '1 day')", lease)
    s.publish("delayed", 1, ", delay => '14 days'")
    s.known["key"] = s.publish("once", 1, ", dedup_key => 'k', dedup_for => '5 days'")
    hook = s.row("select pgmb.create_endpoint('hook', 'https://example.org/', '{hook}', rps => 10)")
    s.known["hook"] = hook
    s.publish("hook")
    lease, seq = s.row("select lease, seq from pgmb.receive_deliveries('webhooks')")
    s.row(
        "select pgmb.settle_deliveries(%s, failed => array[%s], endpoints => array[%s::uuid],"
        " after => '{1 day}', errors => '{x}')",
        lease,
        seq,
        hook,
    )
    fail(s)
    for name in ("kept", "quiet"):
        s.known[name] = s.row(f"select pgmb.subscribe('{name}', '{{#}}', expires_after => '5 days')")
    s.row("select pgmb.worker_heartbeat(%s::uuid, 'h', 1, '{history}')", f"{1:032x}")
    api_key = s.row("select pgmb.create_api_key('key', sha256('key'), '{inspect}', now() + interval '1 day')")
    s.row("select pgmb.create_access_token(%s, 'session', sha256('session'), '{inspect}', '1 day')", api_key)
    with s.db.transaction():
        s.known["stage"] = s.row("select pgmb.claim_stage('main', 'app', 1)")
        s.db.execute(
            f"insert into pgmb.stage_{s.known['stage']} (topic, payload) values ('staged', '1')".encode()
        )
    s.known["segments"] = s.row("select count(*) from pgmb.stream_segments('main') where state = 'sealed'")


def while_back(s: Stepped) -> None:
    lease, s.meanwhile["paced"] = s.receive("paced")
    s.row("select pgmb.ack(%s)", lease)
    s.meanwhile["key"] = s.publish("once", 1, ", dedup_key => 'k', dedup_for => '5 days'")
    s.meanwhile["kept"] = s.row("select pgmb.keep_subscriptions(array[%s])", s.known["kept"])
    s.meanwhile["requests"] = s.row("select given from pgmb.take_requests(array[%s], '{5}')", s.known["hook"])
    s.meanwhile["api key"] = s.row("select count(*) from pgmb.find_api_key(sha256('key'))")
    s.publish("keyed", 2, ", key => 'b'")
    s.meanwhile["keyed"] = s.receive("keyed")[1]
    s.meanwhile["rotated"] = s.row("select count(*) from pgmb.stream_segments('main') where state = 'sealed'")
    fail(s)
    # Two segments that open and close with the wrong clock.
    for number in (3, 4):
        s.publish("history", number)
        lease, _ = s.receive("history")
        s.row("select pgmb.ack(%s)", lease)
        s.row("select pgmb.tick()")
        s.row("select pgmb.rotate()")
        s.maintain()


def while_back_again(s: Stepped) -> None:
    s.meanwhile["retries"] = [event.due_in for event in retries(s.db)]


def fail(s: Stepped) -> None:
    """A dispatcher says that each request failed."""
    s.row(
        "select cardinality(pgmb.heartbeat(%s::uuid, 'h', 1, array[%s], '{0}', '{1}', '{x}'))",
        f"{2:032x}",
        s.known["hook"],
    )


def nothing_is_dropped(s: Stepped) -> None:
    assert s.row("select count(*) from pgmb.log_main where topic = 'history'") == 5
    assert s.row("select count(*) from pgmb.droppable()") == 0, "not after the first minutes either"


def a_time_names_its_position(s: Stepped) -> None:
    seek = (
        "select count(*) from pgmb.between('main', pgmb.earliest(), pgmb.position_at('main', %s)) e"
        " where e.topic = 'history'"
    )
    assert s.row(seek, s.known["seek"]) == 2
    assert s.row(seek, "infinity") == 5


def leases_last(s: Stepped) -> None:
    assert s.row("select pgmb.ack(%s)", s.known["lease"]) == 1


def retries_wait(s: Stepped) -> None:
    assert len(s.meanwhile["retries"]) == 1
    assert [(event.due_in or 0) > 20 * 3600 for event in retries(s.db, "retried")] == [True]
    assert s.receive("retried") == (None, [])


def delayed_events_wait(s: Stepped) -> None:
    s.row("select pgmb.tick()")
    assert s.row("select min(due_at) > now() + interval '13 days' from pgmb.delayed") is True
    assert s.row("select count(*) from pgmb.log_main where topic = 'delayed'") == 0


def other_keys_go_on(s: Stepped) -> None:
    assert s.meanwhile["keyed"] == [2]


def rates_go_on(s: Stepped) -> None:
    assert (s.meanwhile["paced"], s.meanwhile["requests"]) == ([1], 5)
    s.publish("paced", 2)
    assert s.receive("paced")[1] == [2]


def events_keep_their_time_to_live(s: Stepped) -> None:
    assert s.receive("aging")[1] == [1]


def keys_are_remembered(s: Stepped) -> None:
    again = s.publish("once", 1, ", dedup_key => 'k', dedup_for => '5 days'")
    assert again == s.meanwhile["key"] == s.known["key"]


def deliveries_wait(s: Stepped) -> None:
    assert [(event.due_in or 0) > 20 * 3600 for event in deliveries(s.db)] == [True]


def failing_endpoints_are_not_disabled(s: Stepped) -> None:
    fail(s)
    assert s.row("select state, failing_since > now() - interval '1 day' from pgmb.endpoints") == (
        "active",
        True,
    )


def no_past_due_time_is_published(s: Stepped) -> None:
    # The hour that the wrong clock ran through is due by it.
    assert s.row("select count(*) from pgmb.log_main where topic = 'hourly'") <= 2
    assert s.row("select next_at > now() from pgmb.schedules()") is True


def workers_live(s: Stepped) -> None:
    s.row("select pgmb.worker_heartbeat(%s::uuid, 'h', 1, '{history}')", f"{1:032x}")
    assert s.row("select alive from pgmb.describe_workers()") is True


def rotation_waits(s: Stepped) -> None:
    assert s.meanwhile["rotated"] == s.known["segments"] >= 2


def subscriptions_stay(s: Stepped) -> None:
    assert s.row("select count(*) from pgmb.subscriptions where group_id in ('kept', 'quiet')") == 2


def api_keys_and_sessions_are_valid(s: Stepped) -> None:
    assert s.meanwhile["api key"] == 1
    assert s.row("select count(*) from pgmb.find_api_key(sha256('key'))") == 1
    assert s.row("select count(*) from pgmb.find_session(sha256('session'))") == 1


def stages_stay(s: Stepped) -> None:
    assert s.row("select pgmb.publish_stage('main', %s, 'app', 1, 1)", s.known["stage"]) == 1


def nothing_lies_ahead(s: Stepped) -> None:
    assert s.db.execute("select * from pgmb.times_ahead()").fetchall() == []


CHECKS: list[Callable[[Stepped], None]] = [
    nothing_is_dropped,
    a_time_names_its_position,
    leases_last,
    retries_wait,
    delayed_events_wait,
    other_keys_go_on,
    rates_go_on,
    events_keep_their_time_to_live,
    keys_are_remembered,
    deliveries_wait,
    failing_endpoints_are_not_disabled,
    no_past_due_time_is_published,
    workers_live,
    rotation_waits,
    subscriptions_stay,
    api_keys_and_sessions_are_valid,
    stages_stay,
    nothing_lies_ahead,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_clock_that_was_back_costs_nothing(stepped: Stepped, check: Callable[[Stepped], None]) -> None:
    check(stepped)


def test_an_idle_queue_does_not_hold_retention_after_the_clock_was_ahead(
    clocked_server: tuple[Server, Clock],
) -> None:
    """Its position was written by a clock that was ahead. Retention waits for such a clock to stand."""
    server, clock = clocked_server
    right = clock.ahead
    dsn = server.dsn(create_database(server))
    schema.install(dsn)
    with psycopg.connect(dsn, autocommit=True) as db:
        s = Stepped(db)
        s.row("select pgmb.alter_stream('main', keep_for => '1 second')::text")
        s.row("select pgmb.create_queue('idle', '{never.#}')::text")

        def publish_and_maintain(at: timedelta) -> None:
            s.row(
                "select pgmb.publish_many('t', array(select '1'::json from generate_series(1, 2000)))::text"
            )
            s.row("select pgmb.rotate()")
            # After two seconds without a receive the queue counts as idle.
            clock.set(at + timedelta(seconds=4))
            s.maintain()

        publish_and_maintain(right)
        clock.set(right + timedelta(days=365))
        publish_and_maintain(right + timedelta(days=365))
        assert s.row("select count(*) from pgmb.log_main") >= 2000, "the clock just jumped"
        clock.set(right + timedelta(seconds=5))
        publish_and_maintain(right + timedelta(seconds=5))
        for minute in range(2, 14, 2):
            clock.set(right + timedelta(minutes=minute))
            s.maintain()
        clock.set(right)
        assert s.row("select count(*) from pgmb.log_main") == 0


def first_call_that_drops(s: Stepped, clock: Clock, intervals: list[timedelta]) -> int | None:
    """The call of maintain() that drops a segment which is old enough from the first on."""
    s.row("select pgmb.alter_stream('main', keep_for => '1 second')::text")
    s.publish("old")
    s.row("select pgmb.rotate()")
    for call, interval in enumerate(intervals, 1):
        clock.set(clock.ahead + interval)
        s.maintain()
        if not s.row("select count(*) from pgmb.log_main where topic = 'old'"):
            return call
    return None


@pytest.mark.parametrize("minutes", [6, 10, 60, 1440])
def test_a_maintain_that_is_called_seldom_deletes_by_age(
    clocked_server: tuple[Server, Clock], minutes: int
) -> None:
    server, clock = clocked_server
    right = clock.ahead
    dsn = server.dsn(create_database(server))
    schema.install(dsn)
    with psycopg.connect(dsn, autocommit=True) as db:
        s = Stepped(db)
        interval = timedelta(minutes=minutes)
        try:
            assert first_call_that_drops(s, clock, [interval] * 3) in (1, 2, 3)
            assert first_call_that_drops(s, clock, [interval] * 3) in (1, 2, 3), "each time"
        finally:
            clock.set(right)


@pytest.mark.parametrize("way", ["after a pause", "and back, and ahead again"])
def test_a_clock_that_jumps_far_ahead_deletes_nothing_while_another_jump_is_waited_for(
    clocked_server: tuple[Server, Clock], way: str
) -> None:
    server, clock = clocked_server
    right = clock.ahead
    dsn = server.dsn(create_database(server))
    schema.install(dsn)
    pause, year, minute = timedelta(minutes=6), timedelta(days=365), timedelta(minutes=1)
    intervals = (
        [pause, year, minute] if way == "after a pause" else [year, minute, -year, minute, year, minute]
    )
    with psycopg.connect(dsn, autocommit=True) as db:
        s = Stepped(db)
        s.maintain()
        try:
            assert first_call_that_drops(s, clock, intervals) is None
            assert first_call_that_drops(s, clock, [timedelta(minutes=4)] * 4) is not None, (
                "once it has stood"
            )
        finally:
            clock.set(right)
