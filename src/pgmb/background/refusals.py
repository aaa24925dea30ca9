"""What an error says about the events that were refused: wait, ask, or give up. No I/O."""

from __future__ import annotations

import psycopg
import psycopg_pool

from pgmb.errors import PermissionDenied, QueueFull, StreamNotFound, WrongServer

# The server's state or the connection's, not the event's: SQLSTATE classes of connection, transaction state,
# rollback, resources, object in use, intervention and system errors.
_PASSING = ("08", "25", "40", "53", "55", "57", "58")
_CONNECTION = ("08", "57")
_CANCELED = "57014"


def passes(error: Exception) -> bool:
    """Whether the same events may well be accepted later, with nothing changed about them."""
    if isinstance(error, QueueFull | WrongServer | psycopg_pool.PoolTimeout | psycopg_pool.TooManyRequests):
        return True
    if not isinstance(error, psycopg.Error):
        return isinstance(error, OSError)
    if error.sqlstate is None:
        # Said by the driver. Of the connection, or of a value that cannot be sent.
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return error.sqlstate.startswith(_PASSING)


def may_have_committed(error: Exception) -> bool:
    """Whether the connection was lost at a moment when the commit may have happened."""
    if isinstance(error, psycopg_pool.PoolTimeout | psycopg_pool.TooManyRequests):
        return False
    if not isinstance(error, psycopg.Error):
        return isinstance(error, OSError)
    state = error.sqlstate
    return state is None or (state.startswith(_CONNECTION) and state != _CANCELED)


def concerns_all(error: Exception) -> bool:
    """Whether it is about the stream, not about one event or another."""
    return isinstance(error, StreamNotFound | PermissionDenied)


def canceled(error: Exception) -> bool:
    """Whether the statement was stopped, most likely by a statement_timeout."""
    return isinstance(error, psycopg.Error) and error.sqlstate == _CANCELED
