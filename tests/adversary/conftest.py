"""pgmb with streams, queues and events of other roles, installed by a superuser and by a plain owner.

Each installation is made once per process. Every module attacks a copy, which must be unchanged afterwards.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from harness.databases import create_database, drop_database
from harness.server import Server
from tests.adversary.serving import Served, serving
from tests.adversary.target import INSTALLATIONS, Installations, Target


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A module's tests share a database, so one process runs them all."""
    for item in items:
        if item.path.parent.name == "adversary":
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture(scope="session")
def installations(server: Server, template: str) -> Iterator[Installations]:
    """Installed on demand. `template` has created the roles of pgmb, as an administrator would."""
    made = Installations(server)
    yield made
    made.drop()


@pytest.fixture(scope="module", params=INSTALLATIONS)
def target(request: pytest.FixtureRequest, installations: Installations) -> Iterator[Target]:
    """A copy of an installation for the attempts of one module, each of which must leave it as it was."""
    with installations.copy(request.param) as copied:
        before = copied.standing()
        yield copied
        assert copied.standing() == before
        assert copied.db.execute("select pgmb.ack(lease) from held").fetchall() == [(1,)], (
            "the lease of another consumer was lost"
        )


@pytest.fixture(scope="module")
def module_dsn(server: Server, template: str) -> Iterator[str]:
    """A database with pgmb that the tests of a module share."""
    name = create_database(server, template)
    yield server.dsn(name)
    drop_database(server, name)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(module_dsn: str) -> AsyncIterator[Served]:
    """An HTTP server that the tests of a module share."""
    async with serving(module_dsn) as made:
        yield made
