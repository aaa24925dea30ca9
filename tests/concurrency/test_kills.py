"""Promises: what was acknowledged outlives whoever is killed, and nothing takes effect twice.

Consumers commit their effects with their ack: each committed event takes effect exactly once, although it may
be delivered again. Producers know of each transaction that it committed, that it did not, or nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.worker import kills
from harness.postgres import create_database
from tests.conftest import FreshServer


@pytest.mark.slow
def test_consumers_killed_at_work(dsn: str, tmp_path: Path) -> None:
    result = kills.consumers(dsn, tmp_path, kills=8, events=800, seed=random.randrange(1 << 30))
    assert result.holds, str(result)


@pytest.mark.slow
def test_producers_killed_around_their_commit(dsn: str, tmp_path: Path) -> None:
    result = kills.producers(dsn, tmp_path, kills=8, seed=random.randrange(1 << 30))
    assert result.holds, str(result)


@pytest.mark.slow
@pytest.mark.crash
def test_server_killed(fresh_server: FreshServer, install: Callable[[str], None], tmp_path: Path) -> None:
    server = fresh_server()
    dsn = server.dsn(create_database(server))
    install(dsn)
    result = kills.crashes(server, dsn, tmp_path, backends=1, servers=1, seed=random.randrange(1 << 30))
    assert result.holds, str(result)
