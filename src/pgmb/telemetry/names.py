"""Names of OpenTelemetry's semantic conventions for messaging, 1.44, and what pgmb adds to them.

Written out because the package with the constants has no stable part for messaging yet; a test compares. What
the conventions leave to each system is decided so:

- `messaging.destination.name` is the topic where events are published, and the queue where they are
  received, processed and settled: each time what the call names. A receive gives events of many topics, so
  the topic cannot be its destination; an event's own is in `messaging.pgmb.message.topic`.
- `messaging.destination.subscription.name` and `messaging.consumer.group.name` are not set. A queue is both,
  and is the destination already.
- Topics may be without number (`room.4711.message`), so metrics have them only through a `template`.
"""

from __future__ import annotations

from typing import Final

SYSTEM: Final = "messaging.system"
DESTINATION: Final = "messaging.destination.name"
DESTINATION_TEMPLATE: Final = "messaging.destination.template"
OPERATION_NAME: Final = "messaging.operation.name"
OPERATION_TYPE: Final = "messaging.operation.type"
MESSAGE_ID: Final = "messaging.message.id"
BATCH_COUNT: Final = "messaging.batch.message_count"
ERROR_TYPE: Final = "error.type"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"

STREAM: Final = "messaging.pgmb.stream"
TOPIC: Final = "messaging.pgmb.message.topic"
SEQ: Final = "messaging.pgmb.message.seq"
ATTEMPT: Final = "messaging.pgmb.message.attempt"

PGMB: Final = "pgmb"
CREATE: Final = "create"
SEND: Final = "send"
RECEIVE: Final = "receive"
PROCESS: Final = "process"
SETTLE: Final = "settle"

SENT_MESSAGES: Final = "messaging.client.sent.messages"
CONSUMED_MESSAGES: Final = "messaging.client.consumed.messages"
OPERATION_DURATION: Final = "messaging.client.operation.duration"
PROCESS_DURATION: Final = "messaging.process.duration"

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""The buckets that the conventions ask for."""

SCHEMA: Final = "https://opentelemetry.io/schemas/1.44.0"
SCOPE: Final = "pgmb"


def error_type(error: BaseException) -> str:
    """The class of the exception, without its module."""
    return type(error).__qualname__
