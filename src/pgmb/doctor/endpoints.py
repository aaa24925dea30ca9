"""Endpoints: throttled, tripped, disabled, without anybody who delivers."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from pgmb.doctor.finding import Check, Look, Verdict, warn


def _failing(look: Look) -> Iterable[Verdict]:
    for row in look.rows:
        name = shlex.quote(row["name"])
        reason = f": {row['reason']}" if row["reason"] else ""
        if row["state"] == "tripped":
            yield warn(
                f"endpoint {row['name']} is tripped{reason}",
                f"pgmb endpoints attempts {name} shows what it answered; it is tried again by itself.",
            )
        elif row["state"] == "throttled":
            yield warn(
                f"endpoint {row['name']} is throttled{reason}",
                f"It is tested again by itself; pgmb endpoints resume {name} tries at once.",
            )
        elif row["state"] == "disabled":
            yield warn(
                f"endpoint {row['name']} is disabled{reason}", f"pgmb endpoints resume {name}, or drop it."
            )


def _delivered(look: Look) -> Iterable[Verdict]:
    for row in look.rows:
        if row["endpoints"] and not row["dispatchers"]:
            yield warn(
                f"there are {row['endpoints']:,} endpoints and no dispatcher runs",
                "Start pgmb serve, or pgmb dispatcher.",
            )


_STATES = """
select name, state, reason from pgmb.endpoints
where state in ('tripped', 'disabled')
  -- Shorter waits are how receivers limit their rate.
  or state = 'throttled' and probe_at > statement_timestamp() + interval '1 minute'
order by name"""
_DISPATCHERS = """
select (select count(*) from pgmb.endpoints where state <> 'disabled') endpoints,
  (select count(*) from pgmb.dispatcher
    where heartbeat_at > statement_timestamp() - interval '1 minute') dispatchers"""

CHECKS = (
    Check("endpoints", "none is throttled for long, tripped or disabled", _STATES, _failing),
    Check("dispatchers", "one runs where there are endpoints", _DISPATCHERS, _delivered),
)
