"""The pytest plugin of pgmb: a database with pgmb installed for each test that asks for one.

Not inside the package, so that pytest does not import it, and the database driver with it, for tests that do
not use it.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator

    from pgmb import AsyncBroker, Broker
    from pgmb.testing import FrozenClock
    from pgmb.testing.databases import Databases

_NO_SERVER = (
    "pgmb's fixtures need a PostgreSQL server on which they may create databases."
    " Name one by --pgmb-dsn, by PGMB_TEST_DSN in the environment, or by pgmb_dsn in pytest's configuration;"
    " for example --pgmb-dsn postgresql://postgres@localhost/postgres"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "connection string of the server on which pgmb's fixtures create their databases"
    parser.getgroup("pgmb").addoption("--pgmb-dsn", metavar="DSN", help=f"{text} (or PGMB_TEST_DSN)")
    parser.addini("pgmb_dsn", text)


@pytest.fixture(scope="session")
def _pgmb_databases(pytestconfig: pytest.Config) -> Generator[Databases]:
    dsn = (
        pytestconfig.getoption("--pgmb-dsn")
        or os.environ.get("PGMB_TEST_DSN")
        or pytestconfig.getini("pgmb_dsn")
    )
    if not dsn:
        pytest.fail(_NO_SERVER, pytrace=False)
    from pgmb.testing.databases import Databases

    databases = Databases(str(dsn))
    yield databases
    databases.close()


@pytest.fixture
def pgmb_dsn(_pgmb_databases: Databases) -> Generator[str]:
    """A connection string to a fresh database with pgmb installed, dropped after the test."""
    import psycopg

    try:
        dsn = _pgmb_databases.create()
    except psycopg.OperationalError as error:
        pytest.fail(f"{str(error).strip()}\n{_NO_SERVER}", pytrace=False)
    except psycopg.errors.InsufficientPrivilege as error:
        pytest.fail(f"{str(error).strip()}: {_NO_SERVER}", pytrace=False)
    yield dsn
    _pgmb_databases.drop(dsn)


@pytest.fixture
def pgmb_broker(pgmb_dsn: str) -> Generator[Broker]:
    """A broker in a database of the test's own."""
    from pgmb import connect

    with connect(pgmb_dsn) as broker:
        yield broker


@pytest.fixture
def pgmb_clock(pgmb_dsn: str) -> Generator[FrozenClock]:
    """A clock that stands still in the test's database until `advance` is called."""
    from pgmb.testing import FrozenClock

    with FrozenClock(pgmb_dsn) as clock:
        yield clock


def _async_fixture() -> Callable[[Any], Any]:
    if importlib.util.find_spec("pytest_asyncio") is not None:
        import pytest_asyncio

        return pytest_asyncio.fixture
    # anyio takes plain ones.
    return pytest.fixture


@_async_fixture()
async def pgmb_abroker(pgmb_dsn: str) -> AsyncGenerator[AsyncBroker]:
    """An asynchronous broker in a database of the test's own. Needs pytest-asyncio or anyio."""
    from pgmb import aconnect

    async with await aconnect(pgmb_dsn) as broker:
        yield broker
