"""What readers and consumers try beyond their grants, and what a role gets by another's name."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg import sql

from pgmb import schema
from tests.contract.cast import Cast
from tests.contract.test_privileges import refused, rows


def test_positions_of_a_stream_are_for_its_readers(db: psycopg.Connection[Any], cast: Cast) -> None:
    db.execute("select pgmb.create_stream('theirs')")
    role = cast.role("reader")
    db.execute("select pgmb.grant_read('main', %s)", [role])
    reader = cast.acting(role)
    for call in ("earliest(%s)", "position_at(%s, now())"):
        assert rows(reader, f"select pgmb.{call} is not null", "main") == [(True,)]
        refused(reader, f"select pgmb.{call}", "theirs")


def test_a_reader_cannot_move_or_forget_the_reader_of_another_role(
    db: psycopg.Connection[Any], cast: Cast
) -> None:
    """Retention would drop what the other has not read."""
    mine, theirs = (cast.acting(cast.role(name, "pgmb_consumer")) for name in ("mine", "theirs"))
    confirm = "select pgmb.confirm('main', 'spark', pgmb.earliest())"
    forget = "select pgmb.forget('main', 'spark')"
    theirs.execute(confirm)
    theirs.execute(confirm)
    for statement in (confirm, forget):
        refused(mine, statement)
    assert rows(theirs, forget) == [(True,)]
    assert rows(mine, forget) == [(False,)]
    mine.execute(confirm)
    refused(theirs, forget)
    admin = cast.acting(cast.role("admin", "pgmb_admin"))
    assert rows(admin, forget) == [(True,)]


def test_a_role_inherits_nothing_from_a_dropped_role_of_its_name(
    db: psycopg.Connection[Any], cast: Cast
) -> None:
    schema.install(db, compat=("pgmq",))
    db.execute(
        "select pgmb.create_queue('a'), pgmb.create_queue('b'), pgmq.create('jobs'), pgmq.create('more')"
    )
    role = sql.Identifier(cast.role("consumer"))
    name = role.as_string().strip('"')
    db.execute("select pgmb.grant_consume('a', %s), pgmq.grant_send('jobs', %s)", [name, name])
    before = cast.acting(name)
    before.execute("select * from pgmb.receive('a')")
    before.execute("select * from pgmq.send('jobs', '1')")
    before.close()
    db.execute(sql.SQL("drop owned by {0}; drop role {0}; create role {0} login").format(role))
    db.execute("select pgmb.grant_consume('b', %s), pgmq.grant_send('more', %s)", [name, name])
    after = cast.acting(name)
    after.execute("select * from pgmb.receive('b')")
    after.execute("select * from pgmq.send('more', '1')")
    refused(after, "select * from pgmb.receive('a')")
    refused(after, "select * from pgmq.send('jobs', '1')")
    db.execute("select pgmb.grant_consume('a', %s)", [name])
    after.execute("select * from pgmb.receive('a')")


def test_pgmq_queues_of_long_names_do_not_share_an_archive(db: psycopg.Connection[Any]) -> None:
    schema.install(db, compat=("pgmq",))
    db.execute("select pgmq.create(%s)", ["ü" * 30])
    for name in ("ü" * 31, "ü" * 40 + "a", "ü" * 40 + "b"):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="61 bytes"):
            db.execute("select pgmq.create(%s)", [name])


def test_a_publisher_cannot_make_tables_without_bound(db: psycopg.Connection[Any], cast: Cast) -> None:
    role = cast.role("publisher", "pgmb_publisher")
    publisher = cast.acting(role)
    assert rows(publisher, "select pgmb.claim_stage('main', 'app') is not null") == [(True,)]
    db.execute("insert into pgmb.stage (role, app) select %s, 'x' from generate_series(1, 10000)", [role])
    with pytest.raises(psycopg.Error, match="has 10000 stages"):
        publisher.execute("select pgmb.claim_stage('main', 'app')")
