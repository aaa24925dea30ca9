"""The exception tree. Errors from the database are told apart by SQLSTATE, never by text.

PgmbError
├── NotFound
│   ├── StreamNotFound          MB001
│   ├── QueueNotFound           MB002
│   ├── ScheduleNotFound        MB008
│   ├── EndpointNotFound        MB060
│   ├── LakeNotFound            MB061
│   └── ProjectionNotFound      MB066
├── InvalidArgument             MB003 name, MB005 arrays, MB007 pattern, MB009 filter, MB010 condition,
│                               23514 a topic, key or setting, 23502 null in place of one
├── Conflict                    MB004 stream in use, MB006 queue differs
├── LeaseLost                   MB011
├── HistoryGone                 MB012
├── QueueHeld                   MB013
├── WrongServer
│   ├── StandbyError            MB020
│   ├── ClusterChanged          MB021
│   └── ReaderBehind            MB022
├── PositionLost                MB023
├── ForeignPosition             MB026
├── TimeoutRequired             MB024
├── ConditionsUnavailable       MB025
├── IsolationLevelError         MB029
├── SubscriptionPaused          of a feed
├── QueueFull                   MB040
├── TooManyStages               MB043
├── StageLost                   MB050
├── TasksDiffer                 MB051
├── VerificationFailed          MB062
├── NotSealed                   MB063
├── ForeignTable                of a lake
├── MissingExtra
├── RequestFailed               of `App.request`
├── NoAnswer                    of `App.request`, also a TimeoutError
├── BrokerClosed                also psycopg_pool's PoolClosed
├── NoConnection                no connection was free for `max_wait`; also psycopg_pool's PoolTimeout
├── PublishFailed               of a background publisher
├── PublisherFull
├── PublisherClosed
├── AddressRefused              of an endpoint
├── SecretKeyMissing
├── SecretUnreadable
├── PermissionDenied            42501, MB042 in a restricted operation
└── SchemaVersionError          MB030
"""

from __future__ import annotations

from contextlib import contextmanager
from errno import EACCES
from typing import TYPE_CHECKING, NamedTuple

import psycopg
import psycopg_pool

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from pgmb.types import NewEvent


class PgmbError(Exception):
    """Anything that pgmb itself refuses. `hint` says what to do about it, and tracebacks show it."""

    hint: str | None = None

    def advise(self, hint: str) -> None:
        """Set the hint."""
        self.hint = hint
        self.add_note(f"Hint: {hint}")


class NotFound(PgmbError):
    """What was named does not exist."""


class StreamNotFound(NotFound):
    """There is no stream of that name."""


class QueueNotFound(NotFound):
    """There is no queue of that name."""


class ScheduleNotFound(NotFound):
    """There is no schedule of that name."""


class EndpointNotFound(NotFound):
    """There is no endpoint of that name."""


class LakeNotFound(NotFound):
    """The stream has no lake, or only that of the database which this one is a copy of."""


class ProjectionNotFound(NotFound):
    """There is no projection of that name."""


class InvalidArgument(PgmbError):
    """A name, a pattern or an array that cannot be right."""


class Conflict(PgmbError):
    """It exists and differs, or is in use."""


class LeaseLost(PgmbError):
    """The lease expired and was taken over, or the queue was moved. What it held is delivered again."""


class HistoryGone(PgmbError):
    """Retention dropped events after this position."""


class QueueHeld(PgmbError):
    """Transactions that received from the queue, or that move or convert it, stay open. Try again later."""


class WrongServer(PgmbError):
    """This server cannot answer."""


class StandbyError(WrongServer):
    """Positions are taken on the primary only."""


class ClusterChanged(WrongServer):
    """The log came from another cluster: it was restored or copied and needs pgmb.rebase()."""


class ReaderBehind(WrongServer):
    """The replica, or the transaction's snapshot, is older than the position asked for."""


class PositionLost(PgmbError):
    """The position's transaction did not commit, or was lost in a failover or a point-in-time recovery."""


class ForeignPosition(PgmbError):
    """The position was taken from another stream, or from one of the same name that was dropped."""


class TimeoutRequired(PgmbError):
    """The queue or group reads by an SQL condition or a costly filter: those need a statement_timeout."""


class ConditionsUnavailable(PgmbError):
    """SQL conditions cannot run here: roles pgmb_matcher and pgmb_parser are missing, or not the owner's."""


class IsolationLevelError(PgmbError):
    """The function needs READ COMMITTED: a REPEATABLE READ or SERIALIZABLE snapshot may be too old."""


class SubscriptionPaused(PgmbError):
    """The filter or condition of a feed raised, so that it hears nothing more."""


class QueueFull(PgmbError):
    """A queue of the stream has reached its max_length and refuses more."""


class TooManyStages(PgmbError):
    """The role holds as many stages as one may. Publish or abandon some first."""


class StageLost(PgmbError):
    """What tasks wrote in order to publish it together is not there any more. Nothing was published."""


class TasksDiffer(PgmbError):
    """Tasks that publish directly were cut otherwise than before, or another run publishes now."""


class VerificationFailed(PgmbError):
    """A table of the lake does not hold what was archived there. What was not verified stays in the log."""


class NotSealed(PgmbError):
    """Events can still arrive in the segment, or it was dropped."""


class ForeignTable(PgmbError):
    """The table of a lake belongs to another stream or database, or lacks what was verified in it."""


class MissingExtra(PgmbError, ImportError):
    """A package that this needs is not installed: it comes with an extra of pgmb."""


class RequestFailed(PgmbError):
    """The handler of a request raised `kind`, a class's name; `trace` is the traceback of where it ran."""

    kind = ""
    trace = ""


class NoAnswer(PgmbError, TimeoutError):
    """A request had no answer in time. Its event stays, and may still be handled."""


class BrokerClosed(PgmbError, psycopg_pool.PoolClosed):
    """The broker was closed."""


class NoConnection(PgmbError, psycopg_pool.PoolTimeout):
    """No connection of the broker's became free in time, or the server is away."""


class PublishFailed(PgmbError):
    """A background publisher could not publish `events`. It keeps them; the cause is the last error."""

    def __init__(self, said: str, events: Sequence[NewEvent] = ()) -> None:
        super().__init__(said)
        self.events = list(events)


class PublisherFull(PgmbError):
    """A background publisher holds as many events as it may."""


class PublisherClosed(PgmbError):
    """The background publisher was closed, or belongs to another process."""


class AddressRefused(PgmbError, OSError):
    """An endpoint's address is not one that may be connected to. It is raised where sockets are made."""

    def __init__(self, said: str) -> None:
        super().__init__(EACCES, said)
        self.said = said

    def __str__(self) -> str:
        return self.said


class SecretKeyMissing(PgmbError):
    """The key that secrets are sealed with was not given, or is none."""


class SecretUnreadable(PgmbError):
    """A sealed secret cannot be opened: by another key, of another endpoint, or damaged."""


class PermissionDenied(PgmbError):
    """The role was not granted this."""


class SchemaVersionError(PgmbError):
    """The database's schema version is not the one that this package works with."""

    def __init__(self, found: object, wanted: int | None = None) -> None:
        if wanted is None:
            super().__init__(found)
            return
        state = "is not installed" if found is None else f"is at version {found}"
        super().__init__(f"schema pgmb {state}; this package works with version {wanted}")
        newer = isinstance(found, int) and found > wanted
        self.advise(
            "Upgrade the pgmb package." if newer else "Run `pgmb install` or pgmb.schema.install(dsn)."
        )


BY_SQLSTATE: dict[str, type[PgmbError]] = {
    "MB001": StreamNotFound,
    "MB002": QueueNotFound,
    "MB003": InvalidArgument,
    "MB004": Conflict,
    "MB005": InvalidArgument,
    "MB006": Conflict,
    "MB007": InvalidArgument,
    "MB008": ScheduleNotFound,
    "MB060": EndpointNotFound,
    "MB009": InvalidArgument,
    "MB010": InvalidArgument,
    "MB011": LeaseLost,
    "MB012": HistoryGone,
    "MB013": QueueHeld,
    "MB020": StandbyError,
    "MB021": ClusterChanged,
    "MB022": ReaderBehind,
    "MB023": PositionLost,
    "MB024": TimeoutRequired,
    "MB025": ConditionsUnavailable,
    "MB026": ForeignPosition,
    "MB029": IsolationLevelError,
    "MB030": SchemaVersionError,
    "MB040": QueueFull,
    "MB042": PermissionDenied,
    "MB043": TooManyStages,
    "MB050": StageLost,
    "MB051": TasksDiffer,
    "MB061": LakeNotFound,
    "MB062": VerificationFailed,
    "MB063": NotSealed,
    "MB066": ProjectionNotFound,
    "42501": PermissionDenied,
}


class ServerError(NamedTuple):
    """What the server answered instead of rows."""

    sqlstate: str
    message: str
    hint: str | None = None
    schema: str | None = None
    constraint: str | None = None
    column: str | None = None


def server_error(error: BaseException | None) -> ServerError | None:
    """What the server said, of a driver's exception or of one that wraps it.

    By the attributes of psycopg, psycopg2 and asyncpg, and by pg8000's fields of the protocol's message.
    """
    while error is not None:
        sqlstate = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
        fields = error.args[0] if error.args else None
        if isinstance(sqlstate, str):
            return _said(error, sqlstate)
        if isinstance(fields, dict) and "C" in fields:
            return ServerError(fields["C"], fields["M"], *map(fields.get, "Hsnc"))
        # SQLAlchemy's name, and Django's way.
        error = getattr(error, "orig", None) or error.__cause__
    return None


def _said(error: BaseException, sqlstate: str) -> ServerError:
    diag = getattr(error, "diag", None)
    if diag is None:
        message, hint, told = getattr(error, "message", None), getattr(error, "hint", None), error
    else:
        message, hint, told = diag.message_primary, diag.message_hint, diag
    places = (getattr(told, name, None) for name in ("schema_name", "constraint_name", "column_name"))
    return ServerError(sqlstate, message or str(error), hint, *places)


def _demanded(said: ServerError) -> str | None:
    """What a table or a domain of pgmb demands: its constraints are named by that."""
    if said.schema == "pgmb" and said.sqlstate == "23514":
        return said.constraint
    if said.schema == "pgmb" and said.sqlstate == "23502":
        is_event = said.column in ("topic", "payload")
        return f"an event needs a {said.column}" if is_event else f"{said.column} must not be null"
    return None


@contextmanager
def translated() -> Generator[None]:
    """Raise psycopg's errors that are ours as the exceptions of this module."""
    try:
        yield
    except psycopg.Error as error:
        said = None if error.sqlstate is None else _said(error, error.sqlstate)
        ours = None if said is None else exception_for(said)
        if ours is None:
            raise
        raise ours from error


def exception_for(said: ServerError) -> PgmbError | None:
    """The exception of this module for what a server said; None if it is not about us."""
    if demand := _demanded(said):
        return InvalidArgument(demand)
    return ours_for(said.sqlstate, said.message, said.hint)


def ours_for(sqlstate: str | None, message: str, hint: str | None) -> PgmbError | None:
    """The same by its SQLSTATE alone."""
    kind = BY_SQLSTATE.get(sqlstate or "")
    if kind is None:
        return None
    ours = kind(message)
    if hint is None and kind is PermissionDenied:
        hint = _RIGHTS
    if hint:
        ours.advise(hint)
    return ours


_RIGHTS = (
    "An administrator grants rights: pgmb.grant_publish(stream, role), pgmb.grant_consume(queue, role) or"
    " pgmb.grant_read(stream, role)."
)
