"""One vocabulary: a method is named as its SQL function, and so are its parameters."""

from __future__ import annotations

import inspect
from typing import Any

import psycopg
import pytest

import pgmb
from pgmb._core import statements

APART = {
    "abandon",
    "api_keys",  # views
    "attempts",
    "audit",
    "backends",  # of the client itself
    "break_off",
    "close",
    "connection",
    "consume",
    "create_api_key",  # makes the key, and passes its digest on
    "disable_endpoint",  # set_endpoint_state
    "endpoint",
    "endpoints",
    "group",  # whose methods are below
    "listener",
    "own_connection",
    "pause_endpoint",
    "publisher",
    "queue_status",
    "reader_status",
    "resume_endpoint",
    "rotate_secret",  # add_endpoint_secret
    "sink_status",
    "stream_status",
    "tail",
    "workers",  # describe_workers: another project's view has the name
}
OF_GROUPS = {
    "subscribe": ("subscribe", {"group_id", "stream"}),
    "unsubscribe": ("unsubscribe", set[str]()),
    "resume": ("resume_subscriptions", {"group_id"}),
    "receive": ("receive_group", {"group_id", "durable"}),
}
"""The function behind each, and what the group itself knows."""
METHODS = sorted(
    name for name, _ in inspect.getmembers(pgmb.Broker, inspect.isfunction) if not name.startswith("_")
)


def signatures(db: psycopg.Connection[Any], function: str) -> list[dict[str, str]]:
    rows = db.execute(
        "select proargnames[1:pronargs], array(select format_type(t, null) from unnest(proargtypes)"
        " with ordinality u (t, n) order by n) from pg_proc"
        " where proname = %s and pronamespace = 'pgmb'::regnamespace",
        [function],
    ).fetchall()
    return [dict(zip(names or (), types, strict=True)) for names, types in rows]


def plain(kind: str) -> str:
    return kind.replace("timestamp with time zone", "timestamptz").replace('"', "")


@pytest.mark.parametrize("method", [name for name in METHODS if name not in APART])
def test_methods_are_named_as_functions_and_take_what_those_take(
    db: psycopg.Connection[Any], method: str
) -> None:
    parameters = set(inspect.signature(getattr(pgmb.Broker, method)).parameters) - {"self", "conn"}
    candidates = signatures(db, method)
    assert candidates, f"no function pgmb.{method}"
    if method in ("receive", "receive_any"):
        parameters |= {"durable", "raw"}  # decided by the client
    if method == "receive_any":
        parameters -= {"heartbeat"}  # goes along in the same statement
    if method in ("create_schedule", "resume_schedule"):
        parameters |= {"next_at"}  # the client reads the cron expression
    if method == "create_endpoint":
        parameters -= {"secret"}  # sealed by the client
        parameters |= {"id"}  # chosen by the client, which seals headers for it
    if method == "publish_many":
        parameters -= {"dedup_for"}  # for events with keys, which are arrays in SQL
    assert any(set(names) == parameters for names in candidates), (candidates, parameters)


@pytest.mark.parametrize("method", OF_GROUPS)
def test_methods_of_groups_take_what_the_functions_take(db: psycopg.Connection[Any], method: str) -> None:
    function, known = OF_GROUPS[method]
    here, there = (inspect.signature(getattr(kind, method)) for kind in (pgmb.Group, pgmb.AsyncGroup))
    assert list(here.parameters) == list(there.parameters)
    (names,) = signatures(db, function)
    assert set(names) == set(here.parameters) - {"self", "conn"} | known


@pytest.mark.parametrize("method", METHODS)
def test_both_clients_have_the_same_methods(method: str) -> None:
    here, there = (inspect.signature(getattr(kind, method)) for kind in (pgmb.Broker, pgmb.AsyncBroker))
    assert list(here.parameters) == list(there.parameters)
    assert [one.default for one in here.parameters.values()] == [
        one.default for one in there.parameters.values()
    ]


def test_parameters_have_the_types_of_the_functions(db: psycopg.Connection[Any]) -> None:
    by_name: dict[str, set[str]] = {}
    for function in (*METHODS, "add_endpoint_secret", "set_endpoint_state"):
        for names in signatures(db, function):
            for name, kind in names.items():
                by_name.setdefault(name, set()).add(plain(kind))
    for name, kind in statements.TYPES.items():
        assert kind in by_name[name], name
    for function, kinds in statements.TYPES_OF_FUNCTIONS.items():
        (names,) = signatures(db, function)
        for name, kind in kinds.items():
            assert plain(names[name]) == kind != statements.TYPES[name], (function, name)
