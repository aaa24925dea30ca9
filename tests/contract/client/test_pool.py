"""The pool of connections of a broker."""

from __future__ import annotations

import pgmb


def test_the_connection_used_last_is_used_next(dsn: str) -> None:
    with pgmb.connect(dsn, min_size=3) as broker:
        with broker.connection() as first, broker.connection() as second, broker.connection() as third:
            backends = {one.info.backend_pid for one in (first, second, third)}
        assert len(backends) == 3
        used = set()
        for _ in range(6):
            with broker.connection() as conn:
                used.add(conn.info.backend_pid)
    assert len(used) == 1
