"""Whether the figures that operators see are right, under traffic of every kind of queue.

Publishers commit late, roll back and rotate; consumers receive, ack, retry, bury and let leases end. What a
consumer is given or settles is written to a ledger in the same transaction. A checker counts what each queue
holds by the log and the ledger alone, with conditions of its own, and compares every figure of
`queue_status`, `stream_status`, `endpoints` and /metrics with it. Where a figure is marked as a bound, the
count must respect the bound.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple, cast

import httpx
import psycopg
from prometheus_client.parser import text_string_to_metric_families

Connection = psycopg.Connection[Any]

_LEDGER = """
create schema ledger;
create table ledger.event (queue text, seq bigint, state text, lease uuid, given_at timestamptz,
  expires_at timestamptz, primary key (queue, seq));
create table ledger.receipt (queue text, at timestamptz default transaction_timestamp(), events integer);
create table ledger.delivery (endpoint uuid, seq bigint, primary key (endpoint, seq));
"""
_TOPICS = ("order.paid", "order.sent", "mail.sent", "audit")
_TOLERANCE = 0.05
"""Seconds by which the checker's notes and the claims may differ: they are written one after the other."""


_RECEIVE = """
with given as (
  insert into ledger.event (queue, seq, state, lease, given_at, expires_at)
  select distinct on (r.seq) %s, r.seq, 'leased', r.lease, transaction_timestamp(),
    clock_timestamp() + %s::interval
  from {received} r order by r.seq
  on conflict (queue, seq) do update
  set state = 'leased', lease = excluded.lease, given_at = excluded.given_at, expires_at = excluded.expires_at
  returning 1)
insert into ledger.receipt (queue, events) select %s, count(*) from given
"""


class Kind(NamedTuple):
    options: str
    """Of create_queue."""
    matches: str = "true"
    """The checker's own condition on an event e of the log."""
    loose: bool = False
    """Whether the queue may have dropped events that the ledger does not know of."""


_OF_ORDERS = "starts_with(e.topic, 'order.')"

KINDS: Mapping[str, Kind] = {
    "plain": Kind("'{#}'"),
    "pattern": Kind("'{order.*}'", _OF_ORDERS),
    "sparse": Kind("'{nothing.here}'", "false"),
    "filtered": Kind("'{#}', filter => '$.payload.n > 700'", "(e.payload ->> 'n')::int > 700"),
    "equal": Kind(
        "'{order.#}', equals => '{\"payload\": {\"kind\": 1}}'",
        f"{_OF_ORDERS} and e.payload ->> 'kind' = '1'",
    ),
    "ordered": Kind("'{#}', ordered => true"),
    "sharded": Kind("'{order.*}', ordered => true, shards => 4", _OF_ORDERS),
    "lanes": Kind("'{order.*,audit}', lanes => '{audit}'", f"{_OF_ORDERS} or e.topic = 'audit'"),
    "limited": Kind("'{order.*}', max_in_flight => 40, rps => 500", _OF_ORDERS),
    "capped": Kind("'{mail.*}', max_length => 1000000", "e.topic = 'mail.sent'"),
    "dropping": Kind(
        "'{mail.*}', max_length => 50, when_full => 'drop_oldest'", "e.topic = 'mail.sent'", loose=True
    ),
}
VARIANTS = ("consumed", "idle", "paused")


@dataclass
class Queue:
    name: str
    matches: str
    variant: str
    loose: bool = False
    receive: str = "pgmb.receive(%s, %s, %s::interval)"
    endpoints: bool = False
    """Whether it feeds endpoints that share it."""
    ordered: bool = False
    """Whether events of a lease that is retried go back to wait behind others of their key."""
    dispatched: bool = False
    """Whether its leases are a dispatcher's: one that expires is no attempt, and its events wait again."""


@dataclass
class Tally:
    figures: int = 0
    wrong: list[str] = field(default_factory=list)

    def check(self, what: str, shown: float | None, low: float | None, high: float | None = None) -> None:
        self.figures += 1
        high = low if high is None else high
        if shown is None or low is None or high is None:
            right = shown is None and low is None
        else:
            right = low - 1e-6 <= shown <= high + 1e-6
        if not right:
            self.wrong.append(
                f"{what}: shown {shown}, counted {low}" + ("" if high == low else f" to {high}")
            )

    @property
    def holds(self) -> bool:
        return not self.wrong and self.figures > 0

    def __str__(self) -> str:
        lines = [*self.wrong[:20], f"numbers: {self.figures} figures, {len(self.wrong)} wrong"]
        return "\n".join(lines)


def prepare(db: Connection) -> list[Queue]:
    db.execute(_LEDGER)
    queues: list[Queue] = []
    for kind, made in KINDS.items():
        for variant in VARIANTS:
            name = f"{kind}-{variant}"
            # Each event may fail any number of times: the ledger does not count attempts.
            options = f"{made.options}, max_attempts => 1000000"
            db.execute(cast("Any", f"select pgmb.create_queue('{name}', {options})"))
            ordered = "ordered" in made.options
            queues.append(Queue(name, made.matches, variant, made.loose, ordered=ordered))
    db.execute("select pgmb.create_queue('conditional', condition => 'e.topic = ''audit''')")
    queues.append(Queue("conditional", "e.topic = 'audit'", "idle"))
    db.execute("select pgmb.create_queue('group', max_attempts => 1000000)")
    db.execute("select pgmb.subscribe('group', '{#}')")
    receive = "pgmb.receive_group(%s, %s, %s::interval)"
    queues.append(Queue("group", "true", "consumed", receive=receive))
    for name in ("one", "two"):
        db.execute(f"select pgmb.create_endpoint('{name}', 'https://{name}.example/', '{{#}}')".encode())
    receive = "(select * from pgmb.receive_deliveries(%s, %s, %s::interval) where lease is not null)"
    queues.append(Queue("webhooks", "true", "consumed", receive=receive, endpoints=True, dispatched=True))
    db.execute(
        "select pgmb.create('worker', 'order.*', 1000000, pgmb.worker('w', 'https://w.example/', null))"
    )
    queues.append(Queue("worker", _OF_ORDERS, "consumed", dispatched=True))
    return queues


class Traffic:
    """Publishers, consumers and maintenance, until stopped."""

    def __init__(self, dsn: str, queues: list[Queue], seed: int) -> None:
        self._dsn = dsn
        self._queues = queues
        self._seed = seed
        self._stop = threading.Event()
        self._failed: list[BaseException] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        self._stop.clear()
        work: list[Callable[[Connection, random.Random], None]] = [
            self._publish,
            self._publish,
            self._maintain,
            self._consume,
            self._consume,
        ]
        threads = [
            threading.Thread(target=self._run, args=(one, self._seed + number))
            for number, one in enumerate(work)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()
        self._seed += len(work)
        if self._failed:
            raise self._failed[0]

    def _run(self, work: Callable[[Connection, random.Random], None], seed: int) -> None:
        chance = random.Random(seed)
        try:
            with psycopg.connect(self._dsn, autocommit=True) as db:
                while not self._stop.is_set():
                    work(db, chance)
                    time.sleep(0.01)
        except BaseException as error:
            self._failed.append(error)

    def _publish(self, db: Connection, chance: random.Random) -> None:
        with db.transaction(force_rollback=chance.random() < 0.1):
            for _ in range(chance.randrange(1, 20)):
                db.execute(
                    "select pgmb.publish(%s, json_build_object('n', %s::int, 'kind', %s::int), key => %s)",
                    (
                        *(chance.choice(_TOPICS), chance.randrange(1000), chance.randrange(3)),
                        f"k{chance.randrange(20)}",
                    ),
                )
            # Some commit late, behind others.
            time.sleep(chance.choice((0, 0, 0.05)))

    def _maintain(self, db: Connection, chance: random.Random) -> None:
        db.execute("select pgmb.tick('main')")
        if chance.random() < 0.2:
            db.execute("select pgmb.maintain()")
        if chance.random() < 0.01:
            db.execute("select pgmb.rotate('main')")

    def _consume(self, db: Connection, chance: random.Random) -> None:
        queue = chance.choice([one for one in self._queues if one.variant == "consumed"])
        lease_for = chance.choice(("1 hour", "1 hour", "1 millisecond"))
        try:
            with db.transaction():
                db.execute("set local statement_timeout = '20s'")
                db.execute(
                    cast("Any", _RECEIVE.format(received=queue.receive)),
                    (queue.name, lease_for, queue.name, chance.randrange(1, 60), lease_for, queue.name),
                )
            for _ in range(2):
                self._settle(db, chance, queue)
        except (psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected):
            return
        except psycopg.Error as error:
            if error.sqlstate != "MB011":
                raise

    def _settle(self, db: Connection, chance: random.Random, queue: Queue) -> None:
        with db.transaction():
            found = db.execute(
                "select lease from ledger.event"
                " where queue = %s and state = 'leased' and expires_at > now() + interval '1 minute'"
                " group by lease order by random() limit 1",
                [queue.name],
            ).fetchone()
            if found is None:
                return
            (lease,) = found
            # Locked: another consumer may settle the same lease.
            locked = db.execute(
                "select seq from ledger.event where queue = %s and lease = %s and state = 'leased'"
                " order by seq for update",
                [queue.name, lease],
            )
            seqs = [seq for (seq,) in locked]
            if not seqs:
                return
            part = seqs if chance.random() < 0.5 else chance.sample(seqs, chance.randrange(1, len(seqs) + 1))
            if queue.endpoints:
                self._deliver(db, chance, lease, part)
                state = "done"
            else:
                action, state = chance.choice(
                    (
                        ("ack(%s, %s::bigint[])", "done"),
                        ("ack(%s, %s::bigint[])", "done"),
                        ("retry(%s, %s::bigint[], '1 hour')", "retry"),
                        ("retry(%s, %s::bigint[], '0 s')", "retry"),
                        ("bury(%s, %s::bigint[])", "dead"),
                    )
                )
                if queue.ordered and state == "retry":
                    part = seqs
                ((settled,),) = db.execute(cast("Any", f"select pgmb.{action}"), (lease, part)).fetchall()
                if settled != len(part):
                    raise AssertionError(f"{queue.name}: {action} settled {settled} of {len(part)}")
            db.execute(
                "update ledger.event set state = %s, lease = null where queue = %s and seq = any (%s)",
                (state, queue.name, part),
            )

    def _deliver(self, db: Connection, chance: random.Random, lease: Any, seqs: list[int]) -> None:
        """Requests to one of the endpoints fail now and then."""
        failed = [seq for seq in seqs if chance.random() < 0.3]
        ((endpoint,),) = db.execute("select id from pgmb.endpoint where name = 'one'").fetchall()
        hour = ["1 hour"] * len(failed)
        db.execute(
            "select pgmb.settle_deliveries(%s, %s::bigint[], %s::bigint[], %s::uuid[], %s::interval[])",
            (lease, seqs, failed, [endpoint] * len(failed), hour),
        )
        # One that expired before may fail again, and waits once.
        db.execute(
            "insert into ledger.delivery select %s, s from unnest(%s::bigint[]) s on conflict do nothing",
            (endpoint, failed),
        )


_COUNTED = """
with mine as (select * from ledger.event where queue = %(queue)s),
  fresh as (
    select count(*) events, extract(epoch from min(e.published_at)) oldest from pgmb.log_main e
    where ({matches}) and not exists (select from mine m where m.seq = e.seq)),
  held as (select *, state = 'leased' and expires_at > %(ended)s surely,
    state = 'leased' and expires_at > %(began)s perhaps from mine),
  received as (select * from ledger.receipt where queue = %(queue)s)
select f.events waiting, f.oldest,
  count(distinct h.lease) filter (where h.surely) leases_low,
  count(distinct h.lease) filter (where h.perhaps) leases_high,
  count(*) filter (where h.surely) leased_low,
  count(*) filter (where h.perhaps) leased_high,
  extract(epoch from min(h.given_at) filter (where h.surely)) oldest_lease,
  count(*) filter (where h.state = 'retry' or h.state = 'leased' and not h.perhaps) retries_low,
  count(*) filter (where h.state = 'retry' or h.state = 'leased' and not h.surely) retries_high,
  count(*) filter (where h.state = 'dead') dead,
  (select coalesce(sum(r.events), 0) / 10.0 from received r
    where r.at > %(ended)s - interval '10 seconds') rate_low,
  (select coalesce(sum(r.events), 0) / 10.0 from received r
    where r.at > %(began)s - interval '10 seconds') rate_high
from fresh f left join held h on true group by f.events, f.oldest
"""


class Span(NamedTuple):
    """The time, by the server's clock, within which figures were taken."""

    began: datetime
    ended: datetime

    def age(self, since: float | None) -> tuple[float | None, float | None]:
        if since is None:
            return None, None
        return self.began.timestamp() - since, self.ended.timestamp() - since


def clock(db: Connection, by: float = 0.0) -> datetime:
    ((now,),) = db.execute("select clock_timestamp() + %s * interval '1 second'", [by]).fetchall()
    return cast("datetime", now)


def counted(db: Connection, queue: Queue, span: Span) -> dict[str, Any]:
    statement = _COUNTED.replace("{matches}", queue.matches)
    cursor = db.execute(cast("Any", statement), {"queue": queue.name, **span._asdict()})
    row = cursor.fetchone()
    assert row is not None
    assert cursor.description is not None
    found: dict[str, Any] = {
        column.name: None if value is None else float(value)
        for column, value in zip(cursor.description, row, strict=True)
    }
    found["oldest"], found["lease_age"] = span.age(found["oldest"]), span.age(found["oldest_lease"])
    if queue.endpoints:
        ((waiting,),) = db.execute("select count(*) from ledger.delivery").fetchall()
        found["retries_low"] += waiting
        found["retries_high"] += waiting
    return found


def compare(
    tally: Tally, where: str, queue: Queue, shown: Mapping[str, Any], exact: Mapping[str, Any]
) -> None:
    """What is shown of a queue, by the names of `queue_status`."""
    at_least, at_most = shown["at_least"], shown["at_most"]
    what = f"{where} {queue.name}"
    low = high = float(exact["waiting"])
    if queue.loose:
        # Events that commit late come in addition to the queue's length.
        low, high = 0.0 if queue.variant == "consumed" else min(50.0, low), min(100.0, high)
    if "waiting" in at_least:
        low = 0.0
    if "waiting" in at_most:
        high = float("inf")
    if wait_again := queue.ordered or queue.dispatched:
        # Which of them wait for their turn and which are tried again, the ledger does not know.
        low, high = low + exact["retries_low"], high + exact["retries_high"]
        tally.check(f"{what} waiting and retries", shown["waiting"] + shown["retries"], low, high)
    else:
        tally.check(f"{what} waiting", shown["waiting"], low, high)
        tally.check(f"{what} retries", shown["retries"], exact["retries_low"], exact["retries_high"])
    if not (queue.loose or at_least or at_most or (wait_again and queue.variant == "consumed")):
        if exact["retries_high"] == 0:
            tally.check(f"{what} oldest", shown["oldest"], *exact["oldest"])
        else:
            # At least the age of the oldest event that nobody received: the ledger does not know due times.
            tally.check(f"{what} oldest", shown["oldest"] or 0.0, exact["oldest"][0] or 0.0, float("inf"))
    if where == "metrics" and queue.variant != "consumed" and not queue.loose:
        # Of those that have received nothing: numbers that were rolled back count too.
        tally.check(f"{what} behind", shown["behind"], exact["waiting"], float("inf"))
    tally.check(f"{what} leases", shown["leases"], exact["leases_low"], exact["leases_high"])
    tally.check(f"{what} leased", shown["leased"], exact["leased_low"], exact["leased_high"])
    if exact["leases_low"] == exact["leases_high"]:
        tally.check(f"{what} oldest lease", shown["lease_age"], *exact["lease_age"])
    tally.check(f"{what} dead", shown["dead"], exact["dead"])
    tally.check(f"{what} received/s", shown["rate"], exact["rate_low"], exact["rate_high"])
    tally.check(f"{what} paused", float(shown["paused"]), float(queue.variant == "paused"))


def check_sql(dsn: str, queues: list[Queue], tally: Tally) -> None:
    """All in one snapshot, whatever happens meanwhile."""
    with psycopg.connect(dsn) as db:
        db.execute("set transaction isolation level repeatable read")
        began = clock(db, -_TOLERANCE)
        rows = {
            row[0]: row
            for row in db.execute(
                "select queue, waiting, extract(epoch from oldest_age)::float8, leases, leased_events,"
                " retries, dead, received_per_second, extract(epoch from oldest_lease_age)::float8,"
                " behind, at_least, at_most, paused_at is not null from pgmb.queue_status"
            )
        }
        names = (
            *("queue", "waiting", "oldest", "leases", "leased", "retries", "dead", "rate", "lease_age"),
            *("behind", "at_least", "at_most", "paused"),
        )
        span = Span(began, clock(db, _TOLERANCE))
        for queue in queues:
            shown = dict(zip(names, rows[queue.name], strict=True))
            compare(tally, "status", queue, shown, counted(db, queue, span))
        ((events, delayed, exact),) = db.execute(
            "select events, delayed, (select count(*) from pgmb.log_main) from pgmb.stream_status"
        ).fetchall()
        tally.check("stream events", events, exact, float("inf"))
        tally.check("stream delayed", delayed, 0)
        # Their patterns take every event that waits in the queue that they share.
        (shared,) = [queue for queue in queues if queue.endpoints]
        ahead = counted(db, shared, span)["waiting"]
        for name, waiting in db.execute("select name, waiting from pgmb.endpoints where name <> 'w'"):
            ((parked,),) = db.execute(
                "select count(*) from ledger.delivery d join pgmb.endpoint e on e.id = d.endpoint"
                " where e.name = %s",
                [name],
            ).fetchall()
            tally.check(f"endpoint {name} waiting", waiting, parked + ahead)


_METRICS = {
    "waiting": "pgmb_queue_waiting",
    "oldest": "pgmb_queue_oldest_age_seconds",
    "leases": "pgmb_queue_leases",
    "leased": "pgmb_queue_leased_events",
    "retries": "pgmb_queue_retries",
    "dead": "pgmb_queue_dead",
    "rate": "pgmb_queue_received_per_second",
    "lease_age": "pgmb_queue_oldest_lease_age_seconds",
    "behind": "pgmb_queue_behind",
    "paused": "pgmb_queue_paused",
}


def check_metrics(dsn: str, queues: list[Queue], tally: Tally) -> None:
    """What is scraped while nothing happens."""
    samples: dict[tuple[str, str], float] = {}
    bounds: dict[tuple[str, str], list[str]] = {}
    with psycopg.connect(dsn, autocommit=True) as db:
        began = clock(db, -_TOLERANCE)
        text = asyncio.run(_scraped(dsn))
        span = Span(began, clock(db, _TOLERANCE))
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.labels.get("queue", "")
            samples[sample.name, name] = sample.value
            if sample.name == "pgmb_queue_bound":
                bounds.setdefault((name, sample.labels["bound"]), []).append(sample.labels["figure"])
    with psycopg.connect(dsn, autocommit=True) as db:
        for queue in queues:
            shown: dict[str, Any] = {
                key: samples.get((metric, queue.name)) for key, metric in _METRICS.items()
            }
            shown["at_least"] = bounds.get((queue.name, "at_least"), [])
            shown["at_most"] = bounds.get((queue.name, "at_most"), [])
            exact = counted(db, queue, span)
            for age in ("oldest", "lease_age"):
                # Metrics show 0 where there is none.
                exact[age] = (0.0, 0.0) if exact[age] == (None, None) else exact[age]
            compare(tally, "metrics", queue, shown, exact)
        ((dead,),) = db.execute("select count(*) from ledger.event where state = 'dead'").fetchall()
        tally.check("metrics dead letters", samples["pgmb_dead_letters_total", ""], dead, float("inf"))


async def _scraped(dsn: str) -> str:
    from pgmb.server import create_app

    application = create_app(dsn, metrics_public=True)
    transport = httpx.ASGITransport(application)
    async with (
        application.lifespan(),
        httpx.AsyncClient(transport=transport, base_url="http://pgmb.test") as client,
    ):
        return (await client.get("/metrics")).text


def run(dsn: str, *, rounds: int = 6, seconds: float = 4.0, seed: int = 0) -> Tally:
    """Each round: traffic, during which SQL's figures are checked, then a pause in which metrics are."""
    tally = Tally()
    with psycopg.connect(dsn, autocommit=True) as db:
        queues = prepare(db)
        traffic = Traffic(dsn, queues, seed)
        paused = False
        for _ in range(rounds):
            with traffic.running():
                until = time.monotonic() + seconds
                while time.monotonic() < until:
                    if paused:
                        check_sql(dsn, queues, tally)
                    time.sleep(0.2)
            if not paused:
                for queue in queues:
                    if queue.variant == "paused":
                        db.execute("select pgmb.pause(%s)", [queue.name])
                paused = True
            check_sql(dsn, queues, tally)
            check_metrics(dsn, queues, tally)
    return tally
