"""The names are those of OpenTelemetry's semantic conventions, as far as its package has them."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.metrics.export import Histogram
from opentelemetry.semconv._incubating.attributes import messaging_attributes
from opentelemetry.semconv._incubating.metrics import messaging_metrics
from opentelemetry.semconv.attributes import error_attributes, server_attributes
from opentelemetry.semconv.schemas import Schemas

import pgmb
from pgmb.telemetry import names
from pgmb.telemetry.tracing import instrument
from tests.telemetry.conftest import Recorded

pytestmark = pytest.mark.once(15)

OPERATIONS = messaging_attributes.MessagingOperationTypeValues


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (names.SYSTEM, messaging_attributes.MESSAGING_SYSTEM),
        (names.DESTINATION, messaging_attributes.MESSAGING_DESTINATION_NAME),
        (names.DESTINATION_TEMPLATE, messaging_attributes.MESSAGING_DESTINATION_TEMPLATE),
        (names.OPERATION_NAME, messaging_attributes.MESSAGING_OPERATION_NAME),
        (names.OPERATION_TYPE, messaging_attributes.MESSAGING_OPERATION_TYPE),
        (names.MESSAGE_ID, messaging_attributes.MESSAGING_MESSAGE_ID),
        (names.BATCH_COUNT, messaging_attributes.MESSAGING_BATCH_MESSAGE_COUNT),
        (names.ERROR_TYPE, error_attributes.ERROR_TYPE),
        (names.SERVER_ADDRESS, server_attributes.SERVER_ADDRESS),
        (names.SERVER_PORT, server_attributes.SERVER_PORT),
        (names.CREATE, OPERATIONS.CREATE.value),
        (names.SEND, OPERATIONS.SEND.value),
        (names.RECEIVE, OPERATIONS.RECEIVE.value),
        (names.PROCESS, OPERATIONS.PROCESS.value),
        (names.SETTLE, OPERATIONS.SETTLE.value),
        (names.SENT_MESSAGES, messaging_metrics.MESSAGING_CLIENT_SENT_MESSAGES),
        (names.CONSUMED_MESSAGES, messaging_metrics.MESSAGING_CLIENT_CONSUMED_MESSAGES),
        (names.OPERATION_DURATION, messaging_metrics.MESSAGING_CLIENT_OPERATION_DURATION),
        (names.PROCESS_DURATION, messaging_metrics.MESSAGING_PROCESS_DURATION),
        (names.SCHEMA, Schemas.V1_44_0.value),
    ],
)
def test_a_name_is_the_conventions(ours: str, theirs: str) -> None:
    assert ours == theirs


def test_metrics_have_the_conventions_units_and_buckets(dsn: str, recorded: Recorded) -> None:
    with pgmb.connect(dsn) as broker:
        broker.create_queue("billing", ["#"])
        telemetry = instrument(broker, **recorded.providers)
        broker.publish("order.paid", 1)
        lease = broker.receive("billing")
        with telemetry.process("billing", lease.events):
            lease.ack()
    data = recorded.reader.get_metrics_data()
    assert data is not None
    (scope,) = data.resource_metrics[0].scope_metrics
    assert (scope.scope.name, scope.scope.schema_url) == ("pgmb", names.SCHEMA)
    assert {metric.name: metric.unit for metric in scope.metrics} == {
        "messaging.client.sent.messages": "{message}",
        "messaging.client.consumed.messages": "{message}",
        "messaging.client.operation.duration": "s",
        "messaging.process.duration": "s",
    }
    for metric in scope.metrics:
        if isinstance(metric.data, Histogram):
            for point in metric.data.data_points:
                assert tuple(point.explicit_bounds) == names.SECONDS
    operations = {
        point.attributes["messaging.operation.name"]
        for point in recorded.points("messaging.client.operation.duration")
    }
    assert operations == {"publish", "receive", "ack"}
