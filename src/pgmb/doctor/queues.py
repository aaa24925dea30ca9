"""Queues: paused, dead letters, backlog, expiring leases, silent workers."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from datetime import UTC

from pgmb.doctor.finding import Check, Look, Verdict, ago, fail, warn

_LEASE_NUMBERS = 1 << 40
"""How often a queue can be received from: the part of a claim's id that is not its generation."""

_START_DISPATCHER = "Start pgmb serve, or pgmb dispatcher."


def _paused(look: Look) -> Iterable[Verdict]:
    for row in look.rows:
        if row["paused_at"] is not None:
            since = ago(look.answered_at - row["paused_at"].astimezone(UTC))
            reason = f": {row['paused_reason']}" if row["paused_reason"] else ""
            yield warn(
                f"queue {row['queue']} is paused for {since}{reason}",
                f"pgmb queues resume {_word(row['queue'])}",
            )


def _dead(look: Look) -> Iterable[Verdict]:
    for row in look.rows:
        if row["dead"]:
            count = f"{row['dead']:,}" if row["dead"] < 10_000 else "10,000 or more"
            yield warn(
                f"queue {row['queue']} has {count} dead letter{'' if row['dead'] == 1 else 's'}",
                f"pgmb dlq list {_word(row['queue'])}; then dlq redrive or dlq drop.",
            )


def _backlog(look: Look) -> Iterable[Verdict]:
    for row in look.rows:
        waiting = row["waiting_for"]
        if waiting is None or waiting <= look.limits.waiting_for:
            continue
        behind = f"events of queue {row['queue']} wait for {ago(waiting)}"
        if row["paused_at"] is not None:
            continue
        idle = row["leases"] == 0 and row["received_per_second"] == 0
        if row["endpoint_state"] not in (None, "active"):
            yield warn(
                f"{behind}: endpoint {row['endpoint']} is {row['endpoint_state']}",
                f"pgmb endpoints attempts {_word(row['endpoint'])} shows what it answered;"
                f" pgmb endpoints resume {_word(row['endpoint'])} tries again at once.",
            )
        elif row["dispatched"] and idle:
            yield warn(f"{behind} and no dispatcher receives", _START_DISPATCHER)
        elif row["dispatched"]:
            yield warn(
                f"{behind}: its endpoints do not keep up",
                "pgmb endpoints list shows which: raise their --max-in-flight or --rps, or start another"
                " pgmb dispatcher.",
            )
        elif idle:
            yield warn(
                f"{behind} and nobody receives",
                "Start its consumers, or drop the queue: it holds back retention.",
            )
        else:
            yield warn(
                f"{behind}: its consumers do not keep up", "Start more consumers, or receive larger batches."
            )


def _leases(look: Look) -> Iterable[Verdict]:
    for row in look.rows:
        if row["expired"] >= look.limits.expired:
            yield warn(
                f"{row['expired']:,} events of queue {row['queue']} are tried again as their lease expired",
                "Consumers die or take longer than the lease: look at them, extend leases, or"
                f" pgmb queues alter {_word(row['queue'])} --lease-for 5m.",
            )
        elif row["lapsed_for"] is not None and row["lapsed_for"] > look.limits.waiting_for:
            yield warn(
                f"a lease of queue {row['queue']} expired {ago(row['lapsed_for'])} ago, nobody took it over",
                _START_DISPATCHER if row["dispatched"] else "Start its consumers: whoever held it is gone.",
            )


def _numbers(look: Look) -> Iterable[Verdict]:
    for row in look.rows:
        used = row["receives"] / _LEASE_NUMBERS
        if used > look.limits.lease_numbers:
            yield warn(
                f"queue {row['queue']} has used {used:.0%} of its lease numbers;"
                " without any it cannot be received from",
                "Create another queue with its settings from its position, move the consumers, and drop it.",
            )


def _workers(look: Look) -> Iterable[Verdict]:
    for row in look.rows:
        if not row["alive"]:
            silent = ago(look.answered_at - row["heartbeat_at"].astimezone(UTC))
            yield warn(
                f"worker {row['host']}:{row['pid']} of {', '.join(row['queues'])} is silent for {silent}",
                "It was killed, or cannot reach the database: look at its log. Its leases will expire.",
            )


def _declared(look: Look) -> Iterable[Verdict]:
    for row in look.rows:
        # The events of an unbound pattern are lost to the queue.
        say = fail if row["kind"] == "unbound" else warn
        yield say(f"queue {row['queue']}: {row['message']}", row["hint"])


def _word(name: str) -> str:
    return shlex.quote(name)


_STATUS = "select * from pgmb.queue_status"
_WORKERS = "select host, pid, queues, heartbeat_at, alive from pgmb.describe_workers()"
_DISAGREEMENTS = "select queue, kind, message, hint from pgmb.queue_disagreements()"
_HEALTH = "select * from pgmb.queue_status join pgmb.queue_health() using (queue)"

CHECKS = (
    Check("paused queues", "none", _STATUS, _paused),
    Check("dead letters", "none", _STATUS, _dead),
    Check("backlog", "no queue is far behind", _HEALTH, _backlog),
    Check("leases", "settled before they expire", _HEALTH, _leases),
    Check("lease numbers", "enough are left", "select * from pgmb.queue_activity()", _numbers),
    Check("workers", "none fell silent", _WORKERS, _workers),
    Check("declarations", "live workers agree about their queues", _DISAGREEMENTS, _declared),
)
