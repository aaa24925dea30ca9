"""Errors as problem documents (RFC 9457), with codes of pgmb."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
import psycopg
from psycopg_pool import PoolTimeout
from starlette.responses import Response

from pgmb.errors import (
    ClusterChanged,
    ConditionsUnavailable,
    Conflict,
    ForeignPosition,
    HistoryGone,
    InvalidArgument,
    LeaseLost,
    NotFound,
    PermissionDenied,
    PgmbError,
    PositionLost,
    QueueFull,
    QueueHeld,
    SchemaVersionError,
    TimeoutRequired,
    WrongServer,
)

MEDIA_TYPE: Final = "application/problem+json"


class Problem(Exception):
    """An error response. Raise it anywhere below a route."""

    def __init__(
        self,
        status: int,
        code: str,
        title: str,
        *,
        detail: str | None = None,
        hint: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(title)
        self.status = status
        self.code = code
        self.title = title
        self.detail = detail
        self.hint = hint
        self.headers = dict(headers or {})

    def response(self) -> Response:
        given = {
            "type": "about:blank",
            "title": self.title,
            "status": self.status,
            "code": self.code,
            "detail": self.detail,
            "hint": self.hint,
        }
        document = {name: value for name, value in given.items() if value is not None}
        return Response(
            msgspec.json.encode(document), self.status, headers=self.headers, media_type=MEDIA_TYPE
        )


_ANSWERS: Final[list[tuple[type[BaseException], int, str]]] = [
    (NotFound, 404, "not_found"),
    (InvalidArgument, 422, "invalid_argument"),
    (Conflict, 409, "conflict"),
    (LeaseLost, 409, "lease_lost"),
    (HistoryGone, 410, "history_gone"),
    (PositionLost, 410, "position_lost"),
    (ForeignPosition, 410, "foreign_position"),
    (QueueFull, 429, "queue_full"),
    (QueueHeld, 503, "queue_held"),
    (PermissionDenied, 403, "database_role"),
    (ClusterChanged, 503, "cluster_changed"),
    (WrongServer, 503, "wrong_server"),
    (TimeoutRequired, 422, "timeout_required"),
    (ConditionsUnavailable, 422, "conditions_unavailable"),
    (SchemaVersionError, 503, "schema_version"),
    (PgmbError, 422, "refused"),
    (PoolTimeout, 503, "busy"),
    (psycopg.errors.QueryCanceled, 503, "took_too_long"),
    # Values that PostgreSQL refuses: a number out of range, a NUL in a text.
    (psycopg.errors.DataError, 422, "invalid_argument"),
    (psycopg.errors.IntegrityError, 422, "invalid_argument"),
    (psycopg.errors.ProgramLimitExceeded, 422, "invalid_argument"),
    (psycopg.errors.StatementTooComplex, 422, "invalid_argument"),
    # Conflicts with other transactions: the client may retry.
    (psycopg.errors.SerializationFailure, 503, "busy"),
    (psycopg.errors.DeadlockDetected, 503, "busy"),
    (psycopg.errors.LockNotAvailable, 503, "busy"),
    (psycopg.OperationalError, 503, "database_unavailable"),
]


def problem_of(error: BaseException) -> Problem | None:
    """The response to an error; None for unexpected errors."""
    if isinstance(error, Problem):
        return error
    for kind, status, code in _ANSWERS:
        if isinstance(error, kind):
            headers = {"Retry-After": "1"} if status in (429, 503) else {}
            # The server's own message may reveal internals: it goes to the log only.
            hidden = isinstance(error, psycopg.OperationalError | PoolTimeout)
            title = "the database does not answer" if hidden else _said(error)
            return Problem(status, code, title, hint=getattr(error, "hint", None), headers=headers)
    return None


def busy(title: str) -> Problem:
    return Problem(503, "busy", title, headers={"Retry-After": "5"})


def unauthorised() -> Problem:
    return Problem(
        401,
        "unauthorised",
        "missing or invalid API key",
        hint="Send `Authorization: Bearer KEY`; Create one with `pgmb keys create`.",
        headers={"WWW-Authenticate": 'Bearer realm="pgmb"'},
    )


def forbidden(verb: str, name: str | None = None) -> Problem:
    scope = verb if name is None else f"{verb}:{name}"
    return Problem(403, "forbidden", "the key does not allow this", detail=f"It needs the scope {scope}.")


def invalid(title: str, detail: str | None = None) -> Problem:
    return Problem(422, "invalid_argument", title, detail=detail)


def _said(error: BaseException) -> str:
    diagnosed: Any = getattr(error, "diag", None)
    return str(getattr(diagnosed, "message_primary", None) or error).partition("\n")[0]
