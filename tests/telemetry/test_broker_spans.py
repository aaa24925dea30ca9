"""An instrumented broker tells of its calls by the conventions, and its events carry the trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import psycopg
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

import pgmb
from pgmb.telemetry.tracing import instrument
from tests.telemetry.conftest import Recorded, span_id

pytestmark = pytest.mark.once(15)

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


@dataclass
class Told:
    tenant: str


@pytest.fixture
def broker(dsn: str, recorded: Recorded) -> Iterator[pgmb.Broker]:
    with pgmb.connect(dsn) as opened:
        opened.create_queue("billing", ["order.#"])
        instrument(opened, **recorded.providers)
        yield opened


def traceparent(span: ReadableSpan) -> str:
    assert span.context is not None
    context = span.context
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def headers_of(db: psycopg.Connection[Any]) -> list[Any]:
    return [row[0] for row in db.execute("select headers from pgmb.log_main order by seq")]


def test_a_publish_is_a_producer_span_whose_context_the_event_carries(
    broker: pgmb.Broker, recorded: Recorded, db: psycopg.Connection[Any]
) -> None:
    given = {"tenant": "a", "n": 1}
    published = broker.publish("order.paid", {"n": 1}, headers=given)
    (span,) = recorded.spans
    assert (span.name, span.kind) == ("publish order.paid", SpanKind.PRODUCER)
    attributes = dict(span.attributes or {})
    assert attributes.pop("server.address")
    attributes.pop("server.port", None)
    assert attributes == {
        "messaging.system": "pgmb",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": "order.paid",
        "messaging.message.id": str(published),
        "messaging.pgmb.stream": "main",
    }
    assert given == {"tenant": "a", "n": 1}
    assert headers_of(db) == [{**given, "traceparent": traceparent(span)}]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {}),
        ({}, {}),
        ({"a": None}, {"a": None}),
        (Told("x"), {"tenant": "x"}),
        (msgspec.Raw(b' {"a" : 1.10} '), {"a": 1.1}),
        (msgspec.Raw(b"{}"), {}),
        ({"baggage": 7, "tracestate": ["x"]}, {"baggage": 7, "tracestate": ["x"]}),
    ],
)
def test_what_the_user_gave_stays_and_the_context_is_added(
    broker: pgmb.Broker, recorded: Recorded, db: psycopg.Connection[Any], given: Any, expected: Any
) -> None:
    broker.publish("order.paid", 1, headers=given)
    broker.publish_many("order.paid", [1, 2], headers=given)
    broker.publish_many([pgmb.NewEvent("order.paid", 1, headers=given)])
    one, uniform, listed = recorded.spans
    assert headers_of(db) == [
        {**expected, "traceparent": traceparent(span)} for span in (one, uniform, uniform, listed)
    ]


@pytest.mark.parametrize("given", [[1, 2], "text", 7, msgspec.Raw(b"[]")])
def test_headers_that_are_no_object_stay_as_they_are(
    broker: pgmb.Broker, db: psycopg.Connection[Any], given: Any
) -> None:
    broker.publish("order.paid", 1, headers=given)
    broker.publish_many("order.paid", [1], headers=given)
    plain = [] if isinstance(given, msgspec.Raw) else given
    assert headers_of(db) == [plain, plain]
    assert len(broker.receive("billing")) == 2


@pytest.mark.parametrize(
    "given", [{"traceparent": PARENT}, msgspec.Raw(b'{"traceparent":"%s"}' % PARENT.encode())]
)
def test_a_context_of_the_users_own_is_kept_and_linked_to(
    broker: pgmb.Broker, recorded: Recorded, db: psycopg.Connection[Any], given: Any
) -> None:
    broker.publish("order.paid", 1, headers=given)
    broker.publish_many("order.paid", [1], headers=given)
    broker.publish_many([pgmb.NewEvent("order.paid", 1, headers=given)])
    broker.publish_many(pgmb.NewEvent("order.paid", 1, headers=given) for _ in range(1))
    assert headers_of(db) == [{"traceparent": PARENT}] * 4
    for span in recorded.spans:
        assert [f"{link.context.trace_id:032x}" for link in span.links] == [TRACE]
    assert [span.kind for span in recorded.spans[:3]] == [SpanKind.CLIENT] * 3


def test_an_uninstrumented_broker_leaves_headers_alone(
    dsn: str, recorded: Recorded, db: psycopg.Connection[Any]
) -> None:
    with pgmb.connect(dsn) as plain, pgmb.connect(dsn) as traced:
        instrument(traced, **recorded.providers)
        with recorded.tracer_provider.get_tracer("test").start_as_current_span("around"):
            plain.publish("order.paid", 1)
            plain.publish("order.paid", 1, headers={"a": 1})
            plain.publish_many("order.paid", [1])
        assert type(plain) is pgmb.Broker
        assert isinstance(traced, pgmb.Broker)
    assert headers_of(db) == [None, {"a": 1}, None]


def test_many_events_are_one_span_named_by_their_topic_if_they_have_one(
    broker: pgmb.Broker, recorded: Recorded
) -> None:
    assert broker.publish_many("order.paid", range(3000)) == 3000
    assert broker.publish_many(pgmb.NewEvent("order.sent", n) for n in range(2500)) == 2500
    assert broker.publish_many([pgmb.NewEvent("order.paid", 1), pgmb.NewEvent("order.sent", 2)]) == 2
    assert broker.publish_many([]) == 0
    told = [(span.name, (span.attributes or {})["messaging.batch.message_count"]) for span in recorded.spans]
    assert told == [
        ("publish order.paid", 3000),
        ("publish order.sent", 2500),
        ("publish", 2),
        ("publish", 0),
    ]
    assert "messaging.destination.name" not in (recorded.spans[2].attributes or {})
    assert sum(point.value for point in recorded.points("messaging.client.sent.messages")) == 5502


def test_a_receive_links_to_every_event_and_an_empty_one_is_silent(
    broker: pgmb.Broker, recorded: Recorded
) -> None:
    assert not broker.receive("billing")
    assert recorded.spans == []
    ids = [broker.publish("order.paid", n) for n in range(3)]
    lease = broker.receive("billing")
    lease.ack(lease.events[0])
    lease.retry(lease.events[1], after=60)
    lease.bury(lease.events[2], "no")
    (received,) = recorded.named("receive billing")
    published = recorded.named("publish order.paid")
    assert received.kind is SpanKind.CLIENT
    assert [link.context.span_id for link in received.links] == [span_id(span) for span in published]
    assert [(link.attributes or {})["messaging.message.id"] for link in received.links] == list(map(str, ids))
    attributes = received.attributes or {}
    assert attributes["messaging.destination.name"] == "billing"
    assert attributes["messaging.operation.type"] == "receive"
    assert attributes["messaging.batch.message_count"] == 3
    for name in ("ack", "retry", "bury"):
        (span,) = recorded.named(f"{name} billing")
        assert span.kind is SpanKind.CLIENT
        assert (span.attributes or {})["messaging.operation.type"] == "settle"
        assert (span.attributes or {})["messaging.batch.message_count"] == 1
    (consumed,) = recorded.points("messaging.client.consumed.messages")
    assert consumed.value == 3
    assert consumed.attributes["messaging.destination.name"] == "billing"


def test_a_failure_is_told_by_its_class(broker: pgmb.Broker, recorded: Recorded) -> None:
    with pytest.raises(pgmb.NotFound):
        broker.publish("order.paid", 1, stream="nowhere")
    with pytest.raises(pgmb.NotFound):
        broker.publish_many("order.paid", range(5000), stream="nowhere")
    with pytest.raises(pgmb.NotFound):
        broker.receive("nobody")
    for span, kind in zip(recorded.spans, ("StreamNotFound", "StreamNotFound", "QueueNotFound"), strict=True):
        assert (span.attributes or {})["error.type"] == kind
        assert span.status.status_code is StatusCode.ERROR
        assert [event.name for event in span.events] == ["exception"]
    failed = {
        point.attributes["error.type"]: point.count
        for point in recorded.points("messaging.client.operation.duration")
        if "error.type" in point.attributes
    }
    assert failed == {"StreamNotFound": 2, "QueueNotFound": 1}
    (sent,) = recorded.points("messaging.client.sent.messages")
    assert (sent.value, sent.attributes["error.type"]) == (5001, "StreamNotFound")


def test_arguments_that_cannot_be_sent_fail_as_they_do_without(
    broker: pgmb.Broker, recorded: Recorded
) -> None:
    with pytest.raises(TypeError):
        broker.publish("order.paid", 1, headers={"a": object()})
    with pytest.raises(TypeError):
        broker.publish("order.paid", 1, headers=object())
    with pytest.raises(pgmb.InvalidArgument):
        broker.publish_many("order.paid")  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        broker.publish_many(pgmb.NewEvent("order.paid", 1 // n) for n in (1, 0))
    with pytest.raises(TypeError):
        broker.publish("order.paid", 1, colour="red")  # type: ignore[call-arg]


def test_a_publish_in_the_callers_transaction_is_part_of_the_callers_trace(
    broker: pgmb.Broker, recorded: Recorded, connect: Any
) -> None:
    conn = connect(autocommit=False)
    with recorded.tracer_provider.get_tracer("test").start_as_current_span("request") as around:
        broker.publish("order.paid", 1, conn=conn)
        broker.publish_many("order.paid", [1], conn=conn)
    conn.commit()
    for span in recorded.named("publish order.paid"):
        assert span.parent is not None
        assert span.parent.span_id == around.get_span_context().span_id
    lease = broker.receive("billing")
    assert len(lease) == 2
    assert lease.ack(conn=conn) == 2
    conn.commit()
    assert broker.receive("billing").events == []


def test_metrics_have_topics_only_through_a_template(dsn: str, recorded: Recorded) -> None:
    def template(topic: str) -> str | None:
        return None if topic == "odd" else topic if topic == "order.paid" else "room.{id}.message"

    with pgmb.connect(dsn) as broker:
        instrument(broker, **recorded.providers, template=template)
        for topic in ("room.1.message", "room.2.message", "order.paid", "odd"):
            broker.publish(topic, 1)
            broker.publish_many(topic, [1])
    assert {span.name for span in recorded.spans} == {
        "publish room.{id}.message",
        "publish order.paid",
        "publish odd",
    }
    names = ("messaging.destination.name", "messaging.destination.template")
    labels = {
        tuple(point.attributes.get(name) for name in names): point.value
        for point in recorded.points("messaging.client.sent.messages")
    }
    assert labels == {(None, "room.{id}.message"): 4, ("order.paid", None): 2, (None, None): 2}


def test_a_template_that_fails_keeps_nobody_from_publishing(dsn: str, recorded: Recorded) -> None:
    with pgmb.connect(dsn) as broker:
        instrument(broker, **recorded.providers, template=lambda topic: {"known": "known"}[topic])
        broker.publish("order.paid", 1)
    assert [span.name for span in recorded.spans] == ["publish order.paid"]


class Own(pgmb.Broker):
    def publish(self, topic: str, *arguments: Any, **options: Any) -> Any:
        return super().publish(f"own.{topic}", *arguments, **options)


def test_a_broker_of_the_users_own_class_stays_one(dsn: str, recorded: Recorded) -> None:
    with pgmb.connect(dsn) as broker:
        broker.__class__ = Own
        instrument(broker, **recorded.providers)
        broker.create_queue("all", ["#"])
        broker.publish("order.paid", 1)
        assert isinstance(broker, Own)
        assert [event.topic for event in broker.receive("all")] == ["own.order.paid"]


def test_instrumented_again_the_last_one_counts(dsn: str, recorded: Recorded) -> None:
    with pgmb.connect(dsn) as broker:
        instrument(broker)
        instrument(broker, **recorded.providers)
        instrument(broker, **recorded.providers)
        broker.publish("order.paid", 1)
        broker.create_queue("all", ["#"])
        assert broker.stream_of("all") == "main"
    assert len(recorded.spans) == 1


def test_without_an_sdk_nothing_is_added(dsn: str, db: psycopg.Connection[Any]) -> None:
    with pgmb.connect(dsn) as broker:
        instrument(broker)
        broker.publish("order.paid", 1)
        broker.publish("order.paid", 1, headers={"a": 1})
        broker.publish("order.paid", 1, headers=Told("x"))
        broker.publish("order.paid", 1, headers={"traceparent": PARENT})
        broker.publish_many("order.paid", [1], headers={"a": 1})
        broker.publish_many([pgmb.NewEvent("order.paid", 1, headers={"a": 1})])
    assert headers_of(db) == [None, {"a": 1}, {"tenant": "x"}, {"traceparent": PARENT}, {"a": 1}, {"a": 1}]


def test_the_background_publisher_keeps_the_context_of_whoever_enqueued(
    broker: pgmb.Broker, recorded: Recorded
) -> None:
    tracer = recorded.tracer_provider.get_tracer("test")
    with broker.publisher() as publisher, tracer.start_as_current_span("request") as around:
        ids = [publisher.enqueue("order.paid", n, headers={"n": n}) for n in range(3)]
    created = recorded.named("create order.paid")
    assert [span.kind for span in created] == [SpanKind.PRODUCER] * 3
    assert {span.parent.span_id for span in created if span.parent} == {around.get_span_context().span_id}
    assert [(span.attributes or {})["messaging.message.id"] for span in created] == list(map(str, ids))
    sends = recorded.named("publish order.paid")
    assert {span.kind for span in sends} == {SpanKind.CLIENT}
    assert sum(len(span.links) for span in sends) == 3
    events = broker.receive("billing").events
    assert [event.headers for event in events] == [
        {"n": n, "traceparent": traceparent(span)} for n, span in enumerate(created)
    ]


async def test_the_asynchronous_broker_does_the_same(dsn: str, recorded: Recorded) -> None:
    async with await pgmb.aconnect(dsn) as broker:
        await broker.create_queue("billing", ["order.#"])
        telemetry = instrument(broker, **recorded.providers)
        await broker.publish("order.paid", 1)
        await broker.publish_many("order.paid", [2])
        async with broker.publisher() as publisher:
            await publisher.enqueue("order.paid", 3)
        lease = await broker.receive_any(["billing"])
        assert len(lease) == 3
        with telemetry.process(lease.queue, lease.events[0]) as span:
            await broker.publish("invoice.made", 1)
        await lease.ack()
        with pytest.raises(pgmb.NotFound):
            await broker.receive("nobody")
    (received,) = recorded.named("receive billing")
    assert len(received.links) == 3
    (processed,) = recorded.named("process billing")
    assert processed.parent is not None
    assert processed.parent.span_id == span_id(recorded.named("publish order.paid")[0])
    (chained,) = recorded.named("publish invoice.made")
    assert chained.parent is not None
    assert chained.parent.span_id == span.get_span_context().span_id
