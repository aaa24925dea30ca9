"""CloudEvents over REST: what a Dispatcher posts comes back the same event, and what others post is taken."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import pytest

from pgmb.webhooks.request import Endpoint, WebhookEvent, build_request
from tests.server.rest.api import Api, opened

EVENTS = "/v1/streams/main/events"
POSTED = WebhookEvent(
    "0190a1b2-0000-7000-8000-00000000000a",
    "orders.größe 100%",
    'key "ü"',
    '{"total":  12.50, "Ü": null}',
    '{"trace": "a b", "n": 1}',
    datetime(2026, 1, 2, 3, 4, 5, 678, UTC),
)
FOREIGN = {
    "specversion": "1.0",
    "id": "order-17",
    "source": "https://shop.example/orders",
    "type": "com.example.order",
    "subject": "17",
    "sequence": 5,
    "datacontenttype": "application/json",
    "data": {"n": 1},
}


async def received(api: Api) -> Any:
    return (await api.receive(wait=30))["events"]


@pytest.mark.parametrize("body", ["payload", "cloudevents"])
async def test_what_a_dispatcher_posts_can_be_posted_back(dsn: str, body: Any) -> None:
    plain = POSTED._replace(id=str(uuid4()), key=None, headers=None, topic="t", payload="[1]")
    endpoint = Endpoint(uuid4(), "e", "http://x.test", body=body, headers={"x-own": "1"})
    async with opened(dsn) as api:
        await api.done("POST", "/v1/queues", json={"name": "q"})
        for posted in (POSTED, plain):
            request = build_request(endpoint, [posted], 1, 0)
            answer = await api.done("POST", EVENTS, content=request.body, headers=request.headers)
            assert answer["ids"] == [posted.id]
        event, simple = await received(api)
        assert (event["id"], event["topic"], event["key"]) == POSTED[:3]
        assert event["payload"] == {"total": 12.5, "Ü": None}
        own = {"trace": "a b", "n": 1}
        when = {"ce-source": "/pgmb", "ce-time": "2026-01-02T03:04:05.000678+00:00"}
        assert event["headers"] == {**own, **when}
        assert (simple["topic"], simple["key"], simple["payload"]) == ("t", None, [1])
        assert simple["headers"] == when


async def test_a_batch_that_a_dispatcher_posts_can_be_posted_back(dsn: str) -> None:
    endpoint = Endpoint(uuid4(), "e", "http://x.test", body="cloudevents", batch=10, gzip_above=0)
    second = POSTED._replace(id=str(uuid4()), payload='"two"')
    request = build_request(endpoint, [POSTED, second], 1, 0)
    assert request.headers["content-encoding"] == "gzip"
    async with opened(dsn) as api:
        await api.done("POST", "/v1/queues", json={"name": "q"})
        answer = await api.done("POST", EVENTS, content=request.body, headers=request.headers)
        assert answer["ids"] == [POSTED.id, second.id]
        assert [event["payload"] for event in await received(api)] == [{"total": 12.5, "Ü": None}, "two"]


async def test_others_events_keep_their_attributes_in_headers(dsn: str) -> None:
    async with opened(dsn) as api:
        await api.done("POST", "/v1/queues", json={"name": "q"})
        headers = {"Content-Type": "application/cloudevents+json; charset=utf-8"}
        (first,) = (await api.done("POST", EVENTS, json=FOREIGN, headers=headers))["ids"]
        (second,) = (await api.done("POST", EVENTS, json=FOREIGN, headers=headers))["ids"]
        assert first == second
        assert UUID(first).version == 5
        (event, _) = await received(api)
        assert (event["topic"], event["payload"], event["key"]) == ("com.example.order", {"n": 1}, None)
        assert event["headers"] == {
            "ce-id": "order-17",
            "ce-source": "https://shop.example/orders",
            "ce-subject": "17",
            "ce-sequence": 5,
        }


async def test_binary_mode_takes_any_json_type_and_no_body(dsn: str) -> None:
    attributes = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "/s", "ce-type": "t"}
    async with opened(dsn) as api:
        await api.done("POST", "/v1/queues", json={"name": "q"})
        typed = {**attributes, "Content-Type": "application/vnd.x+json", "ce-partitionkey": "caf%C3%A9"}
        await api.done("POST", EVENTS, content=b'{"a": 1}', headers=typed)
        await api.done("POST", EVENTS, headers={**attributes, "ce-subject": '"a \\"b\\""'})
        full, empty = await received(api)
        assert (full["key"], full["payload"]) == ("café", {"a": 1})
        assert full["headers"]["ce-datacontenttype"] == "application/vnd.x+json"
        assert (empty["payload"], empty["headers"]["ce-subject"]) == (None, 'a "b"')


async def test_what_is_no_cloud_event_is_refused(dsn: str) -> None:
    structured = {"Content-Type": "application/cloudevents+json"}
    async with opened(dsn) as api:
        for change in (
            {"specversion": "0.3"},
            {"specversion": None},
            {"id": ""},
            {"id": 5},
            {"source": None},
            {"type": None},
            {"type": "a\0b"},
            {"Upper": "x"},
            {"ext": {"nested": 1}},
            {"data_base64": "AAAA"},
            {"pgmbheaders": "no json"},
            {"pgmbheaders": "[1]"},
            {"partitionkey": 5},
        ):
            refused = await api.refused("POST", EVENTS, json={**FOREIGN, **change}, headers=structured)
            assert refused == (422, "invalid_argument"), change
        batch = {"Content-Type": "application/cloudevents-batch+json"}
        for given in ([], FOREIGN, [FOREIGN, {}], [1]):
            assert (await api.refused("POST", EVENTS, json=given, headers=batch))[0] == 422
        binary = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "/s", "ce-type": "%FF"}
        assert (await api.refused("POST", EVENTS, headers=binary))[0] == 422
        binary["ce-type"] = "t"
        for typed, content, status in (("text/plain", b"x", 415), ("application/json", b"x", 422)):
            headers = {**binary, "Content-Type": typed}
            assert (await api.refused("POST", EVENTS, content=content, headers=headers))[0] == status
