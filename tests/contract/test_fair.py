"""Fair queues: tenants are served in turn, each in its order, and every event once."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from itertools import count

import psycopg
import pytest

from harness.sessions import Session, Sessions
from harness.states import ever_lagged, lagging_tenants, newest_claim, unfinished_batches
from tests.contract.deliveries import Consumer, Received

_names = count()


def fill(session: Session, tenant: str | None, events: int, topic: str = "t") -> list[int]:
    """Publishes so many events of a tenant in one statement; their names."""
    return fill_with(session, tenant, [next(_names) for _ in range(events)], topic)


def fill_with(session: Session, tenant: str | None, payloads: list[int], topic: str = "t") -> list[int]:
    session.run(
        "select pgmb.publish_many(array_fill(%s::text, array[cardinality(n)]),"
        " array(select to_json(one) from unnest(n) one), array_fill(%s::text, array[cardinality(n)]))"
        " from (select %s::bigint[] n) given",
        [topic, tenant, payloads],
    )
    return payloads


def dead(consumer: Consumer) -> list[int]:
    return [name for (name,) in consumer.session.run("select payload::text::int from pgmb.dead")]


@pytest.fixture
def one(sessions: Sessions) -> Consumer:
    sessions["admin"].run(
        "select pgmb.create_queue('q', '{t}', fair_by => 'key', max_attempts => 2, backoff_base => '0')"
    )
    return Consumer(sessions["one"])


def test_the_others_overtake_a_backlog(one: Consumer) -> None:
    backlog = fill(one.session, "noisy", 3000)
    quiet = [name for tenant in "abc" for name in fill(one.session, tenant, 2)]
    got = one.receive(50)
    assert set(quiet) <= set(got.names[:8]), "one of each in turn"
    assert [name for name in got.names if name not in quiet] == backlog[:44]
    (late,) = fill(one.session, "d", 1)
    assert one.receive(10).names[:2] in ([late, backlog[44]], [backlog[44], late])


def test_tenants_with_backlogs_are_served_in_turn(one: Consumer) -> None:
    names = {tenant: fill(one.session, tenant, 400) for tenant in ("a", "b", "c")}
    for taken in range(3):
        got = one.receive(90)
        share = Counter(key for key, *_ in got.rows)
        assert share == {"a": 30, "b": 30, "c": 30}, f"receive {taken}"
        assert [key for key, *_ in got.rows[:3]] != ["a", "a", "a"]
    rest = one.take_all()
    assert sorted(rest) == sorted(name for one in names.values() for name in one[90:])


@pytest.mark.parametrize("size", [10, 20])
def test_tenants_get_equal_shares_over_many_receives(one: Consumer, size: int) -> None:
    """Four tenants with backlogs, and receives that do not divide by four or have room for eight of each."""
    for tenant in "abcd":
        fill(one.session, tenant, 200)
    share: Counter[str | None] = Counter()
    for _ in range(200 // size):
        got = one.receive(size)
        share.update(key for key, *_ in got.rows)
        one.ack(got)
    assert max(share.values()) <= 1.25 * min(share.values()), share


def test_the_rest_of_a_turn_comes_with_the_next_receive(sessions: Sessions) -> None:
    """A turn is worth eight events, and a lease has room for eight of one tenant and two of the next."""
    one = Consumer(sessions["one"])
    one.session.run("select pgmb.create_queue('q', fair_by => 'key')")
    for tenant in "abcd":
        fill(one.session, tenant, 200)
    shares = []
    for _ in range(4):
        got = one.receive(10)
        shares.append(Counter(key for key, *_ in got.rows))
        one.ack(got)
    total = sum(shares, Counter[str | None]())
    assert max(total.values()) - min(total.values()) <= 8, shares


@pytest.mark.parametrize("size", [1, 3])
def test_a_consumer_that_takes_few_events_serves_in_turn_too(one: Consumer, size: int) -> None:
    fill(one.session, "noisy", 500)
    quiet = fill(one.session, "quiet", 5)
    taken = [name for _ in range(40) for name in one.names(size)]
    assert set(quiet) <= set(taken)
    assert len(taken) == 40 * size


def test_a_consumer_that_takes_one_event_finds_those_in_front_of_a_backlog(one: Consumer) -> None:
    """Whatever the chance of the turn, which each generation of the queue has again: nothing is no answer."""
    for tenants in range(1, 8):
        for number in range(tenants):
            fill(one.session, f"tenant {number}", 2)
        fill(one.session, "noisy", 60)
        for _ in range(2 * tenants + 60):
            got = one.receive(1)
            assert got
            one.ack(got)


def test_without_a_backlog_events_come_in_the_order_of_the_log(one: Consumer) -> None:
    names = [name for number in range(60) for name in fill(one.session, f"tenant {number % 20}", 1)]
    assert [name for _ in range(3) for name in one.names(20)] == names
    assert not ever_lagged(one.session)


def test_a_backlog_is_read_past_once(one: Consumer, sessions: Sessions) -> None:
    fill(one.session, "noisy", 3000)
    fill(one.session, "quiet", 1)
    one.names(10)
    assert 2950 < lagging_tenants(one.session)[0] < 3000
    fill(one.session, "quiet", 1)
    before = unfinished_batches(one.session)
    one.names(10)
    assert unfinished_batches(one.session) == before, "the position is behind the backlog"


def test_nothing_to_receive_writes_nothing(one: Consumer) -> None:
    one.take_all()
    fill(one.session, "noisy", 500)
    one.take_all()
    one.session.run("select pg_sleep(0.06)")
    newest = newest_claim(one.session)
    one.session.run("begin")
    assert one.names() == []
    assert one.session.value("select pg_current_xact_id_if_assigned()") is None
    one.session.run("commit")
    assert newest_claim(one.session) == newest
    assert lagging_tenants(one.session) == []


def test_late_commits_are_delivered_once(one: Consumer, sessions: Sessions) -> None:
    """The tenant lags already, and its place lies above, among or below what commits late."""
    names = fill(one.session, "noisy", 300)
    late = {name: sessions[name] for name in ("before", "after")}
    late["before"].run("begin")
    names += fill(late["before"], "noisy", 250) + fill(late["before"], "other", 20)
    names += fill(one.session, "noisy", 300) + fill(one.session, "quiet", 3)
    late["after"].run("begin")
    names += fill(late["after"], "noisy", 250)
    names += fill(one.session, "noisy", 300)
    taken: list[int] = []
    for step in range(60):
        if step == 6:
            late["after"].run("commit")
        if step == 14:
            late["before"].run("commit")
        got = one.receive(40)
        taken += got.names
        if got:
            one.ack(got)
    assert sorted(taken) == sorted(names)


@pytest.mark.parametrize(
    "options",
    [
        "",
        ", lanes => '{urgent}'",
        ", filter => '$.payload >= 0'",
        ", max_in_flight => 100000, max_length => 100000, ttl => '1 day'",
    ],
)
def test_whatever_happens_every_event_is_settled_once_and_tenants_keep_their_order(
    sessions: Sessions, options: str
) -> None:
    one = Consumer(sessions["one"])
    one.session.run(
        "select pgmb.create_queue('q', '{t, urgent}', fair_by => 'key', max_attempts => 2,"
        f" backoff_base => '0'{options})"
    )
    chance = random.Random(7)
    other = sessions["other"]
    published: dict[str, list[int]] = defaultdict(list)
    first: dict[str, list[int]] = defaultdict(list)
    settled: Counter[int] = Counter()
    open_names: list[tuple[str, list[int]]] = []
    waiting = False
    for step in range(60):
        tenant = chance.choice(["noisy", "noisy", "loud", *(f"quiet {n}" for n in range(30))])
        size = chance.choice([300, 700]) if tenant in ("noisy", "loud") else chance.randint(1, 4)
        what = chance.random()
        if what < 0.12 and not waiting:
            other.run("begin")
            # One tenant, so that its order is that of its transactions.
            open_names = [("late", fill(other, "late", chance.choice([5, 400])))]
            waiting = True
        elif what < 0.3 and waiting:
            commits = chance.random() < 0.7
            other.run("commit" if commits else "rollback")
            for late, names in open_names if commits else []:
                published[late] += names
            waiting = False
        elif step < 30:
            published[tenant] += fill(one.session, tenant, size, "urgent" if tenant == "loud" else "t")
        if step % 20 == 10:
            sessions["admin"].run("select pgmb.maintain()")
            sessions["admin"].run("select pgmb.rotate('main')")
        if chance.random() < 0.1:
            one.session.run("begin")
            one.receive(chance.choice([20, 200]))
            one.session.run("rollback")
        got = one.receive(chance.choice([5, 20, 100, 300]))
        for key, name, _, attempt in got.rows:
            if attempt == 1:
                first[str(key)].append(name)
        if not got:
            continue
        failing = chance.sample(got.names, min(3, len(got.names)))
        # Events whose leases expire twice come one by one.
        may_expire = len(got.names) <= 20 and max(got.attempts.values()) == 1
        how = chance.choice(["ack", "retry", "bury", *(["expire", "part"] if may_expire else [])])
        if how == "ack":
            one.ack(got)
            settled.update(got.names)
        elif how == "retry":
            one.retry(got, *failing)
            one.ack(got)
            settled.update(set(got.names) - set(failing))
        elif how == "bury":
            one.bury(got, *failing)
            one.ack(got)
            settled.update(set(got.names) - set(failing))
        elif how == "part":
            one.ack(got, *failing)
            settled.update(failing)
            one.expire(got)
        else:
            one.expire(got)
    if waiting:
        other.run("rollback")
    expected = sorted(name for names in published.values() for name in names)
    depth = one.session.value("select pgmb.queue_depth('q')")
    status = one.session.run("select waiting + retries, at_least from pgmb.queue_status")
    assert status == [(depth, [])]
    rest = []
    while got := one.receive(300):
        rest += got.names
        for key, name, _, attempt in got.rows:
            if attempt == 1:
                first[str(key)].append(name)
        one.ack(got)
    assert depth == len(rest)
    settled.update(rest)
    settled.update(dead(one))
    assert sorted(settled.elements()) == expected
    for tenant, names in first.items():
        unordered = tenant == "late"
        assert (sorted(names) if unordered else names) == (
            sorted(published[tenant]) if unordered else published[tenant]
        ), tenant


def test_retries_of_one_tenant_do_not_hold_up_the_others(one: Consumer) -> None:
    fill(one.session, "noisy", 200)
    one.retry(one.receive(200))
    quiet = fill(one.session, "quiet", 1)
    assert quiet[0] in [name for _ in range(6) for name in one.names(10)]


def test_tenants_by_header_and_those_that_have_none(sessions: Sessions) -> None:
    one = Consumer(sessions["one"])
    one.session.run("select pgmb.create_queue('q', fair_by => 'header:tenant')")
    header = "select count(pgmb.publish('t', to_json(n), headers => %s::json)) from generate_series(1, %s) n"
    one.session.run(header, ['{"tenant": "noisy"}', 500])
    for headers in (
        '{"tenant": "a"}',
        '{"tenant": "\\u00e9"}',
        '{"tenant": "\\u0000"}',
        '{"other": "\\ud800"}',
        '{"tenant": 7}',
        "[]",
        "5",
        None,
    ):
        one.session.run(header, [headers, 1])
    rows = one.session.run("select headers::text from pgmb.receive('q', 30)")
    assert sum(row != ('{"tenant": "noisy"}',) for row in rows) == 8
    assert len(one.session.run("select from pgmb.receive('q', 1000)")) == 500 - 22


def test_status_and_fate_tell_what_lags(one: Consumer) -> None:
    backlog = fill(one.session, "noisy", 300)
    fill(one.session, "quiet", 1)
    one.ack(one.receive(11))
    (status,) = one.session.run("select waiting, behind, at_least from pgmb.queue_status")
    assert status == (290, 291, [])
    assert one.session.value("select pgmb.queue_depth('q')") == 290
    assert one.session.value("select count(*) from pgmb.pending_messages('q')") == 290
    assert one.session.value("select waiting_for > '0' from pgmb.queue_health()")
    fate = (
        "select pgmb.event_fate(pgmb.derive_id(e.seq, e.published_at, s.salt)) #>> '{consumers,0,state}'"
        " from pgmb.log_main e, pgmb.stream s where s.name = 'main' and e.payload::text = %s"
    )
    assert one.session.value(fate, [str(backlog[0])]) == "done"
    assert one.session.value(fate, [str(backlog[200])]) == "waiting"
    one.session.run("select pgmb.purge('q')")
    assert one.names() == []
    assert one.session.value(fate, [str(backlog[200])]) == "not taken"
    one.session.run("select pgmb.seek('q', pgmb.earliest('main'))")
    assert len(one.take_all()) == 301


def test_retention_keeps_what_lags(one: Consumer, sessions: Sessions) -> None:
    admin = sessions["admin"]
    admin.run("select pgmb.alter_stream('main', keep_for => '1 microsecond')")
    backlog = fill(one.session, "noisy", 300)
    one.ack(one.receive(10))
    for _ in range(3):
        admin.run("select pgmb.maintain()")
        admin.run("select pgmb.rotate('main')")
    fill(one.session, "quiet", 1)
    one.ack(one.receive(10))
    admin.run("select pgmb.maintain()")
    assert len(one.take_all()) == len(backlog) + 1 - 20
    admin.run("select pgmb.maintain()")
    assert admin.value("select count(*) from pgmb.segment where dropped_at is not null") >= 1


def test_a_rebase_keeps_what_lags(one: Consumer, sessions: Sessions) -> None:
    backlog = fill(one.session, "noisy", 300)
    taken = one.receive(10)
    one.ack(taken)
    sessions["admin"].run("select pgmb.rebase()")
    assert sorted(taken.names + one.take_all()) == backlog


def test_limits_and_a_time_to_live_hold_in_fair_queues(sessions: Sessions) -> None:
    one = Consumer(sessions["one"])
    one.session.run("select pgmb.create_queue('q', fair_by => 'key', max_in_flight => 30, ttl => '1 hour')")
    fill(one.session, "noisy", 400)
    fresh = fill(one.session, "quiet", 2)
    one.session.run(
        "update pgmb.log_main set published_at = published_at - interval '2 hours' where key = 'noisy'"
    )
    got = one.receive(100)
    assert set(fresh) <= set(got.names)
    assert len(got.names) <= 30
    assert dead(one)
    while True:
        one.ack(got)
        if not (got := one.receive(100)):
            break
    assert len(dead(one)) == 400


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ("fair_by => 'tenant'", "fair_by must be key or header:NAME, got 'tenant'"),
        ("fair_by => 'header:'", "fair_by must be key or header:NAME, got 'header:'"),
        ("fair_by => 'key', ordered => true", "ordered"),
    ],
)
def test_what_fair_queues_exclude(sessions: Sessions, options: str, what: str) -> None:
    with pytest.raises(psycopg.Error, match=what) as refused:
        sessions["admin"].run(f"select pgmb.create_queue('q', {options})")
    assert refused.value.sqlstate == "MB005"


def test_a_fair_queue_stays_fair_when_it_is_created_again(one: Consumer) -> None:
    with pytest.raises(psycopg.Error) as refused:
        one.session.run("select pgmb.create_queue('q', '{t}')")
    assert refused.value.sqlstate == "MB006"
    assert not one.session.value("select pgmb.create_queue('q', '{t}', fair_by => 'key')")


FILTERS = [
    pytest.param("filter => '$.payload > $least', params => '{\"least\": %s}'", id="filter"),
    pytest.param(
        "condition => 'e.payload::text::int > (s.params ->> ''least'')::int', params => '{\"least\": %s}'",
        id="condition",
    ),
]


@pytest.mark.parametrize("given", FILTERS)
def test_tenants_of_a_filtered_queue_are_served_in_turn(sessions: Sessions, given: str) -> None:
    """The filter chooses a third of each tenant's events, and of one tenant none."""
    one = Consumer(sessions["one"])
    one.session.run("set statement_timeout = '60 s'")
    passed = fill(one.session, "nothing", 1000)
    one.session.run(
        "select pgmb.create_queue('q', fair_by => 'key', starting => pgmb.earliest('main'),"
        f" {given % passed[-1]})"
    )
    chosen: dict[str, list[int]] = defaultdict(list)
    for tenant in ("a", "b"):
        for _ in range(6):
            passed += fill_with(one.session, tenant, [-1] * 40)
            chosen[tenant] += fill(one.session, tenant, 20)
    chosen["quiet"] = fill(one.session, "quiet", 3)
    taken: dict[str, list[int]] = defaultdict(list)
    first: Counter[str] = Counter()
    while got := one.receive(20):
        for key, name, _, _ in got.rows:
            taken[str(key)].append(name)
        if not first:
            first.update(key for key, *_ in got.rows if key)
        one.ack(got)
        depth = one.session.value("select pgmb.queue_depth('q')")
        assert depth == sum(map(len, chosen.values())) - sum(map(len, taken.values()))
    assert taken == chosen
    assert first["quiet"] == 3
    assert first["a"] > 0
    assert first["b"] > 0


def test_a_filter_that_is_bound_later_holds_for_tenants_that_lag(one: Consumer) -> None:
    backlog = fill(one.session, "noisy", 400)
    quiet = fill(one.session, "quiet", 2)
    got = one.receive(10)
    one.ack(got)
    one.session.run(
        "select pgmb.bind('q', '{t}', filter => '$.payload > $least', params => %s)",
        [f'{{"least": {backlog[299]}}}'],
    )
    assert set(quiet) <= set(got.names)
    assert sorted(one.take_all()) == backlog[300:]


def test_a_filter_that_raises_pauses_a_fair_queue_and_loses_nothing(one: Consumer) -> None:
    """It raises at an event of a tenant that lags."""
    backlog = fill(one.session, "noisy", 300)
    taken = one.receive(10)
    one.ack(taken)
    one.session.run("set statement_timeout = '60 s'")
    one.session.run(
        f"select pgmb.bind('q', '{{t}}', condition => '1 / (e.payload::text::int - {backlog[100]}) <= 1')"
    )
    for _ in range(40):
        got = one.receive(10)
        if not got:
            break
        one.ack(got)
        taken = Received(None, taken.rows + got.rows)
    assert "division by zero" in one.session.value("select paused_reason from pgmb.queue_status")
    one.session.run("select pgmb.bind('q', '{t}', no_filter => true), pgmb.resume('q')")
    assert sorted(taken.names + one.take_all()) == backlog


def test_tenants_are_served_in_turn_within_a_lane(sessions: Sessions) -> None:
    one = Consumer(sessions["one"])
    one.session.run("select pgmb.create_queue('q', fair_by => 'key', lanes => '{urgent}')")
    lanes = {topic: fill(one.session, "noisy", 300, topic) for topic in ("t", "urgent")}
    quiet = {topic: fill(one.session, "quiet", 2, topic) for topic in lanes}
    first: dict[str, list[int]] = {}
    taken: list[int] = []
    while got := one.receive(20):
        (lane,) = (topic for topic in lanes if {*lanes[topic], *quiet[topic]} & set(got.names))
        first.setdefault(lane, got.names)
        taken += got.names
        one.ack(got)
    assert sorted(taken) == sorted(name for names in (*lanes.values(), *quiet.values()) for name in names)
    for topic, names in quiet.items():
        assert set(names) <= set(first[topic]), "the first lease has the events of the quiet tenant"


def test_a_full_fair_queue_refuses_what_is_too_much(one: Consumer) -> None:
    one.session.run("select pgmb.alter_queue('q', max_length => 250)")
    fill(one.session, "noisy", 249)
    fill(one.session, "quiet", 1)
    with pytest.raises(psycopg.Error) as refused:
        fill(one.session, "quiet", 1)
    assert refused.value.sqlstate == "MB040"
    one.ack(one.receive(10))
    assert lagging_tenants(one.session)
    fill(one.session, "quiet", 10)
    with pytest.raises(psycopg.Error) as refused:
        fill(one.session, "quiet", 1)
    assert refused.value.sqlstate == "MB040"


@pytest.mark.parametrize("behind", [0, 60, 300])
def test_a_fair_queue_drops_its_oldest_events(one: Consumer, behind: int) -> None:
    """Those of tenants that lag are the oldest: `behind` events lie behind them."""
    one.session.run("select pgmb.alter_queue('q', max_length => 200, when_full => 'drop_oldest')")
    names = fill(one.session, "noisy", 100) + fill(one.session, "loud", 100)
    one.session.run("begin")
    one.receive(1)
    one.session.run("rollback")
    taken = one.receive(10)
    one.ack(taken)
    assert lagging_tenants(one.session)
    names += fill(one.session, "quiet", 130) + fill(one.session, "late", behind)
    waiting = [name for name in names if name not in taken.names]
    assert sorted(one.take_all(20)) == waiting[-200:]
