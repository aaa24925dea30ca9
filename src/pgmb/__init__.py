"""A message broker and event log inside PostgreSQL."""

from __future__ import annotations

from pgmb import errors, schema
from pgmb._async.broker import AsyncBroker, aconnect
from pgmb._async.group import AsyncGroup
from pgmb._async.lease import AsyncLease
from pgmb._async.publisher import AsyncPublisher
from pgmb._sync.broker import Broker, connect
from pgmb._sync.group import Group
from pgmb._sync.lease import Lease
from pgmb._sync.publisher import Publisher
from pgmb.app import App, Delivery, Reject, Retry
from pgmb.errors import (
    Conflict,
    HistoryGone,
    InvalidArgument,
    LeaseLost,
    NotFound,
    PermissionDenied,
    PgmbError,
    PublisherFull,
    PublishFailed,
    QueueFull,
    SchemaVersionError,
)
from pgmb.types import (
    ApiKey,
    Attempt,
    AuditEntry,
    DeadLetter,
    Duration,
    EndpointStatus,
    Event,
    NewEndpoint,
    NewEvent,
    NewKey,
    Position,
    QueueStatus,
    ReaderStatus,
    Schedule,
    SinkStatus,
    StreamStatus,
    Subscription,
)

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
    "Duration",
    "EndpointStatus",
    "Event",
    "Group",
    "HistoryGone",
    "InvalidArgument",
    "Lease",
    "LeaseLost",
    "NewEndpoint",
    "NewEvent",
    "NewKey",
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
    "Retry",
    "Schedule",
    "SchemaVersionError",
    "SinkStatus",
    "StreamStatus",
    "Subscription",
    "aconnect",
    "connect",
    "errors",
    "schema",
]
