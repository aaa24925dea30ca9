"""A message broker and event log inside PostgreSQL."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

try:
    # The first import that needs libpq.
    import_module("psycopg")
except ImportError as error:
    error.add_note("pgmb needs libpq: pip install 'pgmb[binary]', or install your system's (Debian: libpq5).")
    raise

from pgmb import errors, schema
from pgmb._async.broker import AsyncBroker, aconnect
from pgmb._async.group import AsyncGroup
from pgmb._async.publisher import AsyncPublisher
from pgmb._async.receiving import AsyncLease
from pgmb._sync.broker import Broker, connect
from pgmb._sync.group import Group
from pgmb._sync.publisher import Publisher
from pgmb._sync.receiving import Lease
from pgmb.app import App, Delivery, Reject, Retry
from pgmb.errors import (
    Conflict,
    HistoryGone,
    InvalidArgument,
    LeaseLost,
    NoAnswer,
    NotFound,
    PermissionDenied,
    PgmbError,
    PublisherFull,
    PublishFailed,
    QueueFull,
    RequestFailed,
    SchemaVersionError,
)
from pgmb.types import (
    ApiKey,
    Attempt,
    AuditEntry,
    DeadLetter,
    Disagreement,
    Duration,
    EndpointStatus,
    Event,
    EventFate,
    FailedAttempt,
    Fate,
    Holder,
    LakeAccess,
    NewEndpoint,
    NewEvent,
    NewKey,
    NextEvent,
    NextEvents,
    Position,
    QueueStatus,
    ReaderStatus,
    Schedule,
    SinkStatus,
    StreamStatus,
    Subscription,
    WorkerStatus,
)

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        """The version, from the package's metadata, which an archive of the sources lacks."""
        if name == "__version__":
            from importlib.metadata import version

            return version("pgmb")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "ApiKey",
    "App",
    "AsyncBroker",
    "AsyncGroup",
    "AsyncLease",
    "AsyncPublisher",
    "Attempt",
    "AuditEntry",
    "Broker",
    "Conflict",
    "DeadLetter",
    "Delivery",
    "Disagreement",
    "Duration",
    "EndpointStatus",
    "Event",
    "EventFate",
    "FailedAttempt",
    "Fate",
    "Group",
    "HistoryGone",
    "Holder",
    "InvalidArgument",
    "LakeAccess",
    "Lease",
    "LeaseLost",
    "NewEndpoint",
    "NewEvent",
    "NewKey",
    "NextEvent",
    "NextEvents",
    "NoAnswer",
    "NotFound",
    "PermissionDenied",
    "PgmbError",
    "Position",
    "PublishFailed",
    "Publisher",
    "PublisherFull",
    "QueueFull",
    "QueueStatus",
    "ReaderStatus",
    "Reject",
    "RequestFailed",
    "Retry",
    "Schedule",
    "SchemaVersionError",
    "SinkStatus",
    "StreamStatus",
    "Subscription",
    "WorkerStatus",
    "aconnect",
    "connect",
    "errors",
    "schema",
]
