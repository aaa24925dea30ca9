"""Failover to a standby: queues keep what survived, positions of outside readers are right or refused."""

from __future__ import annotations

import random
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from faults.correctness import application
from faults.correctness.application import Publisher
from faults.correctness.consumer import Consumer
from faults.correctness.outside import BySpark, BySql, BySse, ByTail, Outside, RefusedError
from faults.correctness.run import QUEUE, Result
from faults.correctness.verdict import History, Verdict, judge
from faults.crew import Crew
from harness.postgres import Server, create_database
from pgmb import schema

_LEASE = 1.0
_EVENTS = 40
"""Published in each of the three phases."""


@dataclass(slots=True)
class _Account:
    """What all failovers of a run gave."""

    events: int = 0
    survived: int = 0
    lost_with_primary: int = 0
    refused: int = 0
    verdicts: list[Verdict] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def run(
    *,
    major: int,
    failovers: int,
    synchronous: bool,
    folder: Path,
    spark: int = 0,
    sse: bool = True,
    seed: int,
) -> Result:
    """`failovers` one after another, each with servers of its own; in `spark` of them Spark reads too."""
    began = time.monotonic()
    account = _Account()
    for number in range(failovers):
        place = folder / str(number)
        place.mkdir()
        _fail_over(
            account,
            random.Random(f"{seed} {number}"),
            major=major,
            synchronous=synchronous,
            folder=place if number < spark else None,
            sse=sse,
        )
    queues = account.verdicts
    verdict = Verdict(
        events=sum(each.events for each in queues),
        lost=[event for each in queues for event in each.lost],
        doubled=[event for each in queues for event in each.doubled],
        phantom=[event for each in queues for event in each.phantom],
        unexplained=[event for each in queues for event in each.unexplained],
        disordered=[],
        longest_stall=max(each.longest_stall for each in queues),
    )
    kind = "synchronous" if synchronous else "asynchronous"
    return Result(
        f"{kind} failover",
        verdict,
        # An asynchronous failover must lose something, or it shows nothing.
        account.lost_with_primary > 0 or synchronous,
        f"{failovers} failovers, {account.lost_with_primary} events lost with the primary, outside readers: "
        f"{len(account.skipped)} skipped, {len(account.repeated)} repeated, {account.refused} refused",
        time.monotonic() - began,
        [*account.skipped, *account.repeated, *account.problems],
    )


def _fail_over(
    account: _Account,
    chance: random.Random,
    *,
    major: int,
    synchronous: bool,
    folder: Path | None,
    sse: bool,
) -> None:
    with ExitStack() as stack:
        primary = stack.enter_context(Server.start(major, name="primary"))
        name = create_database(primary)
        dsn = primary.dsn(name)
        schema.install(dsn)
        application.prepare(dsn)
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(f"select pgmb.create_queue('{QUEUE}', lease_for => '{_LEASE} s')")
        standby = stack.enter_context(primary.standby())
        if synchronous:
            primary.configure({"synchronous_standby_names": "standby", "synchronous_commit": "on"})
        publisher = Publisher(0, 3, QUEUE)
        readers: list[Outside] = [BySql(dsn), ByTail(dsn)]
        # These stop before the failover, at positions that the standby knows.
        early: list[Outside] = [BySql(dsn, "SQL, early"), ByTail(dsn, "tail, early")]
        if sse:
            readers.append(BySse(dsn))
        if folder is not None:
            readers.append(BySpark(dsn, folder))
        for reader in readers:
            stack.callback(reader.close)
        first = _traffic(dsn, publisher, chance)
        for reader in (*readers, *early):
            reader.read(dsn, first)
        standby.wait_for_replay(primary)
        if not synchronous:
            standby.configure({"primary_conninfo": ""})
            _wait_until_apart(standby)
        second = _traffic(dsn, publisher, chance)
        for reader in readers:
            reader.read(dsn, [*first, *second])
        primary.kill()
        standby.promote()
        promoted = standby.dsn(name)
        third = _traffic(promoted, publisher, chance, consume=False)
        resumed = time.time()
        history = History(QUEUE, since=resumed + _LEASE)
        _drain(promoted, history, chance)
        with psycopg.connect(promoted, autocommit=True) as connection:
            ledger = application.published(connection, [publisher])
            account.verdicts.append(
                judge(
                    ledger,
                    application.effects(connection),
                    application.dead_letters(connection, [QUEUE]),
                    [history],
                )
            )
        survived = {event.number for event in ledger}
        account.events += len(survived)
        account.lost_with_primary += len({*first, *second, *third} - survived)
        if synchronous and len({*first, *second, *third} - survived):
            account.problems.append("a synchronous failover lost committed events")
        for reader in (*readers, *early):
            _read_on(account, reader, promoted, survived, may_refuse=not synchronous and reader in readers)


def _read_on(account: _Account, reader: Outside, dsn: str, survived: set[int], *, may_refuse: bool) -> None:
    """Has a reader go on after the failover: it gets the rest, each event once, or is refused."""
    try:
        reader.read(dsn, survived)
    except RefusedError as error:
        account.refused += 1
        if not may_refuse:
            account.problems.append(f"{reader.name} was refused a position that the standby knew: {error}")
        return
    if missing := survived - set(reader.seen):
        account.skipped.append(
            f"{reader.name} skipped {len(missing)} of {len(survived)} events without an error"
        )
    if repeated := {number for number in survived if reader.seen.count(number) > 1}:
        account.repeated.append(f"{reader.name} read {len(repeated)} events twice")


def _traffic(dsn: str, publisher: Publisher, chance: random.Random, *, consume: bool = True) -> list[int]:
    """Publishes and consumes; some leases are abandoned. Returns the numbers that were committed."""
    numbers: list[int] = []
    with (
        psycopg.connect(dsn, autocommit=True) as connection,
        Consumer(dsn, QUEUE, "before", History(QUEUE), _LEASE) as consumer,
    ):
        while len(numbers) < _EVENTS:
            made = publisher.publish(connection, 1)
            publisher.committed(made)
            numbers += made
            if (
                consume
                and chance.random() < 0.3
                and (held := consumer.receive(chance.choice((1, 5)))) is not None
            ):
                if chance.random() < 0.7:
                    consumer.ack(held)
                elif chance.random() < 0.5:
                    consumer.give_back("retry", held)
    return numbers


def _drain(dsn: str, history: History, chance: random.Random) -> None:
    done = threading.Event()

    def work() -> None:
        with Consumer(dsn, QUEUE, "after", history, _LEASE) as consumer:
            while not done.is_set():
                held = consumer.receive(10)
                if held is None:
                    time.sleep(0.02)
                else:
                    consumer.ack(held)

    crew = Crew()
    threads = [crew.start(f"worker {number}", work) for number in range(2)]
    deadline = time.monotonic() + 15
    with psycopg.connect(dsn, autocommit=True) as connection:
        while application.unsettled(connection, [QUEUE]) and time.monotonic() < deadline:
            crew.check()
            time.sleep(0.05)
    done.set()
    crew.join(*threads)


def _wait_until_apart(standby: Server) -> None:
    deadline = time.monotonic() + 20
    with standby.connect() as connection:
        while connection.execute("select from pg_stat_wal_receiver").fetchone() is not None:
            if time.monotonic() > deadline:
                raise TimeoutError("the standby still streams")
            time.sleep(0.02)
