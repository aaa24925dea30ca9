"""Promise 1: kill -9 of the server at any point loses no committed event.

The server really syncs. Publishers note a number once its commit was confirmed; consumers note what they
acked once that was confirmed. After each kill: all that was noted is there, what was acked never comes
again, what was only received comes again.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import psycopg
import pytest

from harness.server import Server
from harness.states import expire_all
from tests.conftest import FreshServer

ROUNDS = 4


class Ledger:
    """What the server confirmed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.published: set[int] = set()
        self.acked: list[int] = []
        self.unsure: set[int] = set()
        self.next = 0

    def number(self) -> int:
        with self.lock:
            self.next += 1
            return self.next


def publisher(dsn: str, ledger: Ledger, copying: bool) -> None:
    """Publishes one or a few at a time until the server dies; what was under way is in doubt."""
    numbers: list[int] = []
    try:
        with psycopg.connect(dsn, autocommit=True) as connection:
            while True:
                numbers = [ledger.number() for _ in range(5 if copying else 1)]
                if copying:
                    with (
                        connection.cursor() as cursor,
                        cursor.copy("copy pgmb.log_main (topic, payload) from stdin") as copy,
                    ):
                        for number in numbers:
                            copy.write_row(("t", str(number)))
                else:
                    connection.execute("select pgmb.publish('t', to_json(%s::int))", numbers)
                ledger.published.update(numbers)
    except psycopg.Error:
        with ledger.lock:
            ledger.unsure.update(numbers)


def consumer(dsn: str, ledger: Ledger, durable: bool) -> None:
    payloads: list[int] = []
    settling = False
    try:
        with psycopg.connect(dsn, autocommit=True) as connection:
            while True:
                settling = False
                rows = connection.execute(
                    "select lease, payload from pgmb.receive('q', 7, durable => %s)", [durable]
                ).fetchall()
                if not rows:
                    continue
                payloads = [payload for _, payload in rows]
                settling = True
                connection.execute("select pgmb.ack(%s)", [rows[0][0]])
                with ledger.lock:
                    ledger.acked += payloads
    except psycopg.Error:
        if settling:
            # The ack may or may not have been confirmed to the disk before the kill.
            with ledger.lock:
                ledger.unsure.update(payloads)


def run_until_killed(server: Server, ledger: Ledger, after: int) -> None:
    threads = [
        threading.Thread(target=publisher, args=(server.dsn(), ledger, False)),
        threading.Thread(target=publisher, args=(server.dsn(), ledger, True)),
        threading.Thread(target=consumer, args=(server.dsn(), ledger, True)),
        threading.Thread(target=consumer, args=(server.dsn(), ledger, False)),
    ]
    goal = len(ledger.published) + after
    # Whichever threads run first: the kill is to meet acks too.
    acked = len(ledger.acked) + 10
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 30
    while (len(ledger.published) < goal or len(ledger.acked) < acked) and time.monotonic() < deadline:
        time.sleep(0.001)
    server.kill()
    for thread in threads:
        thread.join(20)
    server.start_again()


def drain(connection: psycopg.Connection[Any], queue: str) -> list[int]:
    payloads: list[int] = []
    while rows := connection.execute("select lease, payload from pgmb.receive(%s, 500)", [queue]).fetchall():
        payloads += [payload for _, payload in rows]
        connection.execute("select pgmb.ack(%s)", [rows[0][0]])
    return payloads


@pytest.mark.crash
def test_a_killed_server_loses_no_committed_event_and_no_ack(fresh_server: FreshServer, install: Any) -> None:
    server = fresh_server(settings={"fsync": True, "synchronous_commit": "on", "max_wal_size": "64MB"})
    install(server.dsn())
    ledger = Ledger()
    with server.connect() as connection:
        connection.execute("select pgmb.create_queue('q', lease_for => '10 minutes')")
        connection.execute("select pgmb.create_queue('all', lease_for => '10 minutes')")
    for round_number in range(ROUNDS):
        run_until_killed(server, ledger, after=150 * (round_number + 1))
        with server.connect() as connection:
            connection.execute("select pgmb.rotate()")
    with server.connect() as connection:
        every = drain(connection, "all")
        assert len(every) == len(set(every)), "delivered twice to a queue that nobody interrupted"
        assert ledger.published <= set(every), "committed events are missing"
        assert set(every) <= ledger.published | ledger.unsure
        # Whatever was received and never acked is taken over now, without waiting for ten minutes.
        expire_all(connection)
        rest = drain(connection, "q")
    acked = ledger.acked
    assert len(acked) == len(set(acked)), "an acked event was delivered again"
    assert not set(rest) & (set(acked) - ledger.unsure), "an acked event was delivered again"
    assert ledger.published <= set(acked) | set(rest) | ledger.unsure, (
        "a committed event was neither acked nor delivered"
    )
    assert len(acked) > 20, "too little was acked for the kills to have met acks"


@pytest.mark.crash
def test_a_killed_server_keeps_leases_retries_delays_and_dead_letters(
    fresh_server: FreshServer, install: Any
) -> None:
    server = fresh_server(settings={"fsync": True})
    install(server.dsn())
    with server.connect() as connection:
        connection.execute("select pgmb.create_queue('q', lease_for => '1 hour')")
        for number in range(6):
            connection.execute("select pgmb.publish('t', to_json(%s::int))", [number])
        connection.execute("select pgmb.publish('t', '6', delay => '1 hour')")
        leases = {
            payload: (lease, seq)
            for _ in range(5)
            for lease, seq, payload in connection.execute(
                "select lease, seq, payload from pgmb.receive('q', 1)"
            ).fetchall()
        }
        connection.execute("select pgmb.ack(%s)", [leases[0][0]])
        connection.execute("select pgmb.retry(%s, after => '0 s')", [leases[1][0]])
        connection.execute("select pgmb.bury(%s, error => 'broken')", [leases[2][0]])
        connection.execute("select pgmb.ack(%s, %s)", [leases[3][0], [leases[3][1]]])
        open_transaction = psycopg.connect(server.dsn())
        open_transaction.execute("select pgmb.publish('t', '99')")
    server.kill()
    open_transaction.close()
    server.start_again()
    with server.connect() as connection:
        get = connection.execute
        assert get("select payload, attempt from pgmb.receive('q')").fetchall() == [(1, 2)]
        assert get("select payload, attempt from pgmb.receive('q')").fetchall() == [(5, 1)]
        assert get("select payload, attempt from pgmb.receive('q')").fetchall() == []
        assert get("select payload, error from pgmb.dead_letters('q')").fetchall() == [(2, "broken")]
        assert get("select payload from pgmb.delayed").fetchall() == [(6,)]
        assert get("select pgmb.ack(%s)", [leases[4][0]]).fetchone() == (1,)
        assert get("select pgmb.ack(%s)", [leases[0][0]]).fetchone() == (0,)


def test_no_table_of_the_schema_is_unlogged(db: psycopg.Connection[Any]) -> None:
    db.execute("select pgmb.create_stream('other')")
    db.execute("select pgmb.rotate('other')")
    rows = db.execute(
        "select relname from pg_class where relnamespace = 'pgmb'::regnamespace and relpersistence <> 'p'"
    ).fetchall()
    assert rows == []
