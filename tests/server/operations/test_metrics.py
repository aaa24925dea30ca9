"""/metrics: what is told, to whom, and that labels stay few."""

from __future__ import annotations

import time
from typing import Any

import psycopg
from prometheus_client.parser import text_string_to_metric_families

from harness.states import add_deliveries
from pgmb import aconnect
from pgmb.server import Limits, create_app
from tests.server.asking import asking, bearer, make_key, metrics


async def test_metrics_need_a_key_that_may_look(dsn: str) -> None:
    looks, reads = make_key(dsn, "looks", "inspect"), make_key(dsn, "reads", "read:main")
    async with asking(create_app(dsn)) as client:
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/metrics", headers=bearer(reads))).status_code == 403
        told = await client.get("/metrics", headers=bearer(looks))
        assert told.status_code == 200
        assert told.headers["content-type"].startswith("text/plain; version=")
    async with asking(create_app(dsn, metrics_public=True)) as client:
        assert (await client.get("/metrics")).status_code == 200


async def test_a_scrape_shows_the_database_and_what_was_asked(dsn: str, db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.create_queue('mail', '{a.#}')")
    db.execute("select pgmb.publish('a.b', '1') from generate_series(1, 3)")
    async with asking(create_app(dsn, metrics_public=True)) as client:
        for path in ("/livez", "/livez", "/nowhere", "/nowhere/else?secret=1"):
            await client.get(path)
        await client.request("BREW", "/livez")
        text = (await client.get("/metrics")).text
    told = metrics(text)
    assert told["pgmb_up"] == 1
    assert told['pgmb_queue_waiting{queue="mail",stream="main"}'] == 3
    assert told['pgmb_http_requests_total{method="GET",route="/livez",status="2xx"}'] == 2
    assert told['pgmb_http_requests_total{method="GET",route="unmatched",status="4xx"}'] == 2
    assert told['pgmb_http_requests_total{method="OTHER",route="/livez",status="4xx"}'] == 1
    assert told['pgmb_http_request_duration_seconds_count{route="/livez"}'] == 3
    assert told['pgmb_http_request_duration_seconds_bucket{le="+Inf",route="/livez"}'] == 3
    assert told["pgmb_http_requests_in_progress"] == 1, "the scrape itself"
    assert told["pgmb_sse_clients"] == 0
    assert told['pgmb_endpoints{state="active"}'] == 0
    assert told['pgmb_endpoint_deliveries_total{outcome="delivered"}'] == 0
    assert "secret" not in text
    families = {family.name for family in text_string_to_metric_families(text)}
    assert all(name.startswith(("pgmb_", "process_")) for name in families)


async def test_the_deliveries_of_an_endpoint_that_was_dropped_still_count(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    for name in ("kept", "dropped"):
        db.execute("select pgmb.create_endpoint(%s, 'https://endpoint.example/')", [name])
    db.execute("update pgmb.endpoint_activity set delivered = 3, failed = 2")
    async with asking(create_app(dsn, metrics_public=True)) as client:
        db.execute("select pgmb.drop_endpoint('dropped')")
        told = metrics((await client.get("/metrics")).text)
        assert told['pgmb_endpoint_deliveries_total{outcome="delivered"}'] == 6
        assert told['pgmb_endpoint_deliveries_total{outcome="failed"}'] == 4


async def test_the_backlog_of_webhooks_is_told_for_each_endpoint_with_its_true_age(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    """Counts have a bound, ages have none. What no dispatcher took waits in the queue."""
    db.execute("select pgmb.create_endpoint('own', 'https://endpoint.example/', '{a}', ordered => true)")
    db.execute("select pgmb.create_endpoint('shares', 'https://endpoint.example/', '{a}')")
    db.execute("select pgmb.create_endpoint('well', 'https://endpoint.example/', '{b}')")
    db.execute("select pgmb.publish('a', '0')")
    db.execute("update pgmb.log_main set published_at = published_at - interval '2 hours'")
    db.execute("select pgmb.publish_many('a', array_fill('1'::json, '{10049}'))")
    add_deliveries(db, 10_050, endpoint="shares", attempt=1, age="1 s", older="1 s")
    async with asking(create_app(dsn, metrics_public=True)) as client:
        told = metrics((await client.get("/metrics")).text)
    for endpoint, seconds in (("own", 7200), ("shares", 10050)):
        assert told[f'pgmb_endpoint_waiting{{endpoint="{endpoint}"}}'] == 10_000
        assert seconds <= told[f'pgmb_endpoint_oldest_age_seconds{{endpoint="{endpoint}"}}'] < seconds + 600
    assert 'pgmb_endpoint_waiting{endpoint="well"}' not in told
    assert told['pgmb_queue_waiting{queue="webhooks",stream="main"}'] >= 10_000
    assert told['pgmb_queue_oldest_age_seconds{queue="webhooks",stream="main"}'] >= 7200


async def test_of_many_endpoints_those_furthest_behind_are_told(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    """Thousands of endpoints make a hundred series, not thousands."""
    db.execute(
        "select pgmb.create_endpoint('e' || n, 'https://endpoint.example/') from generate_series(1, 105) n"
    )
    for n in range(1, 106):
        add_deliveries(db, endpoint=f"e{n}", attempt=1, age=f"{n} s")
    async with asking(create_app(dsn, metrics_public=True)) as client:
        told = metrics((await client.get("/metrics")).text, ["pgmb_endpoint_waiting"])
    assert told == {f'pgmb_endpoint_waiting{{endpoint="e{n}"}}': 1.0 for n in range(6, 106)}


async def test_a_scrape_without_the_database_is_an_answer(dsn: str) -> None:
    async with (
        await aconnect(dsn, min_size=0, max_size=1, max_wait=2) as broker,
        asking(create_app(broker=broker, metrics_public=True)) as client,
        broker.connection(),
    ):
        told = metrics((await client.get("/metrics")).text)
    assert told["pgmb_up"] == 0
    assert "pgmb_build_info" in next(iter(told))


async def test_a_key_that_cannot_be_looked_up_is_told_that_the_database_is_away(dsn: str) -> None:
    """And no more: the key may be anything."""
    key = make_key(dsn, "looks", "inspect")
    async with (
        await aconnect(dsn, min_size=0, max_size=1, max_wait=2) as broker,
        asking(create_app(broker=broker)) as client,
    ):
        async with broker.connection():
            assert (await client.get("/metrics")).status_code == 401
            told = await client.get("/metrics", headers=bearer(key))
            assert (told.status_code, metrics(told.text)) == (200, {"pgmb_up": 0.0})
        # The request that gave up may give its place in the pool back a moment later.
        up = 0.0
        deadline = time.monotonic() + 30
        while not up and time.monotonic() < deadline:
            up = metrics((await client.get("/metrics", headers=bearer(key))).text)["pgmb_up"]
        assert up == 1


async def test_public_metrics_have_the_rate_of_an_address(dsn: str) -> None:
    limits = Limits(requests_per_second=0.001, burst=3)
    async with asking(create_app(dsn, metrics_public=True, limits=limits)) as client:
        assert [(await client.get("/metrics")).status_code for _ in range(4)] == [200, 200, 200, 429]
    key = make_key(dsn, "looks", "inspect")
    async with asking(create_app(dsn, limits=limits)) as client:
        statuses = [(await client.get("/metrics", headers=bearer(key))).status_code for _ in range(4)]
        assert statuses == [200, 200, 200, 429]
