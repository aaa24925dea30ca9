"""Durable readers: who holds back retention, who lost events."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC

from pgmb.doctor.finding import Check, Look, Verdict, ago, warn


def _readers(look: Look) -> Iterable[Verdict]:
    for row in look.rows:
        who = f"reader {row['reader']} of stream {row['stream']}"
        forget = f"select pgmb.forget({_literal(row['stream'])}, {_literal(row['reader'])});"
        if row["lost"]:
            yield warn(
                f"{who} has not read what retention dropped: it is refused where it goes on",
                f"Start it anew from the earliest position, or forget it: {forget}",
            )
        elif row["held_for"] is not None and row["held_for"] > look.limits.held_for:
            silent = ago(look.answered_at - row["confirmed_at"].astimezone(UTC))
            yield warn(
                f"{who} holds back retention for {ago(row['held_for'])}:"
                f" {_count(row['held_segments'], 'segment')}, {_count(row['waiting'], 'event')} to read;"
                f" it last confirmed {silent} ago",
                f"Start it, or forget it: {forget}",
            )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


CHECKS = (Check("readers", "none holds back retention", "select * from pgmb.reader_status", _readers),)
