"""A reader of stream main tries to read another, to write, and to stop what others read."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from tests.adversary.target import Target, shortened

BOMB = "exists($p[*] ? (exists($p[*] ? (exists($p[*] ? (exists($p[*] ? (@ < 0))))))))"
PARAMS = "(select jsonb_build_object('p', jsonb_agg(n)) from generate_series(1, 300) n)"
ATTEMPTS = [
    "select * from pgmb.log_other",
    "select * from pgmb.between('other', pgmb.earliest('other'), pgmb.position('other'))",
    "select * from pgmb.between_filtered('other', pgmb.earliest('main'), pgmb.position('main'))",
    "select * from pgmb.between_group('g', 'other', pgmb.earliest('main'), pgmb.position('main'))",
    "select pgmb.subscribe('g', stream => 'other')",
    "select pgmb.subscribe('webhooks')",
    "select pgmb.subscribe('webhooks/other')",
    "select pgmb.subscribe('endpoint/hook')",
    f"select pgmb.subscribe('webhooks', filter => '{BOMB}', params => {PARAMS})",
    "select pgmb.subscribe('g', condition => 'true')",
    "select pgmb.subscribe('g', filter => '$.a == $missing')",
    "select pgmb.resume_subscriptions('webhooks')",
    "select pgmb.unsubscribe(id) from pgmb.subscription",
    "select pgmb.publish('t', '1')",
    "insert into pgmb.log_main (topic, payload) values ('t', '1')",
    "delete from pgmb.log_main",
    "lock table pgmb.log_main in access exclusive mode",
    "select * from pgmb.receive('yours')",
    "select pgmb.ack('<lease>')",
    "select pgmb.create_queue('evil', filter => '$.a == 1')",
    "select pgmb.maintain()",
    "select * from pgmb.subscription",
    "select * from pgmb.endpoint",
    "select * from pgmb.dispatched_endpoints()",
    "set role pgmb_admin",
]


@pytest.fixture(scope="module")
def reader(target: Target) -> psycopg.Connection[Any]:
    return target.role("reader", "select pgmb.grant_read('main', '{}')")


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=shortened)
def test_a_reader_is_refused(target: Target, reader: psycopg.Connection[Any], attempt: str) -> None:
    target.refuses(reader, attempt)


COSTLY = f"filter => '{BOMB}', params => {PARAMS}"


@pytest.mark.parametrize("between", ["pgmb.earliest('main'), pgmb.position('main')", "null, null"])
def test_a_filter_that_runs_for_hours_is_not_run_to_be_checked_nor_without_a_limit(
    target: Target, reader: psycopg.Connection[Any], between: str
) -> None:
    with reader.transaction():
        reader.execute("set local statement_timeout = 0")
        target.refuses(reader, f"select * from pgmb.between_filtered('main', {between}, {COSTLY})")


def test_it_may_read_its_stream(reader: psycopg.Connection[Any]) -> None:
    assert reader.execute(
        "select count(*) from pgmb.between('main', pgmb.earliest('main'), pgmb.position('main'))"
    ).fetchone() == (1,)
