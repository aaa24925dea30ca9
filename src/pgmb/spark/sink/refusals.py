"""What the database refuses about rows, told in terms of columns."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from adbc_driver_manager import Error

from pgmb.errors import InvalidArgument
from pgmb.spark.connections import diagnosis

_NOT_JSON = "22P02"
_NOT_TEXT = "22021"
_SHOWN = 300


@contextmanager
def refusals() -> Generator[None]:
    """Raise errors of ADBC's driver that are about what was written as InvalidArgument."""
    try:
        yield
    except Error as error:
        said = diagnosis(error)
        message, place = said.get("MESSAGE_PRIMARY", str(error)), said.get("CONTEXT", "").replace("\n", "; ")
        if error.sqlstate == _NOT_JSON:
            detail = said.get("MESSAGE_DETAIL", "")
            ours = InvalidArgument(f"{message}: {detail} {place[:_SHOWN]}")
            ours.advise("A payload or headers of type STRING are JSON text, such as to_json makes.")
            raise ours from error
        if error.sqlstate == _NOT_TEXT:
            raise InvalidArgument(
                f"topics and keys cannot hold the character NUL: {message}; {place[:_SHOWN]}"
            ) from error
        raise
