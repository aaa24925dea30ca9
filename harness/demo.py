"""A broker with something of everything in it, to look at: a shop's events, queues, failures, endpoints."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg

import pgmb
from pgmb import NewEvent
from pgmb._core.keys import KEY, digest, generate

_TOPICS = ("order.placed", "order.paid", "order.shipped", "cart.updated", "customer.updated", "stock.changed")
_ERRORS = (
    "TimeoutError: the payment provider did not answer within 10 s",
    "ValidationError: total must not be negative (payload.total = -1)",
    "ConnectionRefusedError: [Errno 111] connect to smtp.internal:25",
    "KeyError: 'customer'",
)

_HISTORY = """
select pgmb.record('key:deploy', 'create_queue', 'fraud/checks', '{"patterns": ["order.placed"]}'),
  pgmb.record('key:operator', 'redrive_dead', 'billing', '{"count": 12, "matching": {"queue": "billing"}}'),
  pgmb.record('key:operator', 'pause', 'emails', '{"reason": "the mail provider has an outage until 14:00"}');
insert into pgmb.dispatcher (id, host, pid)
values (gen_random_uuid(), 'app-1', 4120), (gen_random_uuid(), 'app-2', 3987)
"""

_ATTEMPTS = """
insert into pgmb.attempt (
  endpoint, at, seq, event_id, topic, attempt, status, seconds, error, detail, response)
select e.id, clock_timestamp() - n * interval '47 seconds', (b.event ->> 'seq')::bigint,
  (b.event ->> 'id')::uuid,
  b.event ->> 'topic', 1 + n % 3,
  case when e.name <> 'partner-feed' then 200 when n % 3 > 0 then 503 end,
  0.04 + (n % 7) * 0.05,
  case when e.name = 'partner-feed' then case when n % 3 = 0 then 'timeout' else 'status' end end,
  case when e.name = 'partner-feed' and n % 3 = 0 then 'no answer within 15 s' end,
  case when e.name <> 'partner-feed' then '{"ok": true}' when n % 3 > 0 then '{"error": "over capacity"}' end
from pgmb.endpoint e
cross join generate_series(1, 12) n
cross join lateral (
  select (pgmb.browse('main', topic => 'order.paid', max => 20) -> 'events' -> n) event) b
order by n desc
"""

_TRIPPED = """
update pgmb.endpoint_activity a
set delivered = 18240, delivered_at = clock_timestamp() - interval '4 seconds', failed = 3
from pgmb.endpoint e where e.id = a.endpoint and e.name <> 'partner-feed';
update pgmb.endpoint_activity a
set delivered = 9120, failed = 214, error = 'status 503',
  delivered_at = clock_timestamp() - interval '22 minutes',
  failed_at = clock_timestamp() - interval '40 seconds',
  failing_since = clock_timestamp() - interval '21 minutes'
from pgmb.endpoint e where e.id = a.endpoint and e.name = 'partner-feed';
update pgmb.endpoint
set state = 'tripped', reason = '12 attempts in a row failed, the last with status 503', trips = 3,
  probe_at = clock_timestamp() + interval '4 minutes', changed_at = clock_timestamp()
where name = 'partner-feed'
"""


def key(connection: psycopg.Connection[Any], name: str, scope: str) -> str:
    """A new API key with one scope."""
    text = generate(KEY)
    connection.execute("select pgmb.create_api_key(%s, %s, %s)", (name, digest(text), [scope]))
    return text


def orders(count: int, seed: int = 7) -> Iterator[NewEvent]:
    """Events of a shop."""
    chance = random.Random(seed)
    for number in range(count):
        order = 48_000 + number
        yield NewEvent(
            chance.choices(_TOPICS, (6, 5, 4, 12, 3, 8))[0],
            {
                "order": order,
                "customer": {
                    "id": chance.randrange(900),
                    "name": "Ada Example",
                    "newsletter": chance.random() < 0.5,
                },
                "lines": [
                    {"sku": f"SKU-{chance.randrange(400):03}", "quantity": chance.randrange(1, 4)}
                    for _ in range(chance.randrange(1, 4))
                ],
                "total": round(chance.uniform(5, 300), 2),
                "note": None,
            },
            key=f"customer-{chance.randrange(900)}",
            headers={"source": "shop", "trace": secrets.token_hex(8)},
        )


def seed(dsn: str) -> None:
    """Fills a database in which pgmb is installed."""
    with pgmb.connect(dsn) as broker, psycopg.connect(dsn, autocommit=True) as connection:
        broker.create_stream("telemetry", keep_for=timedelta(days=3), rotate_every=timedelta(minutes=30))
        broker.alter_stream("main", keep_for=timedelta(days=14))
        broker.create_queue("billing", ["order.paid", "order.placed"], max_attempts=5)
        broker.create_queue("shipping", ["order.paid"], ordered=True, lease_for=60)
        broker.create_queue("emails", ["order.*", "customer.#"], rps=50, max_attempts=8)
        broker.create_queue("search-index", ["#"])
        broker.create_queue("fraud/checks", ["order.placed"], filter="$.payload.total > 100")
        broker.create_queue("sensors", stream="telemetry")
        for name, url, patterns in (
            ("warehouse", "https://warehouse.example/hooks/orders", ["order.paid"]),
            ("newsletter", "https://mail.example/hook", ["customer.*"]),
            ("partner-feed", "https://partner.example/v2/events", ["order.#"]),
        ):
            broker.create_endpoint(name, url, patterns, secret=None, log="all", keep_response=True)
        broker.create_schedule(
            "nightly report",
            "30 3 * * *",
            "report.due",
            {"kind": "full", "to": ["ops@shop.example"]},
            timezone="Europe/Berlin",
        )
        broker.create_schedule("poll feeds", "*/5 * * * *", "customer.feed.poll")
        for part in range(3):
            broker.publish_many(list(orders(900, part)))
            broker.rotate("main")
        broker.maintain()
        broker.publish_many(
            [NewEvent("sensor.read", {"celsius": 20 + n % 7}, key=f"s{n % 9}") for n in range(400)],
            stream="telemetry",
        )
        broker.publish_many(list(orders(400, 9)))
        connection.execute("select pgmb.tick(s.name) from pgmb.stream s")
        _work(broker)
        _deliver(connection)
        broker.confirm("main", "spark-lake", broker.position("main"))
        broker.pause("emails", "the mail provider has an outage until 14:00")
        connection.execute(_HISTORY)


def _work(broker: pgmb.Broker) -> None:
    """Consumers that succeed, fail, give up and hold on."""
    chance = random.Random(3)
    for queue in ("billing", "shipping", "search-index", "fraud/checks", "sensors"):
        for _ in range(6):
            lease = broker.receive(queue, max=100)
            events = list(lease)
            failed = [event for event in events if chance.random() < 0.06]
            for event in failed:
                error = chance.choice(_ERRORS)
                if queue in ("billing", "fraud/checks"):
                    broker.bury(lease, [event.seq], error=error)
                else:
                    broker.retry(
                        lease, [event.seq], after=chance.choice((5, 40, 200, 700, 3000)), error=error
                    )
            if events:
                lease.ack()
        broker.receive(queue, max=40, lease_for=300)


def _deliver(connection: psycopg.Connection[Any]) -> None:
    """As if dispatchers had been at work: attempts, a breaker that tripped."""
    connection.execute(_ATTEMPTS)
    connection.execute(_TRIPPED)
