"""delivery-matching: events to 10,000 endpoints that share a queue, each with a filter of its own.

Timed is what a dispatcher does around posting: receiving until the queue is empty, each event with the
endpoints that it is for, and settling. Nothing is posted. Endpoints that ask for values of fields are found
by an index; jsonpath filters are asked one by one.
"""

from __future__ import annotations

import contextlib
import time

from psycopg import sql

from bench import cpu
from bench.forms import Form
from bench.ground import Ground, Site
from bench.outcome import Check, Outcome, Reading

_AT_ONCE = 500
_FIELDS, _FILTERS = "fields", "jsonpath filters"
_ASKED = {
    _FIELDS: "equals => jsonb_build_object('payload', jsonb_build_object('room', n))",
    _FILTERS: "filter => format('$.payload.room == %%s', n)",
}

CHECKS = ["matching, 10,000 endpoints by fields", "matching, 10,000 jsonpath filters"]


def run(ground: Ground, form: Form) -> Outcome:
    endpoints = 100 if form.name == "tiny" else 10_000
    # A filter is asked of every event: of all in the complete run, of some otherwise.
    events = {_FIELDS: endpoints, _FILTERS: endpoints if form.name == "full" else max(100, endpoints // 20)}
    outcome = Outcome("delivery-matching", f"events to {endpoints:,} endpoints with distinct filters")
    for name in (_FIELDS, _FILTERS):
        with contextlib.closing(ground.site("pgmb")) as site:
            _prepare(site, name, endpoints)
            outcome.readings.append(_measure(site, name, endpoints, events[name]))
    outcome.checks = [
        _check(outcome, CHECKS[0], _FIELDS, 10.0),
        _check(outcome, CHECKS[1], _FILTERS, 20.0 * events[_FILTERS] / 500),
    ]
    outcome.notes = [
        f"{name}: {reading.messages:,} events x {endpoints:,} endpoints matched in {reading.wall:.2f} s, "
        f"{reading.wall / reading.messages / endpoints * 1e9:.0f} ns a pair"
        for name in (_FIELDS, _FILTERS)
        for reading in outcome.of(name)
    ]
    return outcome


def _prepare(site: Site, name: str, endpoints: int) -> None:
    statement = (
        "select count(pgmb.create_endpoint('e' || n, 'http://127.0.0.1:9/' || n, '{{chat.#}}', {asked}))"
        " from generate_series(1, %s) n"
    )
    site.connection.execute(sql.SQL(statement.format(asked=_ASKED[name])), [endpoints])  # pyright: ignore[reportArgumentType]
    site.connection.execute("set statement_timeout = '10min'")


def _measure(site: Site, name: str, endpoints: int, events: int) -> Reading:
    connection = site.connection
    connection.execute(
        "insert into pgmb.log_main (topic, payload)"
        " select 'chat.message', json_build_object('room', 1 + n %% %s, 'from', n, 'text', repeat('x', 100))"
        " from generate_series(1, %s) n",
        [endpoints, events],
    )
    connection.execute("vacuum analyze")
    server, started = cpu.of_server(site.server.postmaster_pid), time.perf_counter()
    found = 0
    while rows := connection.execute(
        "select lease, cardinality(endpoints) from pgmb.receive_deliveries('webhooks', %s, '10 min')",
        [_AT_ONCE],
    ).fetchall():
        found += sum(number for _, number in rows)
        connection.execute("select pgmb.settle_deliveries(%s)", [rows[0][0]])
    wall = time.perf_counter() - started
    if found != events:
        raise AssertionError(f"{name}: {found} deliveries of {events} events")
    return Reading(name, events, wall, cpu.of_server(site.server.postmaster_pid) - server, 0.0)


def _check(outcome: Outcome, check: str, name: str, goal: float) -> Check:
    (reading,) = outcome.of(name)
    return Check(check, reading.wall, goal, at_least=False, unit=f" s for {reading.messages:,}")
