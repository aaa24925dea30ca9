from __future__ import annotations

from collections.abc import Generator

import pytest

import pgmb
from pgmb.testing import FrozenClock


@pytest.fixture
def broker(dsn: str) -> Generator[pgmb.Broker]:
    with pgmb.connect(dsn) as broker:
        yield broker


@pytest.fixture
def clock(dsn: str) -> Generator[FrozenClock]:
    with FrozenClock(dsn) as clock:
        yield clock
