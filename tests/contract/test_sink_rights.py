"""Publishing from many tasks is for those who may publish, through stages and applications of their own."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from tests.contract.cast import Cast
from tests.contract.test_privileges import refused
from tests.contract.test_sink import copy, held, log, publish, stage, value

Connection = psycopg.Connection[Any]

RUN = "00000000-0000-4000-8000-000000000001"


@pytest.fixture
def one(db: Connection, cast: Cast) -> Connection:
    """May publish to every stream."""
    return cast.acting(cast.role("one", "pgmb_publisher"))


@pytest.fixture
def other(db: Connection, cast: Cast) -> Connection:
    """Was granted the stream main alone."""
    role = cast.role("other")
    db.execute("select pgmb.grant_publish('main', %s)", [role])
    return cast.acting(role)


def test_who_may_publish_may_publish_from_many_tasks(
    db: Connection, one: Connection, other: Connection
) -> None:
    for connection, app in ((one, "one"), (other, "other")):
        assert publish(connection, [stage(connection, ["1"], app)], [1], app) == 1
        assert publish(connection, [stage(connection, ["1"], app)], [1], app) is None
        begin = "select pgmb.begin_tasks('main', %s, 2, %s)"
        assert value(connection, begin, app, RUN) == "direct"
        with connection.transaction():
            assert value(connection, "select pgmb.claim_task('main', %s, 2, 0, %s)", app, RUN)
            copy(connection, "log_main", ["2"])
            connection.execute("select pgmb.finish_task('main', %s, 2, 0, 1, 7)", [app])
        assert publish(connection, [None], [1], app, 2, [7]) == 0
        with connection.transaction():
            number = value(connection, "select pgmb.claim_stage('main', %s)", app)
            copy(connection, f"stage_{number}", ["3"])
            assert value(connection, "select pgmb.publish_stage('main', %s, %s, null, 1)", number, app) == 1
    assert log(db) == ["1", "2", "3"] * 2


def test_a_stream_that_was_not_granted_is_closed(db: Connection, other: Connection, cast: Cast) -> None:
    db.execute("select pgmb.create_stream('closed')")
    for connection in (other, cast.acting(cast.role("consumer", "pgmb_consumer"))):
        for statement in (
            "select pgmb.claim_stage('closed', 'app', 1)",
            "select pgmb.publish_tasks('closed', 'app', 1, '{}', '{}', '{}')",
            "select pgmb.publish_stage('closed', 1, 'app', 1, 1)",
            "select pgmb.abandon_tasks('closed', 'app', 1)",
            "select pgmb.published_version('closed', 'app')",
            f"select pgmb.begin_tasks('closed', 'app', 1, '{RUN}')",
            f"select pgmb.claim_task('closed', 'app', 1, 0, '{RUN}')",
            "select pgmb.task_published('closed', 'app', 1, 0)",
            "select pgmb.finish_task('closed', 'app', 1, 0, 1, 1)",
            "select pgmb.clear_stages('0 s')",
            "select * from pgmb.stage",
            "update pgmb.ledger set version = 0",
        ):
            refused(connection, statement)
    # Nor can a stage that was claimed for one stream be published to another.
    db.execute("select pgmb.create_stream('open')")
    number = stage(other, ["1"])
    with pytest.raises(psycopg.Error) as refusal:
        db.execute("select pgmb.publish_tasks('open', 'app', 1, '{0}', array[%s::int], '{1}')", [number])
    assert refusal.value.sqlstate == "MB050"


def test_a_stage_belongs_to_who_claimed_it(db: Connection, one: Connection, other: Connection) -> None:
    number = stage(one, ["1"], app="one")
    for statement in (
        f"insert into pgmb.stage_{number} (topic, payload) values ('t', '666')",
        f"copy pgmb.stage_{number} (topic, payload) from stdin",
        f"select * from pgmb.stage_{number}",
        f"truncate pgmb.stage_{number}",
        f"drop table pgmb.stage_{number}",
    ):
        refused(other, statement)
    refused(one, f"select * from pgmb.stage_{number}")
    for app in ("one", "other"):
        with pytest.raises(psycopg.Error) as refusal:
            publish(other, [number], [1], app, version=None)
        assert refusal.value.sqlstate == "MB050"
        assert value(other, "select pgmb.abandon_tasks('main', %s, 1)", app) == 0
    assert stage(other, ["2"], app="other") != number
    assert held(db) == 2
    assert publish(one, [number], [1], app="one") == 1


def test_an_application_belongs_to_who_began_it(db: Connection, one: Connection, other: Connection) -> None:
    """Otherwise whoever may publish could have another's versions skipped."""
    assert publish(one, [stage(one, ["1"])], [1]) == 1
    for statement in (
        "select pgmb.publish_tasks('main', 'app', 99, '{}', '{}', '{}')",
        f"select pgmb.begin_tasks('main', 'app', 99, '{RUN}')",
        "select pgmb.abandon_tasks('main', 'app', 99, true)",
    ):
        refused(other, statement)
    one.execute(f"select pgmb.begin_tasks('main', 'app', 2, '{RUN}')")
    refused(other, f"select pgmb.claim_task('main', 'app', 2, 0, '{RUN}')")
    with one.transaction():
        assert value(one, f"select pgmb.claim_task('main', 'app', 2, 0, '{RUN}')")
        copy(one, "log_main", ["2"])
        one.execute("select pgmb.finish_task('main', 'app', 2, 0, 1, 7)")
    refused(other, "select pgmb.finish_task('main', 'app', 2, 0, 9, 9)")
    assert publish(one, [None], [1], version=2, digests=[7]) == 0
    # The owner of it all may go on for them.
    assert publish(db, [stage(db, ["3"], version=3)], [1], version=3) == 1
    assert log(db) == ["1", "2", "3"]


def test_an_application_whose_role_is_gone_is_anybodys(
    db: Connection, other: Connection, cast: Cast, server: Any
) -> None:
    gone = cast.role("gone", "pgmb_publisher")
    with cast.acting(gone) as connection:
        assert publish(connection, [stage(connection, ["1"])], [1]) == 1
    db.execute(f"drop owned by {gone}")
    server.admin().execute(f"alter role {gone} rename to {gone}_renamed")
    try:
        assert publish(other, [stage(other, ["2"], version=2)], [1], version=2) == 1
    finally:
        server.admin().execute(f"alter role {gone}_renamed rename to {gone}")
    assert log(db) == ["1", "2"]
