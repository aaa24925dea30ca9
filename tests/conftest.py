"""Servers and databases for the tests. Every test finds its database as if it was new."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import psycopg
import pytest

from harness.databases import install as install_pgmb
from harness.postgres import Database, Databases, Server, available, create_database, drop_database
from harness.sessions import Sessions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Tests name their databases. One that names none must not find the developer's.
for _name in list(os.environ):
    if _name in ("PGMB_DSN", "PGMB_TEST_DSN", "DATABASE_URL") or re.match("PG(?!MB_)", _name):
        del os.environ[_name]

# Of several processes (`-n 2 --dist loadgroup`) one gets all of these: Spark is slow to start and large.
TESTS = Path(__file__).parent
SPARK = (TESTS / "spark", TESTS / "lake")
# Whatever has to do with a server rests on the first; the others ask for a database when they are called.
_POSTGRES = {"pg_major", "connect", "run"}
# What is tested here is Python's; what it asks of the database is tested on every major by tests/contract.
_ONE_IS_ENOUGH = {
    "app": 18,
    "cli": 15,
    "compat": 15,
    "concurrency/test_ordered_kills.py": 15,
    "contract/client": 15,
    "contract/outbox": 15,
    "contract/test_background_publisher.py": 15,
    "contract/test_background_publisher_faults.py": 15,
    "contract/test_clock_back.py": 15,
    "contract/test_dedup_kills.py": 15,
    "contract/test_pooler.py": 15,
    "contract/test_schedules.py": 15,
    "contract/test_workers.py": 15,
    "contract/test_workers_send.py": 15,
    "contract/test_workers_views.py": 15,
    "lake": 18,
    "readmes": 18,
    "server": 18,
    "spark": 18,
    "telemetry": 15,
    "testing": 18,
    "unit/test_harness.py": 18,
    "webhooks": 15,
}

# Results of these tests of the SQL depend on PostgreSQL itself: on its rights, catalogs, plans and costs,
# locks, snapshots, recovery or dumps. Results of the others depend on our functions alone.
_EVERY_MAJOR = tuple(
    TESTS / "contract" / f"test_{subject}.py"
    for subject in (
        *("access", "condition_attacks", "definers", "granting_at_once", "matching_privileges"),
        *("privileges", "publisher_attacks", "reader_attacks", "restricted_operations", "sink_rights"),
        *("table_events_rights", "trigger_attacks", "workers_rights"),
        *("catalog_rules", "claim_cost", "due_scans", "many_leases", "plpgsql", "receive_growth"),
        *("foreign_locks", "isolation_levels", "large_transactions", "maintenance_waits", "numbers"),
        *("conditions_installed", "crash", "pg_upgrade", "positions_durable", "standby"),
        "table_events_kinds",
    )
)


class Connect(Protocol):
    """Opens a connection that the test need not close: to the test's database unless told another."""

    def __call__(self, dsn: str | None = None, **options: Any) -> psycopg.Connection[Any]: ...


class FreshServer(Protocol):
    """Starts a server that belongs to the test alone, to be stopped, killed or reconfigured at will."""

    def __call__(
        self, major: int | None = None, *, settings: dict[str, Any] | None = None, name: str = "fresh"
    ) -> Server: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--pg",
        type=int,
        choices=(15, 18),
        default=int(os.environ.get("PGMB_PG", "18")),
        help="the PostgreSQL major version to test on (default: $PGMB_PG, or 18)",
    )
    parser.addoption(
        "--loop-only",
        action="store_true",
        help="receive by the loop alone, without the shorter ways of plain queues",
    )
    parser.addoption(
        "--split",
        action="store_true",
        help="leave what is the same on every major to one of them: a run of each makes the whole",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of which no test belongs to this major are not even imported: that takes seconds per process."""
    if not config.getoption("--split"):
        return None
    elsewhere = {_left_to(collection_path)} - {None, config.getoption("--pg")}
    return True if elsewhere else None


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--loop-only"):
        os.environ["PGMB_LOOP_ONLY"] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--loop-only"):
        without = [item for item in items if item.get_closest_marker("short_way")]
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if item not in without]
    for item in items:
        if _lies_in(item.path, SPARK):
            item.add_marker(pytest.mark.xdist_group("spark"))
            if not {"spark", "run"}.isdisjoint(getattr(item, "fixturenames", ())):
                # Its Python processes keep their connections: nobody could have the database after it.
                item.add_marker(pytest.mark.new_database)
    if not config.getoption("--split"):
        return

    kept = split(items, config.getoption("--pg"))
    if left_out := set(items).difference(kept):
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = kept


def split(items: list[pytest.Item], major: int) -> list[pytest.Item]:
    """The tests that this major runs with `--split`."""
    dealt = _dealt_to_the_other(items, major)
    return [item for item in items if item not in dealt and _belongs(item, major)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that skips itself under `--split`: the other major may not run it either."""
    report = yield
    # A test that is expected to fail, and does, is reported as skipped.
    expected = hasattr(report, "wasxfail")
    excused = expected or list(item.iter_markers("skipif"))
    if report.skipped and not excused and item.config.getoption("--split"):
        report.outcome = "failed"
        report.longrepr = (
            f"{report.longrepr}\nskipped, and the other major may not run it: mark it `once(major)`"
        )
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Thousands of tests and all modules stay to the end: the garbage collector need not look at them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def _dealt_to_the_other(items: list[pytest.Item], major: int) -> set[pytest.Item]:
    """What both majors run in turns, each case on one: cases of a test with parameters, slow tests, and tests
    of what our functions do (all but `_EVERY_MAJOR`).

    The parameter named first changes fastest: an attack runs on both majors, each with another installation.
    Tests are sorted by name, because the runs of the two majors shuffle them differently.
    """
    hands: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if _only_on(item) is not None:
            continue
        if item.get_closest_marker("slow") or item.get_closest_marker("crash"):
            hands.setdefault((TESTS, "slow"), []).append(item)
        elif item.name.endswith("]"):
            hands.setdefault((item.path, item.name.partition("[")[0]), []).append(item)
        elif _lies_in(item.path, (TESTS / "contract",)) and not _lies_in(item.path, _EVERY_MAJOR):
            hands.setdefault((item.path, ""), []).append(item)
    return {case for several in hands.values() for case in sorted(several, key=_first_last)[major == 18 :: 2]}


def _first_last(item: pytest.Item) -> tuple[str, str, str, str]:
    first, _, others = item.name.partition("[")[2].partition("-")
    return str(item.path), others, first, item.nodeid


def _belongs(item: pytest.Item, major: int) -> bool:
    return item.get_closest_marker("minutes") is None and _only_on(item) in (None, major)


def _only_on(item: pytest.Item) -> int | None:
    """The one major that is enough for a test: it lies where Python is tested, says so, or asks for none."""
    major = _left_to(item.path)
    if major is not None:
        return major
    once = item.get_closest_marker("once")
    if once is not None:
        return int(once.args[0]) if once.args else 18
    return None if not _POSTGRES.isdisjoint(getattr(item, "fixturenames", ())) else 18


# Asked for each of thousands of tests, and answered for each file.
@cache
def _left_to(path: Path) -> int | None:
    """The major that all tests of a file or folder are left to, if they are."""
    return next(
        (major for folder, major in _ONE_IS_ENOUGH.items() if _lies_in(path, (TESTS / folder,))), None
    )


@cache
def _lies_in(path: Path, folders: tuple[Path, ...]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def pytest_report_header(config: pytest.Config) -> str:
    return f"PostgreSQL {config.getoption('--pg')}"


@pytest.fixture(scope="session")
def pg_major(pytestconfig: pytest.Config) -> int:
    """The PostgreSQL major version under test."""
    major = int(pytestconfig.getoption("--pg") or 18)
    if major not in available():
        pytest.fail(f"PostgreSQL {major} is not installed here; run `make setup`")
    return major


@pytest.fixture(scope="session")
def server(pg_major: int) -> Iterator[Server]:
    """The server all tests of this run share. Leave its settings and its roles as they are."""
    # JIT costs catalog queries of the tests 0.1 s each. Functions of pgmb turn it off themselves.
    settings = {"max_wal_size": "256MB", "jit": "off"}
    with Server.start(pg_major, name="tests", settings=settings, memory=True) as started:
        yield started


@pytest.fixture(scope="session")
def template(server: Server) -> str:
    """The name of a database with pgmb installed, which `dsn` clones. Never connect to it."""
    name = create_database(server)
    install_pgmb(server.dsn(name))
    with server.connect(name) as connection:
        # Clones then start with settled visibility maps and statistics instead of each doing the work.
        connection.execute("vacuum analyze")
    with server.connect(name):
        # Vacuum removed the file of catalog caches that a first connection writes. Clones copy it.
        pass
    return name


@pytest.fixture(scope="session")
def databases(server: Server, template: str) -> Iterator[Databases]:
    """Copies of the template that tests use one after the other."""
    made = Databases(server, template)
    yield made
    made.close()


@pytest.fixture
def open_connections() -> Iterator[list[psycopg.Connection[Any]]]:
    """What `connect` opened, closed in reverse order at the end of the test, before its database is."""
    opened: list[psycopg.Connection[Any]] = []
    yield opened
    _close(opened)


@pytest.fixture
def database(
    request: pytest.FixtureRequest,
    server: Server,
    template: str,
    databases: Databases,
    open_connections: list[psycopg.Connection[Any]],
) -> Iterator[Database]:
    """The test's database with pgmb installed. Earlier tests may have left dead rows and idle sessions in it;
    mark a test that must not find any `new_database`."""
    if request.node.get_closest_marker("new_database"):
        made = Database(server, template)
        yield made
        made.drop()
    else:
        with databases.lend(str(request.path)) as lent:
            yield lent
            _close(open_connections)


def _close(connections: list[psycopg.Connection[Any]]) -> None:
    while connections:
        connections.pop().close()


@pytest.fixture
def dsn(database: Database) -> str:
    """A connection string to the test's database."""
    return database.dsn


@pytest.fixture
def empty_dsn(server: Server) -> Iterator[str]:
    """A connection string to a fresh database without pgmb."""
    name = create_database(server)
    yield server.dsn(name)
    drop_database(server, name)


@pytest.fixture
def connect(request: pytest.FixtureRequest, open_connections: list[psycopg.Connection[Any]]) -> Connect:
    """`connect()` opens an autocommit connection to the test's database, `connect(dsn, **options)` any."""

    def opener(dsn: str | None = None, **options: Any) -> psycopg.Connection[Any]:
        if dsn is None and not options:
            database: Database = request.getfixturevalue("database")
            return database.connect()
        target: str = request.getfixturevalue("dsn") if dsn is None else dsn
        connection: psycopg.Connection[Any] = psycopg.connect(target, **{"autocommit": True, **options})
        open_connections.append(connection)
        return connection

    return opener


@pytest.fixture
def db(database: Database) -> psycopg.Connection[Any]:
    """An autocommit connection to the test's database."""
    return database.connect()


@pytest.fixture(scope="module")
def module_db(server: Server, template: str) -> Iterator[psycopg.Connection[Any]]:
    """An autocommit connection to a database that a module's tests share: for many small cases, none of which
    leaves something that another one could see. To make a database costs more than most of them."""
    name = create_database(server, template)
    with psycopg.connect(server.dsn(name), autocommit=True) as connection:
        yield connection
    drop_database(server, name)


@pytest.fixture
def sessions(database: Database) -> Iterator[Sessions]:
    """Stepped sessions in the test's database."""
    with Sessions(database.dsn, database.connect) as opened:
        yield opened


@pytest.fixture(scope="session")
def prepared(pg_major: int) -> Iterator[Server]:
    """A cluster to copy."""
    with Server.prepare(pg_major, memory=True) as made:
        yield made


@pytest.fixture
def fresh_server(pg_major: int, prepared: Server) -> Iterator[FreshServer]:
    """`fresh_server(major=None, settings=..., name=...)` starts a server for this test alone."""
    started: list[Server] = []

    def starter(
        major: int | None = None, *, settings: dict[str, Any] | None = None, name: str = "fresh"
    ) -> Server:
        # No two servers that a test sees have the same system identifier.
        copy_of = None if started or major not in (None, pg_major) else prepared
        server = Server.start(major or pg_major, settings=settings, name=name, memory=True, copy_of=copy_of)
        started.append(server)
        return server

    yield starter
    for server in reversed(started):
        server.close()


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session on local[2] that all tests share. Stop the queries you start; leave its settings alone."""
    from harness.spark import session

    with session(tmp_path_factory.mktemp("spark")) as started:
        yield started


@pytest.fixture
def install() -> Callable[[str], None]:
    """Installs pgmb into the database a connection string names, for tests with databases of their own."""
    from pgmb import schema

    def installer(dsn: str) -> None:
        schema.install(dsn)

    return installer
