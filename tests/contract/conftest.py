from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from harness.server import Server
from tests.conftest import Connect
from tests.contract.cast import Cast


@pytest.fixture
def cast(server: Server, db: psycopg.Connection[Any], connect: Connect) -> Iterator[Cast]:
    made = Cast(server, db.info.dbname, connect)
    yield made
    made.leave(db)
