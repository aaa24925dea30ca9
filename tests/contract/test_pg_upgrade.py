"""Promise: pg_upgrade keeps the log. Queues, positions, Spark's offsets and ids of server-sent events go
on without a command; a restore from a dump is still told apart.

pg_upgrade gives the cluster another system identifier and keeps its files, transaction ids among them.
"""

from __future__ import annotations

import subprocess
from typing import Any

import psycopg
import pytest

from harness.account import server_account
from harness.installations import binaries
from harness.postgres import Server, create_database
from pgmb.server import sse
from pgmb.server.application import Application
from pgmb.server.sse.history import Tick
from pgmb.spark.options import ReadOptions
from pgmb.spark.source.offsets import Offset
from pgmb.spark.source.shards import Shards
from pgmb.types import Position
from tests.conftest import FreshServer
from tests.server.hosting import served
from tests.server.sse.client import EVENTS, Client, make_key

# Only Debian's build has pg_upgrade.
pytestmark = pytest.mark.once(15)

READ = "select payload from pgmb.between('main', %s::pgmb.position, pgmb.position())"


def value(db: psycopg.Connection[Any], statement: str, *parameters: Any) -> Any:
    ((only,),) = db.execute(statement, parameters).fetchall()
    return only


def publish(db: psycopg.Connection[Any], *numbers: int) -> None:
    for number in numbers:
        db.execute("select pgmb.publish('t', to_json(%s::int))", [number])


def upgraded(old: Server, new: Server) -> Server:
    """Runs pg_upgrade from one server to the other, an empty one, and starts that."""
    old.stop("fast")
    new.stop("fast")
    programs = binaries(old.major)
    done = server_account().run(
        [
            "env",
            f"--chdir={new.directory}",
            programs / "pg_upgrade",
            f"--old-bindir={programs}",
            f"--new-bindir={binaries(new.major)}",
            f"--old-datadir={old.data}",
            f"--new-datadir={new.data}",
            "--username=postgres",
            f"--socketdir={new.directory}",
            "--jobs=2",
        ]
    )
    assert done.returncode == 0, done.stdout + done.stderr
    new.start_again()
    return new


async def test_everything_goes_on_after_pg_upgrade(fresh_server: FreshServer, install: Any) -> None:
    old, new = fresh_server(name="old"), fresh_server(name="new")
    install(old.dsn())
    with old.connect() as db:
        db.execute("select pgmb.create_queue('q')")
        key = make_key(db, "read:main")
        publish(db, 1, 2)
        lease = value(db, "select distinct lease from pgmb.receive('q', 1)")
        saved = value(db, "select pgmb.position()::text")
        identifier = value(db, "select system_identifier from pg_control_system()")
    with Shards(ReadOptions.of({"url": old.dsn()}, streaming=True)) as shards:
        checkpoint = shards.at("latest").dump()
    position = Position.parse(saved)
    event_id = str(Tick(position.tick, None, position).token())

    upgraded(old, new)
    with new.connect() as db:
        assert value(db, "select system_identifier from pg_control_system()") != identifier
        publish(db, 3, 4)
        assert value(db, "select pgmb.tick()") is not None
        assert db.execute(READ, [saved]).fetchall() == [(3,), (4,)]
        assert value(db, "select pgmb.ack(%s)", lease) == 1
        # The batch that was begun before, and what came after it.
        received = [row for _ in range(2) for row in db.execute("select payload from pgmb.receive('q')")]
        assert received == [(2,), (3,), (4,)]
        assert value(db, "select same_cluster from pgmb.cluster_health()")
        db.execute("select pgmb.maintain()")
        recorded = value(
            db,
            "select i.system_identifier = c.system_identifier"
            " from pgmb.installation i, pg_control_system() c",
        )
        assert recorded
    with Shards(ReadOptions.of({"url": new.dsn()}, streaming=True)) as shards:
        known = shards.known(Offset.parse(checkpoint))
        ((home, mark),) = known.shards.items()
        assert shards[home].advance(mark, shards[home].frontier(), None, 1000, 1).numbers == 2
    async with (
        served(Application(new.dsn(), parts=[sse.routes])) as port,
        Client(port, EVENTS, key=key, last_event_id=event_id) as client,
    ):
        assert await client.numbers(2) == [3, 4]


def test_a_restored_dump_is_not_taken_for_an_upgrade(fresh_server: FreshServer, install: Any) -> None:
    old, new = fresh_server(name="old"), fresh_server(name="new")
    install(old.dsn())
    # The roles that the dump names, and as many transactions as there.
    with new.connect("template1") as db:
        install(new.dsn("template1"))
        db.execute("drop schema pgmb, pgmb_internal cascade")
    for form in ([], ["--inserts"]):
        restored = create_database(new)
        restore(old, new.dsn(restored), form)
        with new.connect(restored) as db:
            with pytest.raises(psycopg.Error) as caught:
                db.execute("select pgmb.position()")
            assert caught.value.sqlstate == "MB021"
            assert not value(db, "select same_cluster from pgmb.cluster_health()")
            db.execute("select pgmb.rebase()")
            db.execute("select pgmb.position()")
            assert value(db, "select same_cluster from pgmb.cluster_health()")


def restore(server: Server, into: str, form: list[str]) -> None:
    """A dump of pgmb on one server, restored into a database of another."""
    programs = binaries(server.major)
    dump = subprocess.run(
        [programs / "pg_dump", *form, "-n", "pgmb", "-n", "pgmb_internal", "-d", server.dsn()],
        check=True,
        capture_output=True,
    ).stdout
    subprocess.run(
        [programs / "psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", into],
        input=dump,
        check=True,
        capture_output=True,
    )
