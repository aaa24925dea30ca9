"""A role that may connect, and nothing else, tries to use, see or stop the broker."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from tests.adversary.target import Target, shortened

ATTEMPTS = [
    "select pgmb.publish('t', '1')",
    "select * from pgmb.receive('yours')",
    "select * from pgmb.receive_any('{yours}')",
    "select * from pgmb.receive_group('yours')",
    "select pgmb.ack('<lease>')",
    "select pgmb.retry('<lease>')",
    "select pgmb.bury('<lease>')",
    "select pgmb.extend('<lease>', '1 day')",
    "select * from pgmb.browse('main')",
    "select pgmb.position('main')::text",
    "select pgmb.earliest('main')::text",
    "select * from pgmb.between('main', pgmb.earliest('main'), pgmb.position('main'))",
    "select pgmb.subscribe('g')",
    "select pgmb.tick('main')",
    "select pgmb.maintain()",
    "select pgmb.create_queue('evil')",
    "select pgmb.create_stream('evil')",
    "select pgmb.drop_queue('yours')",
    "select pgmb.pause('yours')",
    "select pgmb.seek('yours', pgmb.earliest('main'))",
    "select pgmb.create_api_key('evil', sha256('y'), '{operate}')",
    "select * from pgmb.find_api_key(sha256('x'))",
    "select pgmb.drop_api_key('k')",
    "select pgmb.create_endpoint('evil', 'http://127.0.0.1/')",
    "select * from pgmb.dispatched_endpoints()",
    "select pgmb.grant_publish('main', current_user)",
    "select pgmb.grant_consume('yours', current_user)",
    "select pgmb.rebase()",
    "select pgmb.record('key:operator', 'forged')",
    "select pgmb.derive_id(1, now(), 1)",
    "select * from pgmb.log_main",
    "select * from pgmb.delayed",
    "select * from pgmb.queue",
    "select * from pgmb.stream",
    "select * from pgmb.api_key",
    "select * from pgmb.access_token",
    "select * from pgmb.audit",
    "select * from pgmb.endpoint",
    "select * from pgmb.endpoint_secret",
    "select * from pgmb.subscription",
    "select * from pgmb.installation",
    "insert into pgmb.log_main (topic, payload) values ('t', '1')",
    "lock table pgmb.queue in access exclusive mode",
    "truncate pgmb.delayed",
    "create table pgmb.evil (n int)",
    "create function pgmb.evil() returns int language sql as 'select 1'",
    (
        "create or replace function pgmb_internal.caller() returns name language sql as"
        " $$select 'postgres'::name$$"
    ),
    "drop schema pgmb cascade",
    "alter schema pgmb owner to current_user",
    "set role pgmb_admin",
    "set role pgmb_matcher",
    "set session authorization postgres",
    "grant pgmb_admin to current_user",
]


@pytest.fixture(scope="module")
def stranger(target: Target) -> psycopg.Connection[Any]:
    return target.role("stranger")


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=shortened)
def test_a_stranger_is_refused(target: Target, stranger: psycopg.Connection[Any], attempt: str) -> None:
    target.understands(attempt)
    target.refuses(stranger, attempt)
