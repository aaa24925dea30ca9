"""The program that checks figures sees wrong ones, and finds none."""

from __future__ import annotations

from typing import Any

import psycopg

from faults.operations import numbers
from harness.states import queue_names


def test_a_figure_that_is_wrong_is_found(dsn: str, db: psycopg.Connection[Any]) -> None:
    queues = numbers.prepare(db)
    db.execute("select pgmb.publish(t, '{\"n\": 900, \"kind\": 1}', key => 'k') from unnest(%s::text[]) t",
        [["order.paid", "mail.sent", "audit"]])  # fmt: skip
    for name in queue_names(db):
        if name.endswith("-paused"):
            db.execute("select pgmb.pause(%s)", [name])
    right, wrong = numbers.Tally(), numbers.Tally()
    numbers.check_sql(dsn, queues, right)
    assert (right.figures > 300, right.wrong) == (True, [])
    # An event that the ledger knows as given and the broker does not.
    db.execute(
        "insert into ledger.event (queue, seq, state)"
        " select 'plain-idle', min(seq), 'dead' from pgmb.log_main"
    )
    numbers.check_sql(dsn, queues, wrong)
    assert [line.split(":")[0] for line in wrong.wrong] == [
        "status plain-idle waiting",
        "status plain-idle dead",
    ]
    assert str(wrong).endswith(f"numbers: {wrong.figures} figures, 2 wrong")
