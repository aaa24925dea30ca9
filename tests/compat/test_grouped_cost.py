"""The cost of PGMQ's grouped reads does not grow with the backlog behind the first message of each group."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from harness.explain import Cost, cost

GROUPS = 7


def send(db: psycopg.Connection[Any], messages: int) -> None:
    """Messages of seven groups in turn."""
    db.execute(
        "select pgmq.send_batch('q', array_agg('1'::jsonb),"
        " array_agg(jsonb_build_object('x-pgmq-group', 'group ' || n %% %s)))"
        " from generate_series(1, %s) n",
        [GROUPS, messages],
    )


@pytest.mark.xfail(
    strict=True, reason="a grouped read looks at every message to find the first of each group"
)
def test_a_grouped_read_that_gives_nothing_costs_the_same_over_a_backlog(
    ours: psycopg.Connection[Any],
) -> None:
    """The first message of each group is hidden."""

    def cost_with(messages: int) -> Cost:
        send(ours, messages)
        ours.execute("select * from pgmq.read_grouped_head('q', 3600, %s)", [GROUPS])
        return cost(ours, "select * from pgmq.read_grouped_head('q', 60, 7)")

    before = cost_with(70)
    after = cost_with(1000)
    assert after.pages <= before.pages * 2, f"{before} before, {after} after"
