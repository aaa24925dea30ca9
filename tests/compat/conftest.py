"""PGMQ's functions twice: PGMQ itself, from the SQL inside its Python package, and ours over the log."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, cast

import psycopg
import pytest
from pgmq.install import get_embedded_install_sql

from harness.postgres import Server, create_database, drop_database
from pgmb import schema
from tests.compat.clients import CLASSES, Client

_NUMBERS = itertools.count(1)


@pytest.fixture(scope="session")
def systems(server: Server) -> Iterator[Callable[[str], str]]:
    """The connection string of a database with `pgmq` or with `pgmb` behind the same functions."""
    made: dict[str, str] = {}

    def system(name: str) -> str:
        if name not in made:
            made[name] = create_database(server)
            dsn = server.dsn(made[name], tcp=True)
            if name == "pgmq":
                with psycopg.connect(dsn, autocommit=True) as connection:
                    connection.execute(cast("Any", get_embedded_install_sql()))
            else:
                schema.install(dsn, compat=["pgmq"])
        return server.dsn(made[name], tcp=True)

    yield system
    for database in made.values():
        drop_database(server, database)


@pytest.fixture(params=["pgmq", "pgmb"])
def system(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def system_dsn(system: str, systems: Callable[[str], str]) -> str:
    return systems(system)


@pytest.fixture(scope="session")
def clients(systems: Callable[[str], str]) -> Iterator[Callable[[str, str], Client]]:
    with contextlib.ExitStack() as stack:
        made: dict[tuple[str, str], Client] = {}

        def client(system: str, kind: str) -> Client:
            if (system, kind) not in made:
                made[system, kind] = Client(kind, systems(system))
                stack.callback(made[system, kind].close)
            return made[system, kind]

        yield client


@pytest.fixture(params=list(CLASSES))
def client(request: pytest.FixtureRequest, system: str, clients: Callable[[str, str], Client]) -> Client:
    """Each of the package's clients on each system."""
    return clients(system, request.param)


@pytest.fixture(scope="session")
def connections(systems: Callable[[str], str]) -> Iterator[Callable[[str], psycopg.Connection[Any]]]:
    """One to each system, shared by all tests: a new session's first calls cost more than a test."""
    with contextlib.ExitStack() as stack:
        made: dict[str, psycopg.Connection[Any]] = {}

        def connection(system: str) -> psycopg.Connection[Any]:
            if system not in made:
                made[system] = stack.enter_context(psycopg.connect(systems(system), autocommit=True))
            return made[system]

        yield connection


@pytest.fixture
def sql(system: str, connections: Callable[[str], psycopg.Connection[Any]]) -> psycopg.Connection[Any]:
    return connections(system)


@pytest.fixture
def new_queue(sql: psycopg.Connection[Any]) -> Iterator[Callable[[], str]]:
    """Creates queues that are dropped after the test."""
    made: list[str] = []

    def create() -> str:
        made.append(f"queue_{next(_NUMBERS)}")
        sql.execute("select pgmq.create(%s)", (made[-1],))
        return made[-1]

    yield create
    for name in made:
        sql.execute("select pgmq.drop_queue(%s)", (name,))


@pytest.fixture
def queue(new_queue: Callable[[], str]) -> str:
    return new_queue()


@pytest.fixture
def ours(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection to a database with a queue `q` behind PGMQ's functions."""
    schema.install(dsn, compat=["pgmq"])
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("select pgmq.create('q')")
        yield connection
