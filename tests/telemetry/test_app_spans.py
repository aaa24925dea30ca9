"""Handlers run inside process spans: in the publisher's trace, a new one each attempt, linked for batches."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import psycopg
import pytest
from opentelemetry.baggage import get_baggage, set_baggage
from opentelemetry.context import attach, detach
from opentelemetry.trace import SpanKind, StatusCode, get_current_span

import pgmb
from harness.waiting import until, until_true
from pgmb.telemetry.tracing import instrument
from tests.app.stage import Workers, settled, working
from tests.telemetry.conftest import Recorded, span_id

pytestmark = pytest.mark.once(15)


async def test_a_handler_is_in_the_trace_of_the_publisher_and_what_it_publishes_too(
    dsn: str, recorded: Recorded
) -> None:
    app = pgmb.App(dsn)
    baggage: list[Any] = []

    @app.on("order.*", queue="billing")
    async def charge(order: dict[str, int]) -> None:
        baggage.append(get_baggage("tenant"))
        await app.apublish("invoice.made", order)

    @app.on("invoice.*", queue="mail")
    def send(invoice: pgmb.Delivery[dict[str, int]]) -> None:
        # In a thread, where the context has to be the same.
        get_current_span().set_attribute("handled", invoice.payload["n"])

    instrument(app, **recorded.providers)
    async with working(app):
        token = attach(set_baggage("tenant", "a"))
        published = await app.apublish("order.paid", {"n": 7}, headers={"mine": 1})
        detach(token)
        await until(lambda: len(recorded.named("process mail")) == 1)
    await app.aclose()
    order, charged = recorded.named("publish order.paid") + recorded.named("process billing")
    invoice, sent = recorded.named("publish invoice.made") + recorded.named("process mail")
    assert len({span.context.trace_id for span in (order, charged, invoice, sent) if span.context}) == 1
    for earlier, later in ((order, charged), (charged, invoice), (invoice, sent)):
        assert later.parent is not None
        assert earlier.context is not None
        assert later.parent.span_id == earlier.context.span_id
    assert charged.kind is SpanKind.CONSUMER
    assert [link.context.span_id for link in charged.links] == [span_id(order)]
    attributes = dict(charged.attributes or {})
    assert isinstance(attributes.pop("messaging.pgmb.message.seq"), int)
    assert attributes == {
        "messaging.system": "pgmb",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "billing",
        "messaging.message.id": str(published),
        "messaging.pgmb.stream": "main",
        "messaging.pgmb.message.topic": "order.paid",
        "messaging.pgmb.message.attempt": 1,
    }
    assert (sent.attributes or {})["handled"] == 7
    assert baggage == ["a"]
    # A worker's own receiving and settling is measured, not traced.
    assert {span.name.split()[0] for span in recorded.spans} == {"publish", "process"}
    consumed = {
        point.attributes["messaging.destination.name"]: point.value
        for point in recorded.points("messaging.client.consumed.messages")
    }
    assert consumed == {"billing": 1, "mail": 1}
    processed = {
        point.attributes["messaging.destination.name"]: point.count
        for point in recorded.points("messaging.process.duration")
    }
    assert processed == {"billing": 1, "mail": 1}


async def test_each_attempt_is_a_span_of_its_own_that_tells_how_it_failed(
    dsn: str, recorded: Recorded
) -> None:
    app = pgmb.App(dsn)

    @app.on("order.*", queue="billing", retry=0)
    async def charge(order: pgmb.Delivery[int]) -> None:
        if order.attempt == 1:
            raise ValueError("odd")
        if order.attempt == 2:
            raise pgmb.Retry(after=0, reason="later")
        if order.attempt == 3:
            raise pgmb.Reject("never")

    @app.on("invoice.*", queue="mail")
    async def send(invoice: int) -> None: ...

    instrument(app, **recorded.providers)
    async with working(app) as broker:
        await app.apublish("order.paid", 1)
        await app.apublish("invoice.made", "not a number")
        await until(lambda: len(recorded.named("process billing")) == 3)
        await until(lambda: len(recorded.named("process mail")) == 1)
        await until(lambda: settled(broker, "billing"))
    await app.aclose()
    spans = recorded.named("process billing")
    assert [(span.attributes or {})["messaging.pgmb.message.attempt"] for span in spans] == [1, 2, 3]
    assert [(span.attributes or {})["error.type"] for span in spans] == ["ValueError", "Retry", "Reject"]
    assert [span.status.description for span in spans] == ["odd", "later", "never"]
    assert {span.status.status_code for span in spans} == {StatusCode.ERROR}
    assert [len(span.events) for span in spans] == [1, 0, 0]
    assert len({span.context.trace_id for span in spans if span.context}) == 1
    (unfit,) = recorded.named("process mail")
    assert (unfit.attributes or {})["error.type"] == "Unfit"
    errors = {point.attributes.get("error.type") for point in recorded.points("messaging.process.duration")}
    assert errors == {"ValueError", "Retry", "Reject", "Unfit"}


async def test_a_batch_is_one_span_that_links_to_each_event(dsn: str, recorded: Recorded) -> None:
    app = pgmb.App(dsn)
    seen: list[int] = []

    @app.on("order.*", queue="billing", batch=50, concurrency=1)
    async def charge(orders: list[int]) -> None:
        seen.extend(orders)

    instrument(app, **recorded.providers)
    async with await pgmb.aconnect(dsn) as publisher:
        await publisher.create_queue("billing", ["order.*"])
        instrument(publisher, **recorded.providers)
        for n in range(3):
            await publisher.publish("order.paid", n)
        await publisher.publish("order.paid", "does not fit")
        async with working(app) as broker:
            await until(lambda: len(seen) == 3)
            await until(lambda: settled(broker, "billing"))
            assert [letter.event.payload for letter in await broker.dead_letters("billing")] == [
                "does not fit"
            ]
    (span,) = recorded.named("process billing")
    published = recorded.named("publish order.paid")
    assert span.parent is None
    assert (span.attributes or {})["messaging.batch.message_count"] == 3
    assert [link.context.span_id for link in span.links] == [span_id(one) for one in published[:3]]


async def test_traces_may_be_linked_only(dsn: str, recorded: Recorded) -> None:
    app = pgmb.App(dsn)

    @app.on("order.*", queue="billing")
    async def charge(order: int) -> None: ...

    instrument(app, **recorded.providers)
    instrument(app, **recorded.providers, continue_traces=False)
    assert len(app.middlewares) == 1
    async with working(app):
        await app.apublish("order.paid", 1)
        await until(lambda: len(recorded.named("process billing")) == 1)
    await app.aclose()
    (published,) = recorded.named("publish order.paid")
    (span,) = recorded.named("process billing")
    assert span.parent is None
    assert [link.context.span_id for link in span.links] == [span_id(published)]


async def test_headers_that_others_made_do_no_harm(
    dsn: str, db: psycopg.Connection[Any], recorded: Recorded
) -> None:
    app = pgmb.App(dsn)

    @app.on("order.*", queue="billing")
    async def charge(order: int) -> None: ...

    instrument(app, **recorded.providers)
    strange = [
        "[1]",
        '"text"',
        '{"traceparent": 7}',
        '{"traceparent": "00-xyz"}',
        '{"traceparent": null}',
        "null",
    ]
    async with working(app):
        for headers in strange:
            db.execute("select pgmb.publish('order.paid', '1', headers => %s::json)", [headers])
        await until(lambda: len(recorded.named("process billing")) == len(strange))
    for span in recorded.named("process billing"):
        assert (span.parent, list(span.links), span.status.status_code) == (None, [], StatusCode.UNSET)


SHOP = """
    import json, pathlib
    import pgmb
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
    from pgmb.telemetry.tracing import instrument

    class Lines(SpanExporter):
        def export(self, spans):
            with open("spans.txt", "a") as file:
                for span in spans:
                    file.write(json.dumps([span.name, f"{span.context.trace_id:032x}"]) + "\\n")
            return SpanExportResult.SUCCESS

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(Lines()))
    app = pgmb.App(DSN)
    instrument(app, provider)

    @app.on("order.*", queue="billing")
    def charge(order: int) -> None:
        pass
"""


def test_two_processes_one_trace(dsn: str, tmp_path: Path, recorded: Recorded) -> None:
    workers = Workers(tmp_path, dsn, SHOP)
    with pgmb.connect(dsn) as broker:
        broker.create_queue("billing", ["order.*"])
        instrument(broker, **recorded.providers)
        broker.publish("order.paid", 1)
        with workers.running():
            until_true(lambda: workers.lines("spans.txt"))
    (published,) = recorded.spans
    (line,) = workers.lines("spans.txt")
    assert published.context is not None
    assert json.loads(line) == ["process billing", f"{published.context.trace_id:032x}"]


def test_a_loop_of_ones_own_has_process_spans_too(dsn: str, recorded: Recorded) -> None:
    with pgmb.connect(dsn) as broker:
        broker.create_queue("billing", ["#"])
        telemetry = instrument(broker, **recorded.providers)
        broker.publish_many("order.paid", [1, 2])
        with broker.consume("billing", listen=False) as leases:
            lease = next(leases)
            for event in lease:
                with telemetry.process(lease.queue, event):
                    pass
            with telemetry.process(lease.queue, lease.events):
                pass
            lease.ack()
    one, two, both = recorded.named("process billing")
    (published,) = recorded.named("publish order.paid")
    assert published.context is not None
    assert {span.parent.span_id for span in (one, two) if span.parent} == {published.context.span_id}
    assert len(both.links) == 2


async def test_a_cancelled_handler_ends_its_span(dsn: str, recorded: Recorded) -> None:
    app = pgmb.App(dsn, grace=0.1)
    begun = asyncio.Event()

    @app.on("order.*", queue="billing")
    async def charge(order: int) -> None:
        begun.set()
        await asyncio.Event().wait()

    instrument(app, **recorded.providers)
    async with working(app):
        await app.apublish("order.paid", 1)
        await begun.wait()
    await app.aclose()
    (span,) = recorded.named("process billing")
    assert (span.attributes or {})["error.type"] == "CancelledError"
