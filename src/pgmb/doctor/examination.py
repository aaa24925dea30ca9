"""The examination: every check in turn. What to ask next is decided without I/O; two short drivers ask."""

from __future__ import annotations

from collections.abc import Generator
from datetime import UTC, datetime
from typing import Any, TypeAlias

import psycopg
from psycopg import AsyncConnection, Connection, errors
from psycopg.rows import dict_row

from pgmb import schema
from pgmb.doctor import connection, endpoints, installation, maintenance, queues, readers, security, server
from pgmb.doctor.finding import Check, Finding, Level, Limits, Look, Verdict, skip

CHECKS: tuple[Check, ...] = (
    *connection.CHECKS,
    *server.CHECKS,
    *installation.CHECKS,
    *maintenance.CHECKS,
    *queues.CHECKS,
    *endpoints.CHECKS,
    *readers.CHECKS,
    *security.CHECKS,
)

_SET_TIMEOUTS = "set local statement_timeout = '10s'; set local lock_timeout = '1s'"
_LIMITS = Limits()

_Answer: TypeAlias = "Look | psycopg.Error"
_Steps: TypeAlias = Generator[Check, _Answer, list[Finding]]


def examine(conn: Connection[Any], limits: Limits = _LIMITS) -> list[Finding]:
    """Run every check over a connection in autocommit mode."""
    steps = _steps()
    check = next(steps)
    while True:
        try:
            with conn.transaction(), conn.cursor(row_factory=dict_row) as cursor:
                conn.execute(_SET_TIMEOUTS)
                asked_at = datetime.now(UTC)
                rows = cursor.execute(check.query).fetchall()
                answer: _Answer = _look(rows, limits, conn.info, asked_at)
        except psycopg.Error as error:
            if conn.closed:
                raise
            answer = error
        try:
            check = steps.send(answer)
        except StopIteration as end:
            found: list[Finding] = end.value
            return found


async def aexamine(conn: AsyncConnection[Any], limits: Limits = _LIMITS) -> list[Finding]:
    """Run every check over a connection in autocommit mode."""
    steps = _steps()
    check = next(steps)
    while True:
        try:
            async with conn.transaction(), conn.cursor(row_factory=dict_row) as cursor:
                await conn.execute(_SET_TIMEOUTS)
                asked_at = datetime.now(UTC)
                rows = await (await cursor.execute(check.query)).fetchall()
                answer: _Answer = _look(rows, limits, conn.info, asked_at)
        except psycopg.Error as error:
            if conn.closed:
                raise
            answer = error
        try:
            check = steps.send(answer)
        except StopIteration as end:
            found: list[Finding] = end.value
            return found


def _look(
    rows: list[dict[str, Any]], limits: Limits, info: psycopg.ConnectionInfo, asked_at: datetime
) -> Look:
    return Look(rows, limits, info.backend_pid, info.host, asked_at, datetime.now(UTC))


def _steps() -> _Steps:
    findings: list[Finding] = []
    usable = True
    for check in CHECKS:
        if check.of_schema and not usable:
            continue
        answer = yield check
        verdicts = [_unanswered(answer)] if isinstance(answer, psycopg.Error) else check.judge(answer)
        found = [Finding(check.name, told.level, told.message, told.fix) for told in verdicts]
        findings += found or [Finding(check.name, Level.OK, check.fine)]
        usable = usable and not (
            check.gate and any(finding.level not in (Level.OK, Level.WARN) for finding in found)
        )
    return findings


def _unanswered(error: psycopg.Error) -> Verdict:
    reason = error.diag.message_primary or str(error).strip() or type(error).__name__
    if isinstance(error, errors.InsufficientPrivilege):
        return skip(
            f"may not look: {reason}",
            error.diag.message_hint or "Ask as the schema's owner, or grant pgmb_admin.",
        )
    if isinstance(error, errors.UndefinedFunction):
        return skip(
            f"functions are of another build of schema {schema.VERSION}: {reason}", "Run `pgmb install`."
        )
    return skip(f"could not look: {reason}", error.diag.message_hint)
