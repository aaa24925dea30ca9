"""Publishing from many tasks, by SQL alone: what a stage, the ledger and a version promise."""

from __future__ import annotations

import random
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql

from harness.sessions import Sessions
from tests.conftest import Connect, FreshServer

Connection = psycopg.Connection[Any]


def value(connection: Connection, statement: str, *parameters: Any) -> Any:
    row = connection.execute(statement, parameters).fetchone()
    return None if row is None else row[0]


def stage(
    connection: Connection,
    payloads: list[str],
    app: str = "app",
    version: int | None = 1,
    stream: str = "main",
) -> int | None:
    """What a task does: claim a stage and copy into it, in one transaction."""
    with connection.transaction():
        number: int | None = value(connection, "select pgmb.claim_stage(%s, %s, %s)", stream, app, version)
        if number is not None:
            copy(connection, f"stage_{number}", payloads)
        return number


def copy(connection: Connection, table: str, payloads: list[str]) -> None:
    into = sql.SQL("copy pgmb.{} (topic, payload) from stdin").format(sql.Identifier(table))
    with connection.cursor() as cursor, cursor.copy(into) as copying:
        for payload in payloads:
            copying.write_row(("t", payload))


def publish(
    connection: Connection,
    stages: list[int | None],
    events: list[int],
    app: str = "app",
    version: int | None = 1,
    digests: list[int | None] | None = None,
) -> Any:
    """What the driver does."""
    return value(
        connection,
        "select pgmb.publish_tasks('main', %s, %s, %s::int[], %s::int[], %s::bigint[], %s::bigint[])",
        app,
        version,
        list(range(len(stages))),
        stages,
        events,
        digests,
    )


def log(connection: Connection) -> list[str]:
    rows = connection.execute("select payload::text from pgmb.log_main order by seq").fetchall()
    return [row[0] for row in rows]


def held(connection: Connection) -> int:
    return int(value(connection, "select count(*) from pgmb.stage where app is not null"))


def test_a_version_is_published_whole_in_the_tasks_order_and_once(db: Connection) -> None:
    second, first = stage(db, ["3"]), stage(db, ["1", "2"])
    assert log(db) == []
    assert publish(db, [first, None, second], [2, 0, 1]) == 3
    assert log(db) == ["1", "2", "3"]
    assert held(db) == 0
    # The driver repeats itself, a task is repeated, and so is a whole version, or an older one.
    assert publish(db, [first, None, second], [2, 0, 1]) is None
    assert stage(db, ["1"]) is None
    assert stage(db, ["0"], version=0) is None
    assert publish(db, [None], [0], version=0) is None, "it holds nothing that could be lost"
    assert value(db, "select pgmb.published_version('main', 'app')") == 1
    assert log(db) == ["1", "2", "3"]
    # Another application, and another stream of this one, are apart.
    db.execute("select pgmb.create_stream('other')")
    assert stage(db, ["1"], stream="other") is not None
    assert publish(db, [stage(db, ["4"], app="b")], [1], app="b") == 1
    assert log(db) == ["1", "2", "3", "4"]


def test_stages_are_used_again(db: Connection, connect: Connect) -> None:
    for version in range(5):
        assert publish(db, [stage(db, ["1"] * 9, version=version)], [9], version=version) == 9
    assert value(db, "select count(*) from pgmb.stage") == 1
    # Not while another task writes.
    other = connect()
    with other.transaction():
        assert value(other, "select pgmb.claim_stage('main', 'app', 9)") == 1
        assert stage(db, ["1"], version=9) == 2


def test_what_rolls_back_leaves_nothing(db: Connection) -> None:
    with pytest.raises(psycopg.errors.InvalidTextRepresentation):
        stage(db, ["1", "{"])
    assert value(db, "select count(*) from pgmb.stage") == 0
    assert value(db, "select count(*) from pg_class where relname like 'stage\\__'") == 0


def test_only_the_stages_named_are_published_and_the_rest_is_freed(db: Connection) -> None:
    """A speculative attempt, and one whose executor died after it was done."""
    stage(db, ["1", "2"])
    mine = stage(db, ["1", "2"])
    later = stage(db, ["5"], version=2)
    assert held(db) == 3
    assert publish(db, [mine], [2]) == 2
    assert log(db) == ["1", "2"]
    assert held(db) == 1
    assert publish(db, [later], [1], version=2) == 1


def test_what_is_being_written_is_not_freed(db: Connection, connect: Connect) -> None:
    zombie = connect()
    with zombie.transaction():
        number = value(zombie, "select pgmb.claim_stage('main', 'app', 1)")
        copy(zombie, f"stage_{number}", ["1"])
        assert publish(db, [stage(db, ["1"])], [1]) == 1
    assert log(db) == ["1"]
    assert held(db) == 1
    # Its attempt is dead: the next commit frees it, or maintain().
    assert publish(db, [stage(db, ["2"], version=2)], [1], version=2) == 1
    assert held(db) == 0


def test_abandoning_frees(db: Connection) -> None:
    stage(db, ["1"])
    stage(db, ["1"], version=2)
    stage(db, ["1"], app="b", version=None)
    assert value(db, "select pgmb.abandon_tasks('main', 'app', 1)") == 1
    assert value(db, "select pgmb.abandon_tasks('main', 'b', null)") == 1
    assert held(db) == 1
    assert publish(db, [stage(db, ["1"])], [1]) == 1


def test_maintain_frees_what_is_left_for_long_and_drops_what_nobody_uses(
    db: Connection, connect: Connect
) -> None:
    stage(db, ["1"] * 1000)
    publish(db, [stage(db, ["1"], app="b", version=None)], [1], app="b", version=None)
    db.execute("select pgmb.maintain()")
    assert held(db) == 1
    db.execute("set pgmb.keep_stages = '0 s'")
    other = connect()
    with other.transaction():
        assert value(other, "select pgmb.claim_stage('main', 'c')") == 2
        db.execute("select pgmb.maintain()")
        assert value(db, "select array_agg(number order by number) from pgmb.stage") == [1, 2]
    assert held(db) == 1
    db.execute("select pgmb.maintain()")
    assert held(db) == 0
    db.execute("select pgmb.maintain()")
    assert value(db, "select count(*) from pgmb.stage") == 0
    assert value(db, "select count(*) from pg_class where relname like 'stage\\__'") == 0
    # Freed while its application still meant to publish it: loudly.
    assert stage(db, ["1"]) == 3
    with pytest.raises(psycopg.Error, match="stage 1 is not held by application 'app'") as lost:
        publish(db, [1], [1000])
    assert lost.value.sqlstate == "MB050"


def test_the_order_is_that_of_writing_whatever_the_rows_sizes(db: Connection) -> None:
    """Rows that do not fit leave gaps, into which later ones must not fall; big values are kept apart."""
    chance = random.Random(7)
    written: list[str] = []
    for version in range(3):
        sizes = [chance.choice([10, 300, 1500, 3900, 7000, 20000]) for _ in range(1500)]
        payloads = [f'"{version}-{row}-{"x" * size}"' for row, size in enumerate(sizes)]
        assert publish(db, [stage(db, payloads, version=version)], [len(payloads)], version=version) == len(
            payloads
        )
        written += payloads
    assert log(db) == written


def test_a_crash_of_the_server_empties_stages_and_nothing_is_published(fresh_server: FreshServer) -> None:
    from pgmb import schema

    server = fresh_server()
    schema.install(server.dsn())
    with psycopg.connect(server.dsn(), autocommit=True) as db:
        number = stage(db, ["1", "2"])
    server.kill()
    server.start_again()
    with psycopg.connect(server.dsn(), autocommit=True) as db:
        with pytest.raises(psycopg.Error, match="holds 0 of the 2 events written into it") as lost:
            publish(db, [number], [2])
        assert lost.value.sqlstate == "MB050"
        assert log(db) == []
        again = stage(db, ["1", "2"])
        assert publish(db, [again], [2]) == 2
        assert log(db) == ["1", "2"]
        assert held(db) == 0


def test_two_drivers_of_one_application_publish_once(db: Connection, connect: Connect) -> None:
    """One of them is thought dead, and is not."""
    zombie = connect()
    theirs, ours = stage(zombie, ["1"]), stage(db, ["1"])
    with zombie.transaction():
        assert publish(zombie, [theirs], [1]) == 1
        db.execute("set lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            publish(db, [ours], [1])
    assert publish(db, [ours], [1]) is None
    assert log(db) == ["1"]
    assert held(db) == 0


def test_what_is_due_later_waits(db: Connection) -> None:
    with db.transaction():
        number = value(db, "select pgmb.claim_stage('main', 'app', 1)")
        db.execute(
            f"insert into pgmb.stage_{number} (topic, payload, due_at) values ('t', '1', null),"
            " ('t', '2', now() + '1 hour'), ('t', '3', now() - interval '1 hour'), ('t', '4', 'infinity')"
        )
    statement = "select pgmb.publish_tasks('main', 'app', 1, '{0}', array[%s::int], '{4}', null, true)"
    assert value(db, statement, number) == 4
    assert log(db) == ["1", "3"]
    rows = db.execute("select payload::text, id is not null from pgmb.delayed order by due_at").fetchall()
    assert rows == [("2", True), ("4", True)]


# Tasks that publish directly.

RUN, NEXT_RUN = uuid4(), uuid4()


def begin(connection: Connection, run: UUID, version: int = 1, app: str = "app") -> Any:
    return value(connection, "select pgmb.begin_tasks('main', %s, %s, %s)", app, version, run)


def direct(connection: Connection, task: int, payloads: list[str], run: UUID = RUN, version: int = 1) -> bool:
    """What a task does that publishes on its own."""
    assert begin(connection, run, version) == "direct"
    with connection.transaction():
        mine: bool = value(
            connection, "select pgmb.claim_task('main', 'app', %s, %s, %s)", version, task, run
        )
        if mine:
            copy(connection, "log_main", payloads)
            connection.execute(
                "select pgmb.finish_task('main', 'app', %s, %s, %s, %s)",
                [version, task, len(payloads), sum(map(int, payloads))],
            )
        return mine


def test_a_task_publishes_directly_once(db: Connection) -> None:
    assert direct(db, 0, ["1", "2"])
    assert direct(db, 1, ["3"])
    assert not direct(db, 0, ["1", "2"])
    assert publish(db, [None, None, None], [2, 1, 0], digests=[3, 3, 0]) == 0
    assert log(db) == ["1", "2", "3"]
    assert begin(db, NEXT_RUN) == "published"
    assert value(db, "select count(*) from pgmb.ledger_task") == 0
    assert db.execute("select version, events from pgmb.ledger").fetchall() == [(1, 3)]


def test_the_second_attempt_of_a_task_waits_for_the_first(db: Connection, connect: Connect) -> None:
    first = connect()
    begin(db, RUN)
    claim = "select pgmb.claim_task('main', 'app', 1, 0, %s)"
    with first.transaction():
        assert value(first, claim, RUN)
        db.execute("set lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            value(db, claim, RUN)
        first.execute("select pgmb.finish_task('main', 'app', 1, 0, 0, 0)")
    assert value(db, claim, RUN) is False


def test_what_a_dead_run_left_undone_is_finished_through_stages(db: Connection) -> None:
    direct(db, 0, ["1", "2"])
    # The driver died. The next run cuts the version alike: its first task holds what was published.
    assert begin(db, NEXT_RUN) == "staged"
    assert value(db, "select pgmb.task_published('main', 'app', 1, 0)") is True
    assert value(db, "select pgmb.task_published('main', 'app', 1, 1)") is False
    assert publish(db, [None, stage(db, ["3"])], [2, 1], digests=[3, None]) == 1
    assert log(db) == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("stages", "events", "digests", "said"),
    [
        ([["3"]], [1], [None], "task 0 published 2 events, and now it came to be published with all others"),
        (
            [None, ["3"]],
            [1, 1],
            [1, None],
            "task 0 published 2 events, and now it holds 1; 1 task .* has 2 now",
        ),
        ([None, ["3"]], [2, 1], [4, None], "task 0 published 2 events, and now it holds 2 other ones"),
        ([], [], [], "task 0 published 2 events, and now there is none"),
    ],
)
def test_another_cut_is_refused_before_anything_is_published(
    db: Connection, stages: list[list[str] | None], events: list[int], digests: list[int | None], said: str
) -> None:
    direct(db, 0, ["1", "2"])
    assert begin(db, NEXT_RUN) == "staged"
    made = [None if payloads is None else stage(db, payloads) for payloads in stages]
    with pytest.raises(psycopg.Error, match=said) as refusal:
        publish(db, made, events, digests=digests)
    assert refusal.value.sqlstate == "MB051"
    assert log(db) == ["1", "2"]
    # Nor can it be left behind.
    with pytest.raises(
        psycopg.Error, match="version 1 of application 'app' was published in part"
    ) as refusal:
        begin(db, NEXT_RUN, version=2)
    assert refusal.value.sqlstate == "MB051"
    with pytest.raises(psycopg.Error, match="was published in part only: 2 events of 1 tasks"):
        publish(db, [stage(db, ["9"], version=2)], [1], version=2)


def test_only_one_run_publishes_directly_at_a_time(db: Connection, sessions: Sessions) -> None:
    zombie, driver = sessions.open("zombie", "driver")
    begin(db, RUN)
    zombie.run("begin")
    zombie.run("select pgmb.claim_task('main', 'app', 1, 0, %s)", [RUN])
    zombie.run("insert into pgmb.log_main (topic, payload) values ('t', '1')")
    beginning = driver.start("select pgmb.begin_tasks('main', 'app', 1, %s)", [NEXT_RUN]).blocked()
    zombie.run("select pgmb.finish_task('main', 'app', 1, 0, 1, 1)")
    zombie.run("commit")
    assert beginning.result() == [("staged",)]
    # What is left of the old run is turned away.
    with pytest.raises(psycopg.Error, match="another run of application 'app' has begun") as refusal:
        value(db, "select pgmb.claim_task('main', 'app', 1, 1, %s)", RUN)
    assert refusal.value.sqlstate == "MB051"
    assert publish(db, [None, stage(db, ["2"])], [1, 1], digests=[1, None]) == 1
    assert log(db) == ["1", "2"]


def test_a_task_that_says_it_published_and_did_not_is_found_out(db: Connection) -> None:
    begin(db, RUN)
    with pytest.raises(psycopg.Error, match="task 0 of application 'app' neither published its 2 events"):
        publish(db, [None], [2], digests=[3])


@pytest.fixture(autouse=True)
def no_endless_waits(db: Connection) -> None:
    db.execute("set statement_timeout = '60s'")


def test_hundreds_of_tasks_publish_together(db: Connection) -> None:
    """Each stage takes locks to the end of the transaction."""
    payload = f'"{"x" * 5000}"'
    made = [stage(db, [payload] * 3) for _ in range(500)]
    assert publish(db, [*made], [3] * 500) == 1500
    assert held(db) == 0
    again = stage(db, ["1"], version=2)
    assert again in made
    assert publish(db, [again], [1], version=2) == 1
    assert value(db, "select count(*) from pgmb.log_main") == 1501
    db.execute("select pgmb.clear_stages('0 s')")
    assert value(db, "select count(*) from pgmb.stage") == 400


def test_a_version_that_comes_again_with_other_events_is_refused(db: Connection) -> None:
    """As from a checkpoint that is one or more batches older."""
    for version in range(4):
        published = stage(db, ["1", "2"], version=version)
        assert publish(db, [published], [2], digests=[version * 10], version=version) == 2
    for version in range(4):
        # Cut into other tasks, it is still the same.
        same: list[int | None] = [version * 10 - 7, 7]
        assert publish(db, [None, None], [1, 1], digests=same, version=version) is None
        for events, digest in (([2], version * 10 + 1), ([3], version * 10 + 1), ([1], 5)):
            with pytest.raises(psycopg.Error, match="was published already") as refusal:
                publish(db, [None], events, digests=[digest], version=version)
            assert refusal.value.sqlstate == "MB051"
        # Without a digest the caller asks for no comparison.
        assert publish(db, [None], [9], version=version) is None
    assert log(db) == ["1", "2"] * 4


def test_digests_of_tasks_add_up_beyond_64_bits(db: Connection) -> None:
    top = 2**63 - 1
    assert publish(db, [stage(db, ["1"]), stage(db, ["2"])], [1, 1], digests=[top, top]) == 2
    assert publish(db, [None], [2], digests=[-2]) is None
    with pytest.raises(psycopg.Error, match="was published already with other events"):
        publish(db, [None], [2], digests=[2])


def test_the_versions_that_are_compared_are_bounded(db: Connection) -> None:
    for version in range(105):
        assert publish(db, [stage(db, ["1"], version=version)], [1], digests=[version], version=version) == 1
    assert value(db, "select count(*) from pgmb.ledger_version") == 100
    assert publish(db, [None], [1], digests=[5], version=5) is None
    with pytest.raises(psycopg.Error, match="version 104 was published already"):
        publish(db, [None], [1], digests=[4], version=4)
    # An application that ends leaves nothing.
    db.execute("select pgmb.abandon_tasks('main', 'app', null, true)")
    assert value(db, "select count(*) from pgmb.ledger_version") == 0
