"""Promise 5: roles reach what they were granted and nothing else.

Publishing is a grant per stream, consuming a grant per queue, everything that changes the schema is the
admin's. The roles here are plain: no superuser, no membership but what a test gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg import sql

from tests.contract.cast import Cast

Acting = Callable[[str], psycopg.Connection[Any]]


def refused(connection: psycopg.Connection[Any], statement: str, *parameters: Any) -> None:
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute(statement, parameters)


def rows(connection: psycopg.Connection[Any], statement: str, *parameters: Any) -> list[Any]:
    return connection.execute(statement, parameters).fetchall()


def test_a_stranger_can_do_nothing(db: psycopg.Connection[Any], cast: Cast) -> None:
    db.execute("select pgmb.create_queue('q')")
    stranger = cast.acting(cast.role("stranger"))
    for statement in (
        "select pgmb.publish('t', '1')",
        "select * from pgmb.receive('q')",
        "select pgmb.ack('00000000-0000-0000-0000-000000000000')",
        "select pgmb.position()",
        "select * from pgmb.log_main",
        "select * from pgmb.segment_1_0",
        "insert into pgmb.log_main (topic, payload) values ('t', '1')",
        "select * from pgmb.queue",
        "select pgmb.maintain()",
        "select nextval('pgmb.seq_main')",
    ):
        refused(stranger, statement)


def test_a_publisher_of_one_stream_publishes_there_and_nowhere_else(
    db: psycopg.Connection[Any], cast: Cast
) -> None:
    db.execute("select pgmb.create_stream('a')")
    db.execute("select pgmb.create_stream('b')")
    db.execute("select pgmb.create_queue('all_a', stream => 'a')")
    role = cast.role("publisher")
    db.execute("select pgmb.grant_publish('a', %s)", [role])
    publisher = cast.acting(role)
    mine = rows(publisher, "select pgmb.publish('t', '1', stream => 'a', delay => '1 year')")[0][0]
    theirs = rows(db, "select pgmb.publish('t', '1', stream => 'b', delay => '1 year')")[0][0]
    assert isinstance(rows(publisher, "select pgmb.publish('t', '1', 'k', '{}', 'a')")[0][0], UUID)
    assert rows(publisher, "select pgmb.publish_many('t', array['2'::json], stream => 'a')") == [(1,)]
    assert rows(publisher, "select pgmb.publish_many(array['t'], array['3'::json], stream => 'a')") == [(1,)]
    with publisher.cursor().copy("copy pgmb.log_a (topic, payload) from stdin") as copy:
        copy.write_row(("t", "4"))
    assert [row[0] for row in rows(db, "select payload from pgmb.receive('all_a')")] == [1, 2, 3, 4]

    refused(publisher, "select pgmb.publish('t', '1', stream => 'b')")
    refused(publisher, "select pgmb.publish('t', '1')")
    refused(publisher, "select pgmb.publish('t', '1', stream => 'b', delay => '1 s')")
    refused(publisher, "select pgmb.publish_many('t', array['1'::json], stream => 'b')")
    refused(publisher, "select pgmb.publish_many(array['t'], array['1'::json], stream => 'b')")
    refused(publisher, "insert into pgmb.log_b (topic, payload) values ('t', '1')")
    refused(
        publisher,
        "insert into pgmb.delayed (id, stream, due_at, topic, payload)"
        " values (gen_random_uuid(), 'b', now(), 't', '1')",
    )
    with (
        pytest.raises(psycopg.errors.InsufficientPrivilege),
        publisher.cursor().copy("copy pgmb.log_b (topic, payload) from stdin") as copy,
    ):
        copy.write_row(("t", "1"))
    refused(publisher, "insert into pgmb.segment_1_0 (topic, payload) values ('t', '1')")

    assert rows(publisher, "select pgmb.cancel(%s)", theirs) == [(False,)], "as if it were not there"
    refused(publisher, "delete from pgmb.delayed")
    assert rows(publisher, "select pgmb.cancel(%s)", mine) == [(True,)]
    assert rows(db, "select count(*) from pgmb.delayed where id = %s", theirs) == [(1,)]
    assert rows(db, "select count(*) from pgmb.delayed where id = %s", mine) == [(0,)]
    refused(publisher, "update pgmb.delayed set stream = 'a'")


def test_a_publisher_cannot_read_nor_forge_the_order(db: psycopg.Connection[Any], cast: Cast) -> None:
    role = cast.role("publisher", "pgmb_publisher")
    db.execute("select pgmb.create_queue('q')")
    publisher = cast.acting(role)
    publisher.execute("select pgmb.publish('t', '1')")
    for statement in (
        "select payload from pgmb.log_main",
        "select topic from pgmb.log_main",
        "select * from pgmb.segment_1_0",
        "select payload from pgmb.delayed",
        "insert into pgmb.log_main (topic, payload) values ('t', '1') returning payload",
        "insert into pgmb.log_main (seq, topic, payload) values (1, 't', '1')",
        "insert into pgmb.log_main (xid, topic, payload) values ('3', 't', '1')",
        "update pgmb.log_main set payload = '2'",
        "delete from pgmb.log_main",
        "truncate pgmb.log_main",
        "select setval('pgmb.seq_main', 1)",
        "select * from pgmb.receive('q')",
        "select * from pgmb.between('main', pgmb.earliest(), pgmb.position())",
        "select pgmb.create_queue('mine')",
        "select pgmb_internal.release_due('main', now())",
        "select pgmb.rotate()",
    ):
        refused(publisher, statement)


def test_a_consumer_of_one_queue_reaches_no_other(db: psycopg.Connection[Any], cast: Cast) -> None:
    for queue in ("a", "b"):
        db.execute("select pgmb.create_queue(%s)", [queue])
    role = cast.role("consumer")
    db.execute("select pgmb.grant_consume('a', %s)", [role])
    consumer = cast.acting(role)
    for number in range(3):
        db.execute("select pgmb.publish('t', to_json(%s::int))", [number])
    mine = rows(consumer, "select lease from pgmb.receive('a', 1)")[0][0]
    fresh = rows(db, "select lease from pgmb.receive('b', 1)")[0][0]
    failed = rows(db, "select lease from pgmb.receive('b', 1)")[0][0]
    db.execute("select pgmb.retry(%s, after => '0 s')", [failed])
    retried = rows(db, "select lease from pgmb.receive('b', 1)")[0][0]
    buried = rows(db, "select lease from pgmb.receive('b', 1)")[0][0]
    db.execute("select pgmb.bury(%s)", [buried])

    refused(consumer, "select * from pgmb.receive('b')")
    for lease in (fresh, retried):
        for settle in ("ack(%s)", "ack(%s, '{1,2,3}')", "retry(%s)", "bury(%s)", "extend(%s)"):
            refused(consumer, f"select pgmb.{settle}", lease)
        refused(consumer, "select * from pgmb.receive('a', ack => %s)", lease)
    for statement in (
        "select pgmb.pause('b')",
        "select pgmb.resume('b')",
        "select pgmb.redrive('b')",
        "select * from pgmb.dead_letters('b')",
        "select pgmb.drop_dead('b')",
        "select pgmb.seek('a', pgmb.earliest())",
        "select pgmb.purge('a')",
        "select pgmb.bind('a', '{#}')",
        "select pgmb.drop_queue('a')",
        "select pgmb.alter_queue('a', max_attempts => 1)",
        "select pgmb.grant_consume('b', current_user)",
        "select payload from pgmb.log_main",
        "select * from pgmb.claim",
        "select pgmb.publish('t', '1')",
    ):
        refused(consumer, statement)
    # A lease of A whose queue part is B's, and the other way round, is nobody's.
    forged = UUID(hex=fresh.hex[:6] + mine.hex[6:])
    refused(consumer, "select pgmb.ack(%s)", forged)
    other = UUID(hex=mine.hex[:6] + fresh.hex[6:])
    with pytest.raises(psycopg.Error, match="is lost"):
        consumer.execute("select pgmb.ack(%s)", [other])
    assert rows(consumer, "select pgmb.ack(%s)", mine) == [(1,)]
    assert rows(db, "select pgmb.ack(%s)", fresh) == [(1,)]
    assert rows(db, "select pgmb.ack(%s)", retried) == [(1,)]

    db.execute("select pgmb.revoke_consume('a', %s)", [role])
    refused(consumer, "select * from pgmb.receive('a')")


def test_a_dropped_queues_grants_do_not_pass_to_the_next_of_that_name(
    db: psycopg.Connection[Any], cast: Cast
) -> None:
    role = cast.role("consumer")
    db.execute("select pgmb.create_queue('a')")
    db.execute("select pgmb.grant_consume('a', %s)", [role])
    db.execute("select pgmb.drop_queue('a')")
    db.execute("select pgmb.create_queue('a')")
    refused(cast.acting(role), "select * from pgmb.receive('a')")


def test_a_reader_of_one_stream_reads_no_other(db: psycopg.Connection[Any], cast: Cast) -> None:
    db.execute("select pgmb.create_stream('a')")
    role = cast.role("reader")
    db.execute("select pgmb.grant_read('a', %s)", [role])
    reader = cast.acting(role)
    db.execute("select pgmb.publish('t', '1', stream => 'a')")
    db.execute("select pgmb.publish('t', '1')")
    read = "select payload from pgmb.between(%s, pgmb.earliest(%s), pgmb.position(%s))"
    assert rows(reader, read, "a", "a", "a") == [(1,)]
    refused(reader, read, "main", "main", "main")
    refused(reader, "select pgmb.confirm('main', 'me', pgmb.earliest())")
    refused(reader, "select pgmb.forget('main', 'me')")
    refused(reader, "select pgmb.position_of('main', 1)")
    refused(reader, "select payload from pgmb.log_main")
    db.execute("select pgmb.revoke_stream('a', %s)", [role])
    refused(reader, read, "a", "a", "a")


@pytest.mark.parametrize("group", ["pgmb_publisher", "pgmb_consumer"])
def test_only_an_admin_maintains(db: psycopg.Connection[Any], cast: Cast, group: str) -> None:
    db.execute("select pgmb.create_queue('q')")
    plain = cast.acting(cast.role("plain", group))
    admin = cast.acting(cast.role("admin", "pgmb_admin"))
    for statement in (
        "select pgmb.create_stream('x')",
        "select pgmb.alter_stream('x', keep_for => '1 day')",
        "select pgmb.rotate('x')",
        "select pgmb.seal('x')",
        "select * from pgmb.droppable('x')",
        "select pgmb.drop_segments('x')",
        "select pgmb.detach_dropped('x')",
        "select pgmb.clear_settled()",
        "select pgmb.maintain()",
        "select pgmb.create_queue('y', stream => 'x')",
        "select pgmb.bind('y', '{a}')",
        "select pgmb.alter_queue('y', max_attempts => 3)",
        "select pgmb.seek('y', pgmb.earliest('x'))",
        "select pgmb.purge('y')",
        "select pgmb.grant_publish('x', current_user)",
        "select pgmb.grant_read('x', current_user)",
        "select pgmb.grant_consume('y', current_user)",
        "select pgmb.revoke_stream('x', current_user)",
        "select pgmb.revoke_consume('y', current_user)",
        "select pgmb.drop_queue('y')",
        "select pgmb.drop_stream('x')",
    ):
        refused(plain, statement)
        admin.execute(statement)


def test_a_role_cannot_be_claimed_by_setting(db: psycopg.Connection[Any], cast: Cast) -> None:
    """Definer functions ask about the session's role: it cannot be forged by settings, nor by nesting."""
    db.execute("select pgmb.create_queue('q')")
    stranger_role = cast.role("stranger", "pgmb_publisher")
    owner = rows(db, "select nspowner::regrole::text from pg_namespace where nspname = 'pgmb'")[0][0]
    stranger = cast.acting(stranger_role)
    for forged in (owner, "pgmb_admin", "pgmb_consumer"):
        refused(stranger, f'set role "{forged}"')
        refused(stranger, "select set_config('role', %s, false)", forged)
        refused(stranger, f'set session authorization "{forged}"')
    # A consumer grant that the caller gave up for the moment does not count, one that it took on does.
    consumer_role = cast.role("consumer", "pgmb_consumer", stranger_role)
    consumer = cast.acting(consumer_role)
    consumer.execute("select * from pgmb.receive('q')")
    consumer.execute(f'set role "{stranger_role}"')
    refused(consumer, "select * from pgmb.receive('q')")
    consumer.execute("reset role")
    consumer.execute("select * from pgmb.receive('q')")


def test_shadows_in_temporary_and_own_schemas_are_not_called(db: psycopg.Connection[Any], cast: Cast) -> None:
    """Definer functions run with a pinned search_path: what the caller has put before it is not reached."""
    db.execute("select pgmb.create_queue('q')")
    role = cast.role("mallory", "pgmb_consumer", "pgmb_publisher")
    db.execute(sql.SQL("create schema trap authorization {}").format(sql.Identifier(role)))
    db.execute(
        sql.SQL("grant temporary on database {} to {}").format(
            sql.Identifier(db.info.dbname), sql.Identifier(role)
        )
    )
    mallory = cast.acting(role)
    trap = "raise exception 'ran as %', current_user using errcode = 'XX999';"
    for name in ("claim", "queue", "retry", "stream", "binding", "settlement"):
        mallory.execute(f"create temporary table {name} (id int)")
    for schema in ("trap", "pg_temp"):
        for signature, returned in (
            ("format(text, text)", "text"),
            ('format(text, variadic "any")', None),
            ("clock_timestamp()", "timestamptz"),
            ("unnest(json[])", "setof json"),
            ("unnest(bigint[])", "setof bigint"),
            ("cardinality(json[])", "int"),
            ("cardinality(bigint[])", "int"),
            ("array_remove(bigint[], bigint)", "bigint[]"),
            ("array_agg(bigint)", "bigint[]"),
            ("pg_has_role(name, regrole, text)", "boolean"),
            ("caller()", "name"),
            ("assert_consumer(int, text)", "void"),
            ("coalesce_json(json)", "json"),
        ):
            if returned is not None:
                mallory.execute(
                    f"create function {schema}.{signature} returns {returned} language plpgsql as $$begin"
                    f" {trap} end$$"
                )
    mallory.execute(
        "create function trap.equal(bigint, integer) returns boolean language plpgsql as"
        f" $$begin {trap} end$$"
    )
    mallory.execute("create operator trap.= (leftarg = bigint, rightarg = integer, function = trap.equal)")
    # Publishing has the caller's own rights: what it puts before pg_catalog there, it calls as itself.
    mallory.execute("select pgmb.publish_many('t', array['1'::json])")
    mallory.execute("select pgmb.publish_many(array['t'], array['2'::json])")
    mallory.execute("select pgmb.publish('t', '3')")
    mallory.execute("set search_path = pg_temp, trap, pg_catalog")
    got = rows(mallory, "select lease, seq from pgmb.receive('q')")
    assert len(got) == 3
    lease, seqs = got[0][0], [seq for _, seq in got]
    assert rows(mallory, "select pgmb.ack(%s, %s)", lease, seqs[:1]) == [(1,)]
    assert rows(mallory, "select pgmb.retry(%s, %s, '0 s')", lease, seqs[1:2]) == [(1,)]
    assert rows(mallory, "select pgmb.extend(%s) is not null", lease) == [(True,)]
    assert rows(mallory, "select pgmb.bury(%s)", lease) == [(1,)]
    assert len(rows(mallory, "select * from pgmb.receive('q')")) == 1
    assert len(rows(mallory, "select * from pgmb.dead_letters('q')")) == 1
    assert rows(mallory, "select pgmb.redrive('q')") == [(1,)]
    mallory.execute("select pgmb.tick()")
    assert len(rows(mallory, "select * from pgmb.between('main', pgmb.earliest(), pgmb.position())")) == 3


def test_the_publish_functions_run_nothing_from_the_search_path(
    db: psycopg.Connection[Any], cast: Cast
) -> None:
    """They have the caller's rights, and an admin's session may have a schema in its path that others write
    to."""
    mallory_role = cast.role("mallory")
    db.execute(sql.SQL("create schema shared authorization {}").format(sql.Identifier(mallory_role)))
    mallory = cast.acting(mallory_role)
    for signature, returned in (
        ("unnest(json[])", "setof json"),
        ("cardinality(json[])", "int"),
        ("cardinality(text[])", "int"),
        ("format(text, text)", "text"),
    ):
        mallory.execute(
            f"create function shared.{signature} returns {returned} language plpgsql as"
            " $$begin raise exception 'ran as %', current_user; end$$"
        )
    db.execute("set search_path = shared, public")
    db.execute("select pgmb.publish_many('t', array['1'::json])")
    db.execute("select pgmb.publish_many(array['t'], array['2'::json], keys => array['k'])")
    db.execute("select pgmb.publish('t', '3', delay => '1 s')")
    db.execute("select pgmb.publish('t', '3')")


def test_names_with_quotes_inject_nothing(db: psycopg.Connection[Any], cast: Cast) -> None:
    role = cast.role("consumer", "pgmb_consumer", "pgmb_publisher")
    plain = cast.acting(role)
    evil = "x'); drop table pgmb.queue; --"
    db.execute("select pgmb.create_queue('q', array[%s, 'a.\"''\\x'])", [evil])
    for topic in (evil, "a.\"'\\x", "a.\"'\\y"):
        plain.execute("select pgmb.publish(%s, %s)", [topic, '{"a": "\'"}'])
    assert len(rows(plain, "select * from pgmb.receive('q')")) == 2
    for statement in ("publish('t', '1', stream => %s)", "position(%s)", "receive(%s)", "tick(%s)"):
        with pytest.raises(psycopg.Error, match="does not exist"):
            plain.execute(f"select pgmb.{statement}", [evil])
