"""The owner of a table, which may publish its changes, tries to publish elsewhere or run code as others."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from tests.adversary.target import Target, shortened

ATTEMPTS = [
    "select pgmb.push_table_mutations('own', stream => 'other')",
    "select pgmb.push_table_mutations('foreign_one')",
    "select pgmb.push_table_mutations('pgmb.queue')",
    "select pgmb.push_table_mutations('pg_catalog.pg_class')",
    "select pgmb.push_table_mutations('pg_authid')",
    "select pgmb.push_table_mutations('own; drop table foreign_one')",
    "select pgmb.stop_table_mutations('foreign_one')",
    "create trigger evil after insert on own execute function pgmb_internal.publish_mutations()",
    (
        "create trigger evil after insert on own referencing new table as new_rows"
        " for each statement execute function pgmb_internal.publish_mutations('other')"
    ),
    "create trigger evil after insert on foreign_one execute function pgmb_internal.publish_mutations()",
    "select pgmb_internal.publish_mutations()",
    "create or replace function pgmb.serialise_record_for_event() returns int language sql as 'select 1'",
    "select * from foreign_one",
    "select * from pgmb.receive('yours')",
]


@pytest.fixture(scope="module")
def owner(target: Target) -> psycopg.Connection[Any]:
    target.db.execute("create table foreign_one (id int primary key)")
    return target.role(
        "table_owner",
        "grant create on schema public to {}",
        "select pgmb.grant_publish('main', '{}')",
        # A plain owner needs the right to create triggers: without it every attempt would fail for its lack.
        "set role {}; create table own (id int primary key);"
        f" grant trigger on own to {target.db.info.user}",
    )


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=shortened)
def test_the_owner_of_a_table_is_refused(
    target: Target, owner: psycopg.Connection[Any], attempt: str
) -> None:
    target.refuses(owner, attempt)


def test_it_may_publish_the_changes_of_its_table(owner: psycopg.Connection[Any]) -> None:
    with owner.transaction(force_rollback=True):
        owner.execute("select pgmb.push_table_mutations('own')")
        owner.execute("insert into own values (1)")
