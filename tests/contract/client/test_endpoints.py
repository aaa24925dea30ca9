"""Endpoints from Python, by the synchronous client and the asynchronous one: settings, secrets, replay."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

import pgmb
from pgmb.errors import EndpointNotFound, SecretKeyMissing
from pgmb.webhooks.secrets import SealingKey, generate_key, generate_secret, parse_secret
from tests.contract.client.adapters import AsyncClient, Client, SyncClient
from tests.contract.endpoints import claim, receive, settle, settle_claimed, value

URL = "http://hooks.example/in"


@pytest.fixture(params=["sync", "async"])
async def client(request: pytest.FixtureRequest, dsn: str) -> AsyncGenerator[Client]:
    if request.param == "sync":
        with pgmb.connect(dsn) as broker:
            yield SyncClient(broker, dsn)
    else:
        async with await pgmb.aconnect(dsn) as abroker:
            yield AsyncClient(abroker, dsn)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> SealingKey:
    text = generate_key()
    monkeypatch.setenv("PGMB_SECRET_KEY", text)
    monkeypatch.delenv("PGMB_SECRET_KEY_FILE", raising=False)
    return SealingKey.parse(text)


def opened(db: psycopg.Connection[Any], key: SealingKey, id: UUID) -> list[str]:
    sealed = value(db, "select secrets from pgmb.dispatched_endpoints() where id = %s", id)
    return [key.open(one, id) for one in sealed]


async def test_an_endpoint_is_shown_as_it_was_created_and_changed(client: Client) -> None:
    made = await client.create_endpoint(
        "hook",
        URL,
        ["order.*"],
        equals={"payload": {"region": "eu"}},
        filter="$.payload.total > $least",
        params={"least": 10},
        batch=5,
        body="cloudevents",
        rps=50,
        max_in_flight=4,
        timeout=3,
        headers={"x-a": "b"},
        gzip_above=1000,
        retry_after=[1, timedelta(minutes=1)],
        log="all",
        keep_response=True,
        description="The shop's",
        metadata={"team": "a"},
    )
    shown = await client.endpoint("hook")
    assert isinstance(shown, pgmb.EndpointStatus)
    assert (shown.id, shown.name, shown.url, shown.state) == (made.id, "hook", URL, "active")
    assert (shown.queue, shown.stream, shown.patterns) == ("endpoint/hook", "main", ["order.*"])
    assert (shown.equals, shown.filter) == ({"payload": {"region": "eu"}}, "$.payload.total > $least")
    assert (shown.params, shown.ordered, shown.batch, shown.body) == ({"least": 10}, False, 5, "cloudevents")
    assert (shown.rps, shown.max_in_flight, shown.timeout) == (50, 4, timedelta(seconds=3))
    assert shown.retry_after == [timedelta(seconds=1), timedelta(minutes=1)]
    assert (shown.headers, shown.gzip_above, shown.log, shown.keep_response) == (["x-a"], 1000, "all", True)
    assert (shown.description, shown.metadata, shown.secrets) == ("The shop's", {"team": "a"}, 1)
    assert (shown.delivered, shown.failed, shown.waiting, shown.delivered_at) == (0, 0, 0, None)
    assert shown.created_at <= shown.changed_at

    await client.alter_endpoint("hook", rps=0, timeout=timedelta(seconds=9), headers={}, url=URL + "2")
    await client.bind_endpoint("hook", "invoice.#")
    shown = await client.endpoint("hook")
    assert (shown.rps, shown.timeout, shown.headers) == (None, timedelta(seconds=9), [])
    assert (shown.url, shown.patterns, shown.filter) == (URL + "2", ["invoice.#"], None)
    await client.create_endpoint("another", URL, "a.*")
    assert [one.name for one in await client.endpoints()] == ["another", "hook"]


async def test_it_is_held_let_go_and_dropped(client: Client) -> None:
    await client.create_endpoint("hook", URL)
    assert await client.pause_endpoint("hook", "holiday") is True
    paused = await client.endpoint("hook")
    assert (paused.state, paused.reason) == ("paused", "holiday")
    assert await client.disable_endpoint("hook", "sold") is True
    assert (await client.endpoint("hook")).state == "disabled"
    assert await client.resume_endpoint("hook") is True
    assert await client.resume_endpoint("hook") is False
    assert (await client.endpoint("hook")).state == "active"
    assert await client.drop_endpoint("hook") is True
    assert await client.drop_endpoint("hook") is False
    for call in ("endpoint", "attempts", "pause_endpoint", "rotate_secret", "replay", "redrive_failed"):
        with pytest.raises(EndpointNotFound):
            await client.call(call, "hook")
    with pytest.raises(EndpointNotFound):
        await client.resend("hook", [])


async def test_a_secret_is_made_sealed_and_shown_once(
    client: Client, db: psycopg.Connection[Any], key: SealingKey
) -> None:
    made = await client.create_endpoint("hook", URL)
    assert isinstance(made, pgmb.NewEndpoint)
    assert made.secret is not None
    assert made.secret.startswith("whsec_")
    assert made.secret not in repr(made)
    assert opened(db, key, made.id) == [made.secret]
    again = await client.create_endpoint("hook", URL, secret="generate")
    assert (again.id, again.secret) == (made.id, None), "one that has a secret keeps it"

    unsigned = await client.create_endpoint("unsigned", URL, secret=None)
    assert unsigned.secret is None
    assert opened(db, key, unsigned.id) == []

    mine = generate_secret()
    for shown in (mine, None):
        given = await client.create_endpoint("given", URL, secret=mine)
        assert given.secret == shown, "said again, it is the same"
    assert opened(db, key, given.id) == [mine]

    private = generate_secret("v1a")
    signed = await client.create_endpoint("signed", URL, secret=private)
    assert signed.public_key == parse_secret(private).public
    assert private not in repr(signed)


async def test_a_secret_is_replaced_while_the_former_still_signs(
    client: Client, db: psycopg.Connection[Any], key: SealingKey
) -> None:
    made = await client.create_endpoint("hook", URL)
    second = await client.rotate_secret("hook")
    assert opened(db, key, made.id) == [second, made.secret]
    third = generate_secret()
    assert await client.rotate_secret("hook", third, overlap=0) == third
    assert opened(db, key, made.id) == [third], "all of the former end"


async def test_without_a_key_nothing_is_sealed(
    client: Client, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PGMB_SECRET_KEY")
    made = await client.create_endpoint("hook", URL)
    assert made.secret is None
    for secret in ("generate", generate_secret()):
        with pytest.raises(SecretKeyMissing) as refused:
            await client.create_endpoint("other", URL, secret=secret)
        assert secret not in str(refused.value)
    with pytest.raises(SecretKeyMissing):
        await client.rotate_secret("hook")
    assert [one.name for one in await client.endpoints()] == ["hook"]


async def test_what_is_no_secret_is_refused_before_anything_is_made(client: Client) -> None:
    for secret in ("", "swordfish", "whsec_c2hvcnQ=", "whsk_!"):
        with pytest.raises(pgmb.InvalidArgument):
            await client.create_endpoint("hook", URL, secret=secret)
    with pytest.raises(pgmb.InvalidArgument):
        await client.create_endpoint("hook", "ftp://x/")
    assert await client.endpoints() == []


async def test_all_of_it_is_part_of_the_callers_transaction(
    client: Client, db: psycopg.Connection[Any]
) -> None:
    async with client.transaction(commit=False) as conn:
        await client.create_endpoint("hook", URL, conn=conn)
        await client.rotate_secret("hook", conn=conn)
        assert (await client.endpoint("hook", conn=conn)).secrets == 2
    assert await client.endpoints() == []
    async with client.transaction() as conn:
        await client.create_endpoint("hook", URL, conn=conn)
    assert value(db, "select count(*) from pgmb.endpoint_secret") == 1


async def test_attempts_are_shown_the_newest_first(client: Client, db: psycopg.Connection[Any]) -> None:
    made = await client.create_endpoint("hook", URL)
    event = UUID(int=7)
    for attempt in (1, 2, 3):
        db.execute(
            "select pgmb.log_attempts(array[%s]::uuid[], '{5}', array[%s]::uuid[], '{t}', array[%s]::int[],"
            " %s, '{0.5}', '{status}', '{no}', '{body}')",
            [made.id, event, attempt, [None] if attempt == 3 else [500]],
        )
    newest, second = await client.attempts("hook", 2)
    assert isinstance(newest, pgmb.Attempt)
    assert (newest.attempt, newest.status, second.attempt, second.status) == (3, None, 2, 500)
    assert (second.seq, second.event_id, second.topic, second.seconds) == (5, event, "t", 0.5)
    assert (second.error, second.detail, second.response) == ("status", "no", "body")
    assert second.at < newest.at < datetime.now(UTC) + timedelta(minutes=1)


async def test_what_went_by_or_failed_is_sent_again(client: Client, db: psycopg.Connection[Any]) -> None:
    made = await client.create_endpoint("hook", URL)
    ids = [await client.publish(f"a.{number}", number) for number in range(3)]
    got = receive(db)
    failure = (got.seqs(0)[0], made.id, None, "no", True, True)
    settle(db, got.lease, None, [failure])

    def due() -> list[int]:
        held = claim(db)
        settle_claimed(db, held.lease, held.rows())
        return sorted(held)

    assert await client.redrive_failed("hook", datetime.now(UTC) + timedelta(hours=1)) == 0
    assert await client.redrive_failed("hook") == 1
    assert due() == [0]
    assert await client.resend("hook", [ids[1], str(ids[2]), UUID(int=1)]) == 2
    assert due() == [1, 2]
    assert await client.replay("hook") == 3
    assert due() == [0, 1, 2]
    past = datetime(2000, 1, 1, tzinfo=UTC)
    assert await client.replay("hook", past, topic="a.1") == 1
    assert await client.replay("hook", past, filter="$.payload == 2", max=5) == 1
    assert await client.replay("hook", past, past + timedelta(days=1)) == 0
    assert due() == [1, 2]
    with pytest.raises(pgmb.InvalidArgument):
        await client.replay("hook", datetime(2000, 1, 1))  # noqa: DTZ001


async def test_a_replay_by_a_condition_runs_under_a_timeout(client: Client) -> None:
    await client.create_endpoint("hook", URL, condition="e.topic = 'a'")
    await client.publish("a", 1)
    await client.publish("b", 1)
    assert await client.replay("hook") == 1
