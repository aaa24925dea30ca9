"""The fuzz of `python -m faults server-fuzz` in its least form."""

from __future__ import annotations

import random

from faults.server import fuzz


def test_malformed_requests_find_no_server_error_and_no_leak(dsn: str) -> None:
    result = fuzz.run(dsn, requests=600, seed=random.randrange(1 << 30))
    assert result.holds, str(result)
    assert result.answers.total() > 400
