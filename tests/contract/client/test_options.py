"""Connections of a broker: no option of the user's changes what its own statements do."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import IsolationLevel, sql
from psycopg.adapt import AdaptersMap, Loader
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import dict_row

import pgmb
from harness.postgres import Server, create_database, drop_database
from pgmb import schema
from pgmb._core import pending

PACKAGE = Path(pgmb.__file__).parent


class _Shouting(Loader):
    def load(self, data: Any) -> str:
        return bytes(data).decode().upper()


class _Context:
    """psycopg's AdaptContext, with a loader that no statement of pgmb's could live with."""

    connection = None

    def __init__(self) -> None:
        self.adapters = AdaptersMap(psycopg.adapters)
        for name in ("text", "int4", "int8", "uuid", "json", "jsonb", "timestamptz", "bool"):
            self.adapters.register_loader(name, _Shouting)


KEYWORDS: dict[str, dict[str, Any]] = {
    "autocommit": {"autocommit": False},
    "row factory": {"row_factory": dict_row},
    "cursor factory": {"cursor_factory": psycopg.ClientCursor},
    "encoding": {"client_encoding": "latin1"},
    "context": {"context": _Context()},
}
SESSIONS = {
    "isolation": "-c default_transaction_isolation=serializable",
    "formats": "-c datestyle=german -c intervalstyle=sql_standard",
    "encoding": "-c client_encoding=latin1",
}


def _publish_and_settle(broker: pgmb.Broker, db: psycopg.Connection[Any]) -> None:
    broker.create_queue("q", lease_for=90)
    given = broker.publish("a", "é")
    assert broker.publish_many("a", [2, 3]) == 2
    assert db.execute("select count(*) from pgmb.log_main").fetchone() == (3,), "committed"
    lease = broker.receive("q")
    assert [event.payload for event in lease] == ["é", 2, 3]
    assert lease.events[0].id == given
    lease.retry(lease.events[2], after=0)
    assert lease.ack() == 2
    assert [event.payload for event in broker.receive("q")] == [3]
    assert broker.queue_status()[0].queue == "q"


@pytest.mark.parametrize("options", KEYWORDS.values(), ids=KEYWORDS)
def test_no_keyword_changes_what_a_broker_commits_or_reads(
    dsn: str, db: psycopg.Connection[Any], options: dict[str, Any]
) -> None:
    with pgmb.connect(dsn, **options) as broker:
        _publish_and_settle(broker, db)


@pytest.mark.parametrize("options", SESSIONS.values(), ids=SESSIONS)
def test_no_setting_of_a_session_changes_what_a_broker_commits_or_reads(
    dsn: str, db: psycopg.Connection[Any], options: str
) -> None:
    with pgmb.connect(make_conninfo(dsn, options=options)) as broker:
        _publish_and_settle(broker, db)


async def test_no_keyword_changes_what_an_asynchronous_broker_commits(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    async with await pgmb.aconnect(dsn, autocommit=False, row_factory=dict_row) as broker:
        await broker.create_queue("q")
        await broker.publish("a", 1)
        assert db.execute("select count(*) from pgmb.log_main").fetchone() == (1,)
        lease = await broker.receive("q")
        assert await lease.ack() == 1
        assert not await broker.receive("q")
        async with broker.connection() as conn:
            assert not conn.autocommit
            assert await (await conn.execute("select 1 as one")).fetchone() == {"one": 1}


async def test_a_worker_handles_whatever_the_app_passes_to_psycopg(dsn: str) -> None:
    app = pgmb.App(dsn, autocommit=False, row_factory=dict_row)
    handled: list[int] = []

    @app.on("a", queue="q")
    async def handle(payload: int) -> None:
        handled.append(payload)

    await app.apublish("a", 1)
    assert await app.ahandle("q") == 1
    assert handled == [1]
    await app.aclose()


def test_a_lent_connection_is_as_its_user_chose(dsn: str) -> None:
    options: dict[str, Any] = {"autocommit": False, "row_factory": dict_row, "context": _Context()}
    with pgmb.connect(
        make_conninfo(dsn, options="-c default_transaction_isolation=serializable"), max_size=1, **options
    ) as broker:
        for _ in range(2):
            with broker.connection() as conn:
                assert not conn.autocommit
                assert conn.isolation_level == IsolationLevel.SERIALIZABLE
                assert conn.execute("select 'x'::text as one").fetchone() == {"one": "X"}
            assert broker.publish_many("a", [1]) == 1


def test_what_a_user_changes_on_a_lent_connection_ends_with_the_loan(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    with pgmb.connect(dsn, max_size=1) as broker:
        with broker.connection() as conn:
            conn.autocommit = False
            conn.row_factory = dict_row
            conn.read_only = True
            conn.isolation_level = IsolationLevel.REPEATABLE_READ
            conn.execute("set datestyle = 'german'")
            conn.commit()
        _publish_and_settle(broker, db)
        with broker.connection() as conn:
            assert conn.autocommit
            assert conn.execute("show datestyle").fetchone() == ("ISO, DMY",)


def test_two_installations_count_alike_and_share_nothing(
    server: Server, template: str, empty_dsn: str
) -> None:
    """Queues and segments have the same numbers in both. The second one also takes the first one's name."""
    schema.install(empty_dsn)
    with pgmb.connect(empty_dsn) as there:
        there.create_stream("other")
        there.create_queue("q", stream="other")
        there.publish("a", 1, stream="other")
    name, other = create_database(server, template), str(conninfo_to_dict(empty_dsn)["dbname"])
    with pgmb.connect(server.dsn(name), max_size=1) as broker:
        broker.create_queue("q")
        broker.publish("a", 1)
        broker.receive("q").ack()
        with psycopg.connect(empty_dsn) as conn:
            given = broker.publish("a", 2, stream="other", conn=conn)
            conn.commit()
            lease = broker.receive("q", conn=conn)
            assert [(event.stream, event.payload) for event in lease] == [("other", 1), ("other", 2)]
            assert lease.events[1].id == given
            lease.ack(conn=conn)
        conn.close()
        drop_database(server, name)
        rename = sql.SQL("alter database {} rename to {}").format(sql.Identifier(other), sql.Identifier(name))
        server.admin().execute(rename)
        given = broker.publish("a", 3, stream="other")
        (event,) = broker.receive("q")
        assert (event.id, event.stream, event.payload) == (given, "other", 3)
    drop_database(server, name)


def test_seeding_random_repeats_no_id_and_no_lease(dsn: str) -> None:
    def run() -> list[Any]:
        random.seed(1)
        with pgmb.connect(dsn) as broker, broker.publisher() as publisher:
            return [publisher.enqueue("a", n) for n in range(3)]

    ids = [*run(), *run()]
    with pgmb.connect(dsn) as broker:
        broker.create_queue("q", starting=broker.earliest())
        assert [event.id for event in broker.receive("q")] == ids
    random.seed(1)
    first = pending.fresh_id()
    random.seed(1)
    assert pending.fresh_id().int & (1 << 62) - 1 != first.int & (1 << 62) - 1


def test_one_module_draws_random_numbers() -> None:
    """The global generator belongs to the program, which may seed it, and is copied by a fork."""
    imports = re.compile(r"^\s*(import random|from random import)\b", re.MULTILINE)
    users = {
        str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if imports.search(path.read_text())
    }
    assert users == {"_core/chance.py"}
