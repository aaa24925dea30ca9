"""A month of a shop's events in a log, and failures beside it: quiet, or with anomalies planted in it."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import psycopg

from harness.segments import seal
from harness.states import add_dead_letters

BEGIN: Final = datetime(2026, 9, 1, tzinfo=UTC)
END: Final = datetime(2026, 10, 1, tzinfo=UTC)
PLANTED: Final = {
    ("spike", "cart.updated"),
    ("silence", "order.paid"),
    ("heavy key", "order.placed"),
    ("burst of errors", "billing"),
    ("field changed type", "stock.changed"),
}
"""Rule and name of each anomaly."""

_HOUR: Final = timedelta(hours=1)
_TOPICS: Final = {
    "order.placed": 45,
    "order.paid": 36,
    "cart.updated": 70,
    "stock.changed": 30,
    "customer.updated": 8,
}
_SPIKE = BEGIN + timedelta(days=9, hours=14), BEGIN + timedelta(days=9, hours=16)
_SILENCE = BEGIN + timedelta(days=16, hours=10), BEGIN + timedelta(days=16, hours=15)
_HEAVY = BEGIN + timedelta(days=21), BEGIN + timedelta(days=22)
_BURST = BEGIN + timedelta(days=12, hours=3)
_TYPE = BEGIN + timedelta(days=18, hours=11)
_ERRORS: Final = (
    "TimeoutError: no answer from the payment provider within {} s",
    "ValidationError: total must not be negative, got -{}",
)
_INSERT: Final = """
insert into pgmb."log_{stream}" (topic, key, payload, published_at)
select e.topic, 'customer-' || e.customer,
  case when e.topic like 'order.%%' then json_strip_nulls(json_build_object(
      'customer', e.customer, 'order', e.number, 'total', round((e.number %% 30000) / 100.0, e.number %% 3),
      'lines', case e.number %% 3 when 0 then '[]' else '[{{"sku": "SKU-7", "quantity": 1}}]' end::json,
      'coupon', case when e.number %% 5 = 0 then 'AUTUMN' end))
    when e.topic = 'stock.changed' and e.at >= %(type)s
      then json_build_object('customer', e.customer, 'level', (e.number %% 500)::text)
    when e.topic = 'stock.changed' then json_build_object('customer', e.customer, 'level', e.number %% 500)
    else json_build_object('customer', e.customer, 'note', case when e.number %% 2 = 0 then 'x' end)
  end, e.at
from (
  select h.topic, m.at, m.number,
    case when h.topic = 'order.placed' and m.at >= %(heavy)s and m.at < %(light)s and m.number %% 5 < 2
      then 900 else (900 * power(m.chance, 1.5))::int end customer
  from unnest(%(topics)s::text[], %(counts)s::int[], %(hours)s::timestamptz[]) h (topic, count, hour)
  cross join lateral (
    select h.hour + random() * interval '1 hour' as at, (random() * 1e6)::int as number, random() as chance
    from generate_series(1, h.count)) m
  order by m.at
) e
"""
_ATTEMPTS: Final = """
insert into pgmb.attempt (endpoint, at, seq, event_id, topic, attempt, status, seconds, error)
select e.id, l.published_at + (1.2 * slow.times + random()) * interval '1 second', l.seq,
  pgmb.derive_id(l.seq, l.published_at, s.salt), l.topic, 1,
  case when slow.failed then 503 else 200 end, (0.05 + random() / 8) * slow.times,
  case when slow.failed then 'status' end
from pgmb.endpoint e
join pgmb.stream s on s.name = 'main'
cross join lateral (
  select * from pgmb.log_main where topic = 'order.placed' and hashint8(seq) %% 4 = 0) l
cross join lateral (
  select case e.name when 'partner-feed' then 9 else 1 end * (1 + power(random(), 12) * 8) times,
    e.name = 'partner-feed' and random() < 0.04 failed
  where l.seq > 0) slow
"""


def fill(
    db: psycopg.Connection[Any],
    *,
    planted: bool,
    stream: str = "main",
    queue: str = "billing",
    seed: int = 7,
    segments: int = 6,
) -> int:
    """Fill a stream, sealed segments and an open one. Returns the number of events.

    More by day than by night, less on weekends, with noise beyond chance, and keys of which few are frequent.
    """
    chance = random.Random(seed)
    db.execute("select setseed(%s)", [seed / 100])
    # As if the month had none of them.
    never = END + timedelta(days=1)
    heavy, light, changed = (*_HEAVY, _TYPE) if planted else (never, never, never)
    events = 0
    hours = (END - BEGIN) // _HOUR
    counted: list[tuple[str, int, datetime]] = []
    for number in range(hours):
        at = BEGIN + number * _HOUR
        for topic, rate in _TOPICS.items():
            busy = (0.35 + 0.65 * max(0.0, 1 - abs(at.hour - 14) / 9)) * (0.6 if at.weekday() >= 5 else 1.0)
            expected = rate * busy * chance.gauss(1, 0.08)
            if planted and topic == "cart.updated" and _SPIKE[0] <= at < _SPIKE[1]:
                expected *= 5
            count = max(0, round(chance.gauss(expected, expected**0.5 if expected > 0 else 0)))
            if planted and topic == "order.paid" and _SILENCE[0] <= at < _SILENCE[1]:
                count = 0
            counted.append((topic, count, at))
        if (number + 1) % (hours // segments) == 0:
            topics, counts, times = (list(column) for column in zip(*counted, strict=True))
            given = {
                "topics": topics,
                "counts": counts,
                "hours": times,
                "heavy": heavy,
                "light": light,
                "type": changed,
            }
            events += db.execute(_INSERT.format(stream=stream).encode(), given).rowcount
            counted = []
            if number < hours - 1:
                seal(db, stream)
    # It begins here, and holds back no segment.
    db.execute("select pgmb.create_queue(%s, '{order.*}', %s)", [queue, stream])
    _fail(db, queue, chance, planted)
    return events


def request(db: psycopg.Connection[Any]) -> None:
    """Requests to two endpoints over the month, one of them slow."""
    for name in ("warehouse", "partner-feed"):
        db.execute(
            "select pgmb.create_endpoint(%s, %s, '{order.placed}', log => 'all')",
            [name, f"https://{name}.example/"],
        )
    db.execute(_ATTEMPTS, [])


def _fail(db: psycopg.Connection[Any], queue: str, chance: random.Random, planted: bool) -> None:
    letters: list[tuple[datetime, str, datetime]] = []

    def die(at: datetime, error: str) -> None:
        error = error.format(chance.randrange(1, 60))
        letters.append((at, error, at - timedelta(seconds=chance.expovariate(1 / 300))))

    for number in range((END - BEGIN) // _HOUR):
        at = BEGIN + number * _HOUR
        for error in _ERRORS:
            for _ in range(chance.choice((0, 0, 0, 1, 2))):
                die(at + chance.random() * _HOUR, error)
    if planted:
        for _ in range(60):
            die(_BURST + chance.random() * _HOUR, _ERRORS[0])
    add_dead_letters(db, letters, queue, topic="order.paid", payload="{}")
