"""matching: 10,000 events against many subscriptions of a group, beside a bare join that finds the same.

Timed is one receive of the group in one statement: reading the log, the lease, the ids of the subscriptions
that each event matches. The bare join has its events and filters in plain tables and writes nothing.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from statistics import median

from psycopg import sql

from bench import cpu
from bench.forms import Form
from bench.ground import Ground, Site
from bench.outcome import Check, Outcome, Reading

_PAYLOAD = (
    "json_build_object('room', n % 20000, 'amount', n, 'from', 'user ' || n % 500, 'text', repeat('x', 100))"
)
_BARE_EVENTS = f"""
    create table bare_event as select n, {_PAYLOAD} as payload from generate_series(1, {{events}}) n;
    create table bare_filter (id integer, path jsonpath, room integer);
    create index on bare_filter (room)"""
_BARE_FILTERS = """
    with doc as materialized (select n, payload::jsonb doc from bare_event)
    select count(*) from doc e join bare_filter f on jsonb_path_match(e.doc, f.path, '{}', true)"""
_BARE_PARAMS = """
    with doc as materialized (select n, payload::jsonb doc from bare_event)
    select count(*) from doc e join bare_filter f on f.room = (e.doc ->> 'room')::integer"""


@dataclass(frozen=True)
class _Case:
    name: str
    subscriptions: int
    peer: float | None
    """Seconds that haathie/pgmb took for as many, measured on another machine of two cores."""
    subscribe: str
    bare: str
    join: str


def _filters(count: int, peer: float | None) -> _Case:
    return _Case(
        f"{count:,} filter{'s' if count > 1 else ''}",
        count,
        peer,
        "select pgmb.subscribe('group', filter => format('$.payload.amount == %s', n * 7)) "
        "from generate_series(1, {count}) n",
        "insert into bare_filter select n, format('$.amount == %s', n * 7)::jsonpath "
        "from generate_series(1, {count}) n",
        _BARE_FILTERS,
    )


_CASES = [
    _filters(1, 0.11),
    _filters(50, 1.2),
    _filters(200, 18.3),
    _filters(1000, None),
    _Case(
        "20,000 params",
        20_000,
        1.8,
        "select pgmb.subscribe('group', params => jsonb_build_object('room', n), "
        "condition => 's.params @> jsonb_build_object(''room'', e.payload -> ''room'')') "
        "from generate_series(0, {count} - 1) n",
        "insert into bare_filter select n, null, n from generate_series(0, {count} - 1) n",
        _BARE_PARAMS,
    ),
]
CHECKS = [
    *(f"matching, {case.name}" for case in _CASES if case.peer is not None),
    "matching, cost of a filter, 1,000 vs 200",
]


def run(ground: Ground, form: Form) -> Outcome:
    events = 500 if form.name == "tiny" else 10_000
    rounds = 2 if form.name == "tiny" else 3 if form.name == "brief" else 7
    outcome = Outcome("matching", f"{events:,} events against the subscriptions of a group, seconds")
    with contextlib.closing(ground.site("pgmb")) as site:
        site.connection.execute("set statement_timeout = '10min'")
        site.connection.execute(_BARE_EVENTS.format(events=events))
        for case in _CASES:
            count = min(case.subscriptions, 100) if form.name == "tiny" else case.subscriptions
            _prepare(site, case, count)
            # The first round only warms up, where that is more than the noise of it.
            warm = 1 if count < 1000 or case.peer is not None else 0
            turns = rounds if warm or form.name != "brief" else 1
            readings = [_measure(site, case, events) for _ in range(warm + turns)][warm:]
            outcome.readings += [reading for pair in readings for reading in pair]
    took = {case.name: outcome.middle(case.name, "seconds") for case in _CASES}
    outcome.checks = [
        Check(f"matching, {case.name}", took[case.name], case.peer, at_least=False, unit=" s")
        for case in _CASES
        if case.peer is not None
    ]
    few, many, alone = took["200 filters"], took["1,000 filters"], took["1 filter"]
    growth = ((many - alone) / 999) / ((few - alone) / 199)
    outcome.checks.append(Check("matching, cost of a filter, 1,000 vs 200", growth, 1.1, at_least=False))
    outcome.notes = [
        f"{case.name}: {took[case.name]:.2f} s, {_to_bare(outcome, case):.1f}x the bare join's"
        for case in _CASES
    ]
    return outcome


def _to_bare(outcome: Outcome, case: _Case) -> float:
    pairs = zip(
        outcome.figures(case.name, "seconds"), outcome.figures(f"{case.name}, bare", "seconds"), strict=True
    )
    return median(mine / bare for mine, bare in pairs)


def _prepare(site: Site, case: _Case, count: int) -> None:
    connection = site.connection
    connection.execute("select pgmb.drop_queue('group')")
    connection.execute("delete from pgmb.subscription")
    connection.execute("truncate bare_filter")
    connection.execute(sql.SQL(case.subscribe.format(count=count)))  # pyright: ignore[reportArgumentType]
    connection.execute(sql.SQL(case.bare.format(count=count)))  # pyright: ignore[reportArgumentType]
    connection.execute("analyze bare_event; analyze bare_filter")
    connection.execute("select pgmb.create_queue('group')")


def _measure(site: Site, case: _Case, events: int) -> tuple[Reading, Reading]:
    connection = site.connection
    connection.execute(
        "select pgmb.publish_many('chat.message', array_agg(e.payload order by e.n)) from bare_event e"
    )
    ours, found = _timed(
        site,
        case.name,
        "select coalesce(sum(cardinality(r.subscriptions)), 0), pgmb.ack((array_agg(r.lease))[1]) "
        f"from pgmb.receive_group('group', {events}) r",
    )
    bare, expected = _timed(site, f"{case.name}, bare", case.join)
    if found != expected:
        raise AssertionError(f"{case.name}: {found} pairs, the bare join finds {expected}")
    return ours, bare


def _timed(site: Site, name: str, statement: str) -> tuple[Reading, int]:
    server, started = cpu.of_server(site.server.postmaster_pid), time.perf_counter()
    row = site.connection.execute(sql.SQL(statement)).fetchone()  # pyright: ignore[reportArgumentType]
    wall = time.perf_counter() - started
    server = cpu.of_server(site.server.postmaster_pid) - server
    assert row is not None
    return Reading(name, 10_000, wall, server, 0.0, {"seconds": wall}), int(row[0])
