"""Promise: a position that was returned holds after a crash; one that was lost with its server is refused.

Transaction ids that were not yet written to disk are given again after a crash or a failover. A reader that
went on from a snapshot of the lost ones would take new events for events it has read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
import psycopg
import pytest

import pgmb
from harness.server import Server
from pgmb.errors import PositionLost
from pgmb.server import sse
from pgmb.server.application import Application
from pgmb.server.sse.history import Tick
from pgmb.spark.source.offsets import ShardOffset
from pgmb.spark.source.shards import ShardLog
from pgmb.types import Position
from tests.conftest import FreshServer
from tests.server.hosting import served
from tests.server.sse.client import EVENTS, Client, make_key

READ = "select payload from pgmb.between('main', %s::pgmb.position, pgmb.position())"


def value(db: psycopg.Connection[Any], statement: str, *parameters: Any) -> Any:
    ((only,),) = db.execute(statement, parameters).fetchall()
    return only


def publish(db: psycopg.Connection[Any], *numbers: int) -> None:
    for number in numbers:
        db.execute("select pgmb.publish('t', to_json(%s::int))", [number])


@pytest.mark.parametrize("commit", ["on", "off"])
def test_a_position_holds_after_a_crash(fresh_server: FreshServer, install: Any, commit: str) -> None:
    server = fresh_server(name="crashing", settings={"wal_writer_delay": "10s", "synchronous_commit": commit})
    install(server.dsn())
    server.admin().execute("checkpoint")
    for crash in range(3):
        numbers = range(crash * 100, crash * 100 + 60)
        with server.connect() as db:
            publish(db, -1)
            # Ids that leave no trace on disk: they are given again after the crash.
            for _ in range(40):
                db.execute("select pg_current_xact_id()")
            position = value(db, "select pgmb.position()::text")
            server.kill()
        server.start_again()
        with server.connect() as db:
            db.execute("set synchronous_commit = on")
            publish(db, *numbers)
            assert [payload for (payload,) in db.execute(READ, [position])] == list(numbers)


@pytest.fixture
def lost(fresh_server: FreshServer, install: Any) -> Iterator[tuple[Server, str, str]]:
    """A server that took over from one whose last transactions it never got: the new primary, a position
    that both know, and one that only the lost one gave."""
    primary = fresh_server(name="primary")
    install(primary.dsn())
    with primary.connect() as db:
        db.execute("select pgmb.create_queue('q')")
        publish(db, 0)
        db.execute("select pgmb.tick()")
    with primary.standby() as standby:
        with primary.connect() as db:
            kept = value(db, "select pgmb.position()::text")
            standby.wait_for_replay(primary)
            standby.stop("immediate")
            publish(db, *range(1, 41))
            gone = value(db, "select pgmb.position()::text")
        primary.kill()
        standby.start_again()
        standby.promote()
        yield standby, kept, gone


def test_readers_refuse_a_position_that_a_failover_lost(lost: tuple[Server, str, str]) -> None:
    new, kept, gone = lost
    numbers = list(range(100, 220))
    with new.connect() as db:
        publish(db, *numbers)
        assert [payload for (payload,) in db.execute(READ, [kept])] == numbers
        for statement in (
            "select * from pgmb.between('main', %s, pgmb.position())",
            "select * from pgmb.between('main', pgmb.earliest(), %s)",
            "select pgmb.seek('q', %s)",
            "select pgmb.confirm('main', 'reader', %s)",
            "select pgmb.create_queue('r', starting => %s)",
        ):
            with pytest.raises(psycopg.Error) as caught:
                db.execute(statement.replace("%s", "%s::pgmb.position"), [gone])
            assert caught.value.sqlstate == "MB023", statement
    with pgmb.connect(new.dsn()) as broker:
        for follow in (False, True):
            with pytest.raises(PositionLost):
                list(broker.tail(after=gone, follow=follow, max_wait=1))
        assert [event.payload for event in broker.tail(after=kept, follow=False)] == numbers


def test_a_tail_from_a_lost_position_fails_before_the_new_history_catches_up(
    lost: tuple[Server, str, str],
) -> None:
    """The lost server was ahead of the new one: nothing there looks newer for a while."""
    new, _, gone = lost
    with pgmb.connect(new.dsn()) as broker:
        broker.publish("t", 1)
        with pytest.raises(PositionLost):
            list(broker.tail(after=gone, max_wait=1))


# A history of the same length gave a tick with a lower, a higher or the same number.
LOST_TICKS = [(-1, 0), (1, 0), (0, 1)]


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize(("tick", "proof"), LOST_TICKS)
def test_a_tail_from_a_lost_position_fails_where_the_new_history_is_as_long(
    dsn: str, db: psycopg.Connection[Any], tick: int, proof: int, *, follow: bool
) -> None:
    publish(db, 1)
    newest = Position.parse(value(db, "select pgmb.position()::text"))
    lost = msgspec.structs.replace(newest, tick=newest.tick + tick, proof=newest.proof ^ proof)
    with pgmb.connect(dsn) as broker, pytest.raises(PositionLost):
        list(broker.tail(after=lost, follow=follow, max_wait=1))


@pytest.mark.parametrize(("tick", "proof"), LOST_TICKS)
async def test_server_sent_events_reset_where_the_new_history_is_as_long(
    dsn: str, db: psycopg.Connection[Any], tick: int, proof: int
) -> None:
    """A failover behind the back of a server that goes on."""
    key = make_key(db, "read:main")
    async with served(Application(dsn, parts=[sse.routes])) as port, Client(port, EVENTS, key=key) as client:
        await client.until(lambda: client.last_id != "")
        publish(db, 1)
        db.execute("select pgmb.tick()")
        await client.numbers(1)
        # Again, if the server came to this tick only after it was replaced.
        async with asyncio.timeout(60):
            while client.got[-1].event != "reset":
                # The server ticks too, and may stand at an earlier tick of the same events.
                db.execute("delete from pgmb.tick where id < (select max(id) from pgmb.tick)")
                db.execute(
                    "update pgmb.tick t set id = t.id + %(tick)s, position.tick = t.id + %(tick)s,"
                    " position.proof = (t.position).proof # %(proof)s"
                    " where t.id = (select max(id) from pgmb.tick)",
                    {"tick": tick, "proof": proof},
                )
                db.execute("notify pgmb, 'main'")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(5):
                        await client.until(lambda: client.got[-1].event == "reset")
        assert client.got[-1].json == {"reason": "lost"}


async def test_server_sent_events_and_spark_refuse_a_position_that_a_failover_lost(
    lost: tuple[Server, str, str],
) -> None:
    new, kept, gone = lost
    ids = {
        name: str(Tick(position.tick, None, position).token())
        for name, position in (("kept", Position.parse(kept)), ("gone", Position.parse(gone)))
    }
    numbers = list(range(100, 220))
    with new.connect() as db:
        key = make_key(db, "read:main")
        publish(db, *numbers)
    async with served(Application(new.dsn(), parts=[sse.routes])) as port:
        async with Client(port, EVENTS, key=key, last_event_id=ids["gone"]) as client:
            await client.until(lambda: bool(client.got))
            assert client.got[0].event == "reset"
        async with Client(port, EVENTS, key=key, last_event_id=ids["kept"]) as client:
            assert await client.numbers(len(numbers)) == numbers

    log = ShardLog(new.dsn(), "main")
    with pytest.raises(PositionLost) as refused:
        log.advance(ShardOffset(gone), log.frontier(), None, 1000, 1)
    assert "new checkpoint" in "".join(refused.value.__notes__)
    assert log.advance(ShardOffset(kept), log.frontier(), None, 1000, 1).numbers >= len(numbers)
    log.close()
