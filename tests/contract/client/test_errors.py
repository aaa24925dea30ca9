"""Errors are exceptions of pgmb's, told apart by SQLSTATE, with a hint."""

from __future__ import annotations

import uuid
from typing import Any

import psycopg
import pytest

import pgmb
from pgmb import NewEvent, PermissionDenied, errors
from tests.contract.client.adapters import Client


async def test_what_is_missing_is_named(client: Client) -> None:
    for attempt in (
        client.publish("a", 1, stream="nowhere"),
        client.publish_many("a", [1], stream="nowhere"),
        client.publish_many("a", range(3000), stream="nowhere"),
        client.publish_many([NewEvent("a", 1, key="k")], stream="nowhere"),
        client.position("nowhere"),
        client.drop_stream("nowhere"),
        client.create_queue("q", stream="nowhere"),
    ):
        with pytest.raises(errors.StreamNotFound, match="nowhere") as caught:
            await attempt
        assert "create_stream" in (caught.value.hint or "")
    for attempt in (client.receive("none"), client.pause("none"), client.dead_letters("none")):
        with pytest.raises(errors.QueueNotFound, match="none"):
            await attempt


async def test_bad_names_are_refused(client: Client) -> None:
    with pytest.raises(errors.InvalidArgument):
        await client.create_stream("no/slash")
    with pytest.raises(errors.InvalidArgument):
        await client.create_queue("\n")


async def test_a_made_up_lease_is_lost(client: Client) -> None:
    await client.create_queue("q")
    with pytest.raises((errors.LeaseLost, PermissionDenied)):
        await client.ack(uuid.UUID("00000100-0000-0000-0002-000000000000"))


async def test_other_errors_stay_psycopgs(client: Client) -> None:
    with pytest.raises(psycopg.errors.NumericValueOutOfRange):
        await client.create_queue("q", max_attempts=2**40)


@pytest.mark.parametrize(
    ("settings", "demand"),
    [
        ({"max_attempts": 0}, "max_attempts must be at least 1"),
        ({"lease_for": 0.0}, "lease_for must be more than 0"),
        ({"when_full": "wait"}, "when_full must be refuse or drop_oldest"),
    ],
)
async def test_a_setting_out_of_bounds_is_refused_by_what_it_may_be(
    client: Client, settings: dict[str, Any], demand: str
) -> None:
    with pytest.raises(pgmb.InvalidArgument, match=f"^{demand}$"):
        await client.create_queue("q", **settings)


@pytest.mark.parametrize("topic", ["", "x" * 256, "order.*", "#", "c#"])
async def test_a_topic_that_no_pattern_could_name_is_refused(client: Client, topic: str) -> None:
    with pytest.raises(pgmb.InvalidArgument, match=r"^a topic must have"):
        await client.publish(topic, 1)
    with pytest.raises(pgmb.InvalidArgument, match=r"^a topic must have"):
        await client.publish_many([pgmb.NewEvent(topic, 1)])


def test_an_event_without_a_topic_is_refused_by_name(dsn: str) -> None:
    nothing: Any = None
    with pgmb.connect(dsn) as broker, pytest.raises(pgmb.InvalidArgument, match="needs a topic"):
        broker.publish(nothing, 1)
