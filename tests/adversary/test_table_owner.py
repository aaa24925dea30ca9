"""The owner of a table, which may publish its changes, tries to publish elsewhere or run code as others."""

from __future__ import annotations

from tests.adversary.stage import Stage, got_through

ATTEMPTS = [
    "select pgmb.push_table_mutations('own', stream => 'other')",
    "select pgmb.push_table_mutations('foreign_one')",
    "select pgmb.push_table_mutations('pgmb.queue')",
    "select pgmb.push_table_mutations('pg_catalog.pg_class')",
    "select pgmb.push_table_mutations('pg_authid')",
    "select pgmb.push_table_mutations('own; drop table foreign_one')",
    "select pgmb.stop_table_mutations('foreign_one')",
    "create trigger evil after insert on own execute function pgmb.publish_mutations()",
    (
        "create trigger evil after insert on own referencing new table as new_rows"
        " for each statement execute function pgmb.publish_mutations('other')"
    ),
    "create trigger evil after insert on foreign_one execute function pgmb.publish_mutations()",
    "select pgmb.publish_mutations()",
    "create or replace function pgmb.serialise_record_for_event() returns int language sql as 'select 1'",
    "select * from foreign_one",
    "select * from pgmb.receive('yours')",
]


def test_nothing_gets_through(stage: Stage) -> None:
    stage.db.execute("create table foreign_one (id int primary key)")
    owner = stage.role(
        "table_owner",
        "grant create on schema public to {}",
        "select pgmb.grant_publish('main', '{}')",
        "set role {}; create table own (id int primary key)",
    )
    before = stage.standing()
    assert got_through(owner, ATTEMPTS, lease=stage.lease) == []
    assert stage.standing() == before
