"""The way to the server: pooler, clock, connections left."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from pgmb.doctor.finding import Check, Look, Verdict, ago, note, ok, warn


def _pooler(look: Look) -> Iterable[Verdict]:
    (row,) = look.rows
    if row["process"] != look.process:
        yield note(
            "behind a pooler: consumers poll, because LISTEN does not pass transaction pooling",
            "Give consumers a direct connection to be woken up instead. pgmb lake and pgmb erase need one.",
        )


def _clock(look: Look) -> Iterable[Verdict]:
    (row,) = look.rows
    uncertain = look.answered_at - look.asked_at
    skew = row["now"] - (look.asked_at + uncertain / 2)
    if abs(skew) > look.limits.skew + uncertain / 2:
        direction = "ahead of" if skew > timedelta(0) else "behind"
        yield warn(
            f"the server's clock is {ago(abs(skew))} {direction} this machine's",
            "Synchronise both by NTP; delays and times to seek to are read by the server's clock.",
        )


def _connections(look: Look) -> Iterable[Verdict]:
    (row,) = look.rows
    used, most = row["used"], row["most"]
    if used >= most * look.limits.connections:
        yield warn(
            f"{used} of {most} connections are in use",
            "Put a pooler such as PgBouncer in front, lower max_size of clients, or raise max_connections.",
        )
    else:
        yield ok(f"{used} of {most} in use")


CHECKS = (
    Check("pooler", "a direct connection", "select pg_backend_pid() process", _pooler, of_schema=False),
    Check("clock", "client and server agree", "select clock_timestamp() now", _clock, of_schema=False),
    Check(
        "connections",
        "enough",
        "select sum(numbackends)::int used, current_setting('max_connections')::int"
        " - current_setting('superuser_reserved_connections')::int most from pg_stat_database",
        _connections,
        of_schema=False,
    ),
)
