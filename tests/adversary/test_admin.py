"""A member of pgmb_admin who does not own the schema tries to act with the owner's rights."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from tests.adversary.target import Target, shortened

ATTEMPTS = [
    "create function pgmb.evil() returns int language sql as 'select 1'",
    "create or replace function pgmb_internal.assert_admin() returns void language sql as ''",
    "alter function pgmb.maintain() owner to current_user",
    "alter function pgmb.maintain() security invoker",
    "drop function pgmb.maintain()",
    "create table pgmb.evil (n int)",
    "alter table pgmb.queue disable trigger all",
    "alter table pgmb.queue add column evil int",
    "update pgmb.queue set name = 'x'",
    "delete from pgmb.queue",
    "delete from pgmb.log_main",
    "truncate pgmb.log_main",
    "insert into pgmb.api_key (name, digest, scopes) values ('x', sha256('z'), '{operate}')",
    "select digest from pgmb.api_key",
    "select sealed from pgmb.endpoint_secret",
    "lock table pgmb.queue in access exclusive mode",
    "create trigger evil after insert on pgmb.log_main execute function pgmb_internal.publish_mutations()",
    "create trigger evil after insert on admins execute function pgmb_internal.publish_mutations()",
    (
        "create trigger evil before insert on admins for each row"
        " execute function pgmb_internal.publish_mutations()"
    ),
    "select pgmb_internal.publish_mutations()",
    "select pgmb_condition.match('select 1', null, null, 1, null)",
    "select pgmb.create_queue('evil', condition => 'true')",
    "select pgmb.subscribe('g', condition => 'true')",
    "set role pgmb_matcher",
    "set session authorization postgres",
    "alter role current_user superuser",
    "grant pg_execute_server_program to current_user",
    "copy (select 1) to program 'id'",
    "copy admins from program 'id'",
    "select pg_read_file('/etc/passwd')",
    "drop schema pgmb cascade",
]


@pytest.fixture(scope="module")
def admin(target: Target) -> psycopg.Connection[Any]:
    return target.role(
        "admin",
        "grant pgmb_admin to {}",
        "grant create on schema public to {}",
        "set role {}; create table admins (n int)",
    )


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=shortened)
def test_an_admin_is_refused(target: Target, admin: psycopg.Connection[Any], attempt: str) -> None:
    target.refuses(admin, attempt)


SHADOWS = [
    "create schema tools",
    "grant usage on schema tools to public",
    "create table tools.ran (by name)",
    "grant insert on tools.ran to public",
    (
        "create function tools.now() returns timestamptz language plpgsql as"
        " $$begin insert into tools.ran values (current_user); return clock_timestamp(); end$$"
    ),
    (
        "create function tools.length(text) returns int language plpgsql as"
        " $$begin insert into tools.ran values (current_user); return 1; end$$"
    ),
    "create temp view new_rows as select tools.now()",
    "create temp view queue as select tools.now()",
    "set search_path = pg_temp, tools, pg_catalog, pgmb",
]
CALLS = [
    "select pgmb.create_queue('shadowed')",
    "select pgmb.create_stream('shadowed')",
    "select pgmb.publish('t', '1')",
    "select * from pgmb.receive('mine')",
    "select pgmb.maintain()",
    "select pgmb.tick('main')",
    "select * from pgmb.describe_queues()",
    "select pgmb.create_endpoint('shadowed', 'https://example.org/')",
]


@pytest.fixture(scope="module")
def author(target: Target) -> psycopg.Connection[Any]:
    """An admin whose functions and views have the names of others. They note which role ran them."""
    made = target.role(
        "author",
        "grant pgmb_admin, pgmb_publisher, pgmb_consumer to {}",
        f"grant create on database {target.database} to {{}}",
    )
    for statement in SHADOWS:
        made.execute(statement.encode())
    return made


@pytest.mark.parametrize("call", CALLS)
def test_shadows_in_its_own_schemas_are_not_called_as_the_owner(
    author: psycopg.Connection[Any], call: str
) -> None:
    with author.transaction(force_rollback=True):
        author.execute(call.encode())
        ran = {name for (name,) in author.execute("select by from tools.ran").fetchall()}
    assert ran <= {author.info.user}
