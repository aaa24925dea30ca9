"""A keyed retry makes no duplicates: producers are killed around their commit, and their successors retry."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from faults.queue import keyed


@pytest.mark.slow
def test_producers_killed_around_their_commit_retry_without_duplicates(dsn: str, tmp_path: Path) -> None:
    result = keyed.run(dsn, tmp_path, kills=15, seed=random.randrange(1 << 30))
    assert result.holds, str(result)
