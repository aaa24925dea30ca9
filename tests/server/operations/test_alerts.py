"""Every alert of deploy/prometheus fires in the situation that it is for, and not before it."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from psycopg_pool import PoolTimeout

from harness.states import add_deliveries, age_leases, age_waiting, expire_all
from pgmb import aconnect
from pgmb._async.broker import AsyncBroker
from pgmb.server import create_app, metrics
from pgmb.server.processes import families_of
from pgmb.telemetry import snapshot
from tests.server.asking import asking

RULES = Path(__file__).parents[3] / "deploy" / "prometheus" / "pgmb.rules.yaml"
(GROUP,) = yaml.safe_load(RULES.read_text())["groups"]
ALERTS: dict[str, str] = {rule["alert"]: rule["expr"] for rule in GROUP["rules"]}

Scrape = dict[str, list[tuple[dict[str, str], float]]]
_COMPARISON = re.compile(
    r"(?P<increase>increase\()?(?P<metric>\w+)(\{(?P<label>\w+)=\"(?P<wanted>\w+)\"\})?(\[\w+\]\))?"
    r" (?P<how>==|>) (?P<value>\d+)"
)
AGE = "2 hours"
HOUR = f"interval '{AGE}'"


def compared(text: str, before: Scrape, now: Scrape) -> list[dict[str, str]]:
    """The labels of the samples for which one comparison holds."""
    parsed = _COMPARISON.fullmatch(text)
    assert parsed is not None, f"the evaluator does not know {text!r}"
    earlier = before.get(parsed["metric"], []) if parsed["increase"] else []
    base = earlier[0][1] if earlier else 0.0
    holds: Callable[[float], bool] = {
        "==": lambda value: value == float(parsed["value"]),
        ">": lambda value: value > float(parsed["value"]),
    }[parsed["how"]]
    return [
        labels
        for labels, value in now.get(parsed["metric"], [])
        if (parsed["label"] is None or labels.get(parsed["label"]) == parsed["wanted"])
        and holds(value - base)
    ]


def fires(alert: str, before: Scrape, now: Scrape) -> bool:
    """What Prometheus would say, of the expressions that these rules have."""
    if absent := re.fullmatch(r"absent\((\w+)\)", ALERTS[alert]):
        return absent[1] not in now
    for alternative in ALERTS[alert].split(" or "):
        found: list[dict[str, str]] | None = None
        for part in re.split(r" and (?:on\(\) )?", alternative):
            held = compared(part, before, now)
            if found is None:
                found = held
            else:
                joined = " and on() " in alternative
                found = [labels for labels in found if held and (joined or labels in held)]
        if found:
            return True
    return False


async def scrape(broker: AsyncBroker, families: Callable[[], Iterable[Metric]] = tuple) -> Scrape:
    """By an application of its own: one keeps what it read for a second."""
    async with asking(create_app(broker=broker, metrics_public=True, families=families)) as client:
        text = (await client.get("/metrics")).text
    found: Scrape = {}
    for family in text_string_to_metric_families(text):
        found.setdefault(family.name + ("_total" if family.type == "counter" else ""), [])
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def age(db: psycopg.Connection[Any], *updates: str) -> None:
    for update in updates:
        db.execute(update.replace("HOUR", HOUR).encode())


def queue_falls_behind(db: psycopg.Connection[Any]) -> None:
    age(db, "select pgmb.create_queue('q')", "select pgmb.publish('t', '1')")
    age(db, "update pgmb.log_main set published_at = published_at - HOUR")


def lease_held(db: psycopg.Connection[Any]) -> None:
    age(db, "select pgmb.create_queue('q')", "select pgmb.publish('t', '1')")
    age(db, "select pgmb.receive('q', 1, '1 day')")
    age_leases(db, AGE)


def dead_letter(db: psycopg.Connection[Any]) -> None:
    age(db, "select pgmb.create_queue('q')", "select pgmb.publish('t', '1')")
    age(db, "select pgmb.bury((select lease from pgmb.receive('q')))", "select pg_stat_force_next_flush()")


def reader_falls_behind(db: psycopg.Connection[Any]) -> None:
    age(db, "select pgmb.confirm('main', 'r', pgmb.position())", "select pgmb.publish('t', '1')")
    age(db, "update pgmb.log_main set published_at = published_at - HOUR")


def retention_held(db: psycopg.Connection[Any]) -> None:
    age(db, "select pgmb.create_queue('q')", "select pgmb.alter_stream('main', keep_for => '1 s')")
    age(db, "select pgmb.publish('t', '1')", "select pgmb.rotate('main')", "select pgmb.seal('main')")
    age(db, "update pgmb.segment set last_published_at = last_published_at - HOUR")


def lake(db: psycopg.Connection[Any]) -> None:
    age(db, "select pgmb.create_lake('main', '/lake')")
    age(db, "select pgmb.publish('t', '1')", "select pgmb.rotate('main')", "select pgmb.seal('main')")


def archive_falls_behind(db: psycopg.Connection[Any]) -> None:
    lake(db)
    age(db, "update pgmb.segment set sealed_at = sealed_at - interval '2 days'")


def archive_damaged(db: psycopg.Connection[Any]) -> None:
    lake(db)
    age(db, "select pgmb.digest_segment('main', 0)")
    age(db, "select pgmb.record_damage('main', 0, 'a file is missing')")


def endpoint(db: psycopg.Connection[Any]) -> None:
    age(db, "select pgmb.create_endpoint('e', 'https://endpoint.example/', '{t}')")


def endpoint_falls_behind(db: psycopg.Connection[Any]) -> None:
    endpoint(db)
    add_deliveries(db, age=AGE, attempt=1)


def endpoint_tripped(db: psycopg.Connection[Any]) -> None:
    endpoint(db)
    age(db, "select pgmb.trip_endpoint(id, 'status 500') from pgmb.endpoint")


def maintenance_stopped(db: psycopg.Connection[Any]) -> None:
    age(
        db,
        "select pgmb.maintain()",
        "select setval('pgmb.maintained', last_value - 7200000) from pgmb.maintained",
    )


PROVOKED: dict[str, Callable[[psycopg.Connection[Any]], None]] = {
    "PgmbMaintenanceStopped": maintenance_stopped,
    "PgmbQueueFallsBehind": queue_falls_behind,
    "PgmbLeaseHeldLong": lease_held,
    "PgmbDeadLetters": dead_letter,
    "PgmbReaderFallsBehind": reader_falls_behind,
    "PgmbRetentionHeld": retention_held,
    "PgmbArchiveFallsBehind": archive_falls_behind,
    "PgmbArchiveDamaged": archive_damaged,
    "PgmbDispatchersGone": endpoint,
    "PgmbEndpointFallsBehind": endpoint_falls_behind,
    "PgmbEndpointTripped": endpoint_tripped,
}
OTHERWISE = {
    "PgmbDatabaseAway",
    "PgmbGone",
    "PgmbPoolExhausted",
    "PgmbOldTransaction",
    "PgmbProcessDown",
    "PgmbProcessRestarts",
    "PgmbScrapeIncomplete",
}
"""Provoked by the tests below."""


def test_every_alert_is_provoked() -> None:
    assert PROVOKED.keys() | OTHERWISE == ALERTS.keys()
    assert all({"summary", "action"} == rule["annotations"].keys() for rule in GROUP["rules"])


@pytest.mark.parametrize("alert", PROVOKED)
async def test_it_fires(dsn: str, db: psycopg.Connection[Any], alert: str) -> None:
    db.execute("select pgmb.maintain()")
    async with await aconnect(dsn, min_size=0, max_size=2) as broker:
        before = await scrape(broker)
        assert set(re.findall(r"pgmb_\w+", ALERTS[alert])) <= before.keys()
        assert [name for name in PROVOKED if fires(name, before, before)] == []
        PROVOKED[alert](db)
        assert fires(alert, before, await scrape(broker))


def retries_due(db: psycopg.Connection[Any]) -> None:
    age(db, "select pgmb.create_queue('q')", "select pgmb.publish('t', '1')")
    age(db, "select pgmb.retry((select lease from pgmb.receive('q')), after => '1 second')")
    age_waiting(db, AGE)


def consumer_dead(db: psycopg.Connection[Any]) -> None:
    age(db, "select pgmb.create_queue('q')", "select pgmb.publish('t', '1')", "select pgmb.receive('q')")
    expire_all(db, AGE)


@pytest.mark.parametrize("left", [retries_due, consumer_dead])
async def test_it_fires_for_events_that_were_received_before(
    dsn: str, db: psycopg.Connection[Any], left: Callable[[psycopg.Connection[Any]], None]
) -> None:
    async with await aconnect(dsn, min_size=0, max_size=2) as broker:
        left(db)
        assert fires("PgmbQueueFallsBehind", {}, await scrape(broker))


async def test_it_fires_for_a_process_that_ends(dsn: str) -> None:
    def families(restarts: int, *, troubled: bool) -> Callable[[], Iterator[Metric]]:
        return lambda: families_of([("http", os.getpid(), 0, False), ("upkeep", None, restarts, troubled)])

    async with await aconnect(dsn, min_size=0, max_size=2) as broker:
        before = await scrape(broker, families(0, troubled=False))
        now = await scrape(broker, families(4, troubled=True))
    for alert in ("PgmbProcessDown", "PgmbProcessRestarts"):
        assert not fires(alert, before, before)
        assert fires(alert, before, now)
    assert [labels for labels, _ in now["pgmb_process_open_files"]] == [{"process": "http"}]


async def test_it_fires_for_a_family_that_takes_too_long(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with await aconnect(dsn, min_size=0, max_size=2) as broker:
        before = await scrape(broker)
        monkeypatch.setattr(metrics, "_SCRAPE_SECONDS", 1.0)
        monkeypatch.setitem(snapshot.SECTIONS, "queues", "select pg_sleep(60)::text")
        now = await scrape(broker)
    assert not fires("PgmbScrapeIncomplete", before, before)
    assert fires("PgmbScrapeIncomplete", before, now)
    assert not fires("PgmbDatabaseAway", before, now)
    queues = {name for name in before if name.startswith("pgmb_queue_")}
    assert before.keys() - now.keys() == queues


async def test_readers_in_great_number_hide_nothing(dsn: str, db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.confirm('main', 'far behind', pgmb.position())")
    db.execute("select pgmb.publish('t', '1')")
    db.execute("select pgmb.confirm('main', 'first', pgmb.position())")
    db.execute(
        "insert into pgmb.reader (stream, name, position, role) select stream, i::text, position, role"
        " from pgmb.reader, generate_series(1, 15000) i where name = 'first'"
    )
    async with await aconnect(dsn, min_size=0, max_size=2) as broker:
        now = await scrape(broker)
    assert [value for _, value in now["pgmb_up"]] == [1.0]
    assert not any(value for _, value in now["pgmb_scrape_incomplete"])
    shown = [labels["reader"] for labels, _ in now["pgmb_reader_waiting"]]
    assert (len(shown), "far behind" in shown) == (500, True)


def test_it_fires_when_nobody_exports_metrics() -> None:
    up: Scrape = {"pgmb_up": [({}, 0.0)]}
    assert not fires("PgmbGone", up, up)
    assert fires("PgmbGone", up, {})


async def test_it_fires_when_no_connection_is_to_be_had(dsn: str) -> None:
    async def ask(broker: AsyncBroker) -> None:
        while True:
            with suppress(PoolTimeout):
                await broker.queue_status()

    async with await aconnect(dsn, min_size=0, max_size=1, max_wait=2) as broker:
        before = await scrape(broker)
        assert not fires("PgmbDatabaseAway", before, before)
        assert not fires("PgmbPoolExhausted", before, before)
        async with broker.connection():
            asking_too = [asyncio.create_task(ask(broker)) for _ in range(3)]
            now = await scrape(broker)
            for task in asking_too:
                task.cancel()
            await asyncio.gather(*asking_too, return_exceptions=True)
    assert fires("PgmbDatabaseAway", before, now)
    assert fires("PgmbPoolExhausted", before, now)


def test_it_fires_for_an_old_transaction() -> None:
    """What an hour takes is not waited for: test_prometheus scrapes such a session's age."""
    young: Scrape = {"pgmb_xmin_holder_age_seconds": [({"kind": "session"}, 3600.0)]}
    old: Scrape = {"pgmb_xmin_holder_age_seconds": [({"kind": "session"}, 3601.0)]}
    assert not fires("PgmbOldTransaction", young, young)
    assert fires("PgmbOldTransaction", young, old)
