"""The public surface, pinned: a change here is a change of the package's interface."""

from __future__ import annotations

import inspect

import pgmb

PUBLIC = [
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

METHODS = [
    "abandon",
    "ack",
    "alter_endpoint",
    "alter_queue",
    "alter_stream",
    "api_keys",
    "attempts",
    "audit",
    "backends",
    "between",
    "bind",
    "bind_endpoint",
    "break_off",
    "bury",
    "bury_unreadable",
    "cancel",
    "close",
    "confirm",
    "connection",
    "consume",
    "convert_queue",
    "create_api_key",
    "create_endpoint",
    "create_queue",
    "create_schedule",
    "create_stream",
    "dead_letters",
    "disable_endpoint",
    "drop_api_key",
    "drop_dead",
    "drop_endpoint",
    "drop_queue",
    "drop_schedule",
    "drop_stream",
    "due_schedules",
    "earliest",
    "endpoint",
    "endpoints",
    "event_fate",
    "extend",
    "fire",
    "forget",
    "group",
    "hand_over",
    "listener",
    "maintain",
    "next_events",
    "own_connection",
    "pause",
    "pause_endpoint",
    "pause_schedule",
    "position",
    "position_at",
    "position_of",
    "publish",
    "publish_many",
    "publisher",
    "purge",
    "queue_depth",
    "queue_disagreements",
    "queue_status",
    "reader_status",
    "receive",
    "receive_any",
    "record",
    "redrive",
    "redrive_failed",
    "release",
    "replay",
    "reschedule",
    "resend",
    "resume",
    "resume_endpoint",
    "resume_schedule",
    "retry",
    "rotate",
    "rotate_secret",
    "run_schedule",
    "schedules",
    "seek",
    "sink_status",
    "stream_of",
    "stream_status",
    "tail",
    "tick",
    "worker_depart",
    "worker_heartbeat",
    "workers",
]


OF_GROUPS = ["close", "listen", "receive", "resume", "subscribe", "subscriptions", "unsubscribe"]


def test_the_package_exports_these_names() -> None:
    assert pgmb.__all__ == PUBLIC
    assert sorted(pgmb.__all__) == pgmb.__all__
    assert all(hasattr(pgmb, name) for name in PUBLIC)


def test_brokers_have_these_methods() -> None:
    for kind in (pgmb.Broker, pgmb.AsyncBroker):
        public = [name for name, _ in inspect.getmembers(kind, callable) if not name.startswith("_")]
        assert public == METHODS


def test_groups_have_these_methods() -> None:
    for kind in (pgmb.Group, pgmb.AsyncGroup):
        public = [name for name, _ in inspect.getmembers(kind, callable) if not name.startswith("_")]
        assert public == OF_GROUPS


def test_every_method_says_what_it_does() -> None:
    for kind in (pgmb.Broker, pgmb.AsyncBroker, pgmb.Lease, pgmb.AsyncLease, pgmb.Group, pgmb.AsyncGroup):
        for name, method in inspect.getmembers(kind, inspect.isfunction):
            assert name.startswith("_") or method.__doc__, f"{kind.__name__}.{name}"


def test_every_exception_is_a_pgmb_error_and_says_what_happened() -> None:
    for name, kind in inspect.getmembers(pgmb.errors, inspect.isclass):
        if issubclass(kind, Exception) and kind.__module__ == "pgmb.errors":
            assert issubclass(kind, pgmb.PgmbError), name
            assert kind.__doc__, name
