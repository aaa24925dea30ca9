"""Errors of ADBC's driver as the exceptions of `pgmb.errors`."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from adbc_driver_manager import Error

from pgmb.errors import BY_SQLSTATE, InvalidArgument, PgmbError

_NOT_JSON = "22P02"
_NOT_TEXT = "22021"
_MISSING = "23502"


@contextmanager
def refusals() -> Generator[None]:
    """Raise what the database refuses as our own, told apart by SQLSTATE."""
    try:
        yield
    except Error as error:
        ours = _ours(error)
        if ours is None:
            raise
        raise ours from error


def _ours(error: Error) -> PgmbError | None:
    said = {name: text.decode("utf-8", "replace") for name, text in _details(error)}
    message = said.get("PG_DIAG_MESSAGE_PRIMARY", str(error))
    place = said.get("PG_DIAG_CONTEXT", "").replace("\n", "; ")
    if error.sqlstate == _NOT_JSON:
        ours: PgmbError = InvalidArgument(f"{message}: {said.get('PG_DIAG_MESSAGE_DETAIL', '')} ({place})")
        ours.advise("A payload or headers of type STRING are JSON text, such as to_json makes.")
        return ours
    if error.sqlstate == _NOT_TEXT:
        return InvalidArgument(f"topics and keys cannot hold the character NUL: {message} ({place})")
    if error.sqlstate == _MISSING:
        return InvalidArgument(f"an event lacks what it needs: {message}")
    kind = BY_SQLSTATE.get(error.sqlstate or "")
    if kind is None:
        return None
    ours = kind(message)
    if hint := said.get("PG_DIAG_MESSAGE_HINT"):
        ours.advise(hint)
    return ours


def _details(error: Error) -> list[tuple[str, bytes]]:
    details: Any = error.details or []
    return [(name.decode() if isinstance(name, bytes) else name, text) for name, text in details]
