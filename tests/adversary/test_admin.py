"""A member of pgmb_admin who does not own the schema tries to act with the owner's rights."""

from __future__ import annotations

from tests.adversary.stage import Stage, got_through

ATTEMPTS = [
    "create function pgmb.evil() returns int language sql as 'select 1'",
    "create or replace function pgmb.assert_admin() returns void language sql as ''",
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
    "create trigger evil after insert on pgmb.log_main execute function pgmb.publish_mutations()",
    "create trigger evil after insert on admins execute function pgmb.publish_mutations()",
    "create trigger evil before insert on admins for each row execute function pgmb.publish_mutations()",
    "select pgmb.publish_mutations()",
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


def test_nothing_gets_through(stage: Stage) -> None:
    admin = stage.role(
        "admin",
        "grant pgmb_admin to {}",
        "grant create on schema public to {}",
        "set role {}; create table admins (n int)",
    )
    before = stage.standing()
    assert got_through(admin, ATTEMPTS, lease=stage.lease) == []
    assert stage.standing() == before


def test_shadows_in_its_own_schemas_are_not_called_as_the_owner(stage: Stage) -> None:
    """Whatever of them runs as another role than its author says so."""
    admin = stage.role(
        "admin",
        "grant pgmb_admin, pgmb_publisher, pgmb_consumer to {}",
        f"grant create on database {stage.db.info.dbname} to {{}}",
    )
    me = admin.execute("select current_user").fetchone()
    for statement in (
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
    ):
        admin.execute(statement.encode())
    for call in (
        "select pgmb.create_queue('shadowed')",
        "select pgmb.create_stream('shadowed')",
        "select pgmb.publish('t', '1')",
        "select * from pgmb.receive('shadowed')",
        "select pgmb.maintain()",
        "select pgmb.tick('main')",
        "select * from pgmb.describe_queues()",
        "select pgmb.create_endpoint('shadowed', 'https://example.org/')",
    ):
        admin.execute(call.encode())
    ran = {row[0] for row in admin.execute("select by from tools.ran").fetchall()}
    assert ran <= {me[0] if me else None}
