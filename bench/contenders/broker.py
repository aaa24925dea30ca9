"""pgmb itself, by its SQL functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import psycopg

from bench.contender import Consume, Publish, Receive, Settle
from bench.contenders.filling import fill
from bench.payload import TOPIC
from bench.revision import before, install
from bench.wire import Client, integer, json_array
from pgmb import schema

QUEUE = "bench"
_RECEIVED = "select lease, seq, id, topic, key, payload, headers, published_at, attempt from pgmb.receive"
_LEASE, _PAYLOAD = 0, 5


class Pgmb:
    """`receive` settles the lease before it in the same round trip and commit."""

    name = "pgmb"
    settings: Sequence[str] = ()
    copy_target: str | None = "pgmb.log_main (topic, payload)"
    raw = "true"
    """Ids that nobody gave are left for the client to derive."""

    def __init__(self, queue: str = QUEUE) -> None:
        self.queue = queue

    def install(self, connection: psycopg.Connection[Any]) -> None:
        schema.install(connection)
        connection.execute("select pgmb.create_queue(%s)", [self.queue])

    def fill(self, connection: psycopg.Connection[Any], events: int) -> None:
        fill(
            connection,
            "insert into pgmb.log_main (topic, payload) "
            f"select '{TOPIC}', body from generate_series(1, many)",
            events,
        )

    def publisher(self, client: Client) -> Publish:
        call = client.prepare("select pgmb.publish_many($1, $2)", "text", "json[]")
        topic = TOPIC.encode()
        return lambda payloads: void(call(topic, json_array(payloads)))

    def one_publisher(self, client: Client) -> Callable[[bytes], None]:
        call = client.prepare("select pgmb.publish($1, $2)", "text", "json")
        topic = TOPIC.encode()
        return lambda payload: void(call(topic, payload))

    def consumer(self, client: Client, size: int) -> Consume:
        call = client.prepare(f"{_RECEIVED}($1, $2, ack => $3, raw => {self.raw})", "text", "integer", "uuid")
        queue, most = self.queue.encode(), integer(size)
        lease: bytes | None = None

        def consume() -> int:
            nonlocal lease
            got = call(queue, most, lease)
            lease = got.get_value(0, _LEASE) if got.ntuples else None
            return got.ntuples

        return consume

    def receiver(self, client: Client, size: int) -> tuple[Receive, Settle]:
        call = client.prepare(f"{_RECEIVED}($1, $2, durable => false, raw => {self.raw})", "text", "integer")
        ack = client.prepare("select pgmb.ack($1)", "uuid")
        queue, most = self.queue.encode(), integer(size)

        def receive() -> tuple[bytes | None, list[bytes]]:
            got = call(queue, most)
            if not got.ntuples:
                return None, []
            bodies = [got.get_value(row, _PAYLOAD) or b"" for row in range(got.ntuples)]
            return got.get_value(0, _LEASE), bodies

        return receive, lambda lease: void(ack(lease))


class PgmbAckApart(Pgmb):
    """`receive`, which does not wait for the disk, and `ack`: two round trips, two transactions."""

    name = "pgmb, ack apart"

    def consumer(self, client: Client, size: int) -> Consume:
        call = client.prepare(f"{_RECEIVED}($1, $2, durable => false, raw => {self.raw})", "text", "integer")
        ack = client.prepare("select pgmb.ack($1)", "uuid")
        queue, most = self.queue.encode(), integer(size)

        def consume() -> int:
            got = call(queue, most)
            if got.ntuples:
                ack(got.get_value(0, _LEASE))
            return got.ntuples

        return consume


class PgmbBefore(Pgmb):
    """pgmb as an earlier revision has it."""

    name = "pgmb, before"

    def install(self, connection: psycopg.Connection[Any]) -> None:
        install(connection.info.dsn, before())
        connection.execute("select pgmb.create_queue(%s)", [self.queue])


class PgmbAckApartBefore(PgmbBefore, PgmbAckApart):
    name = "pgmb, ack apart, before"


class PgmbIdsBySql(Pgmb):
    """As plain SQL callers have it: ids are derived in the server."""

    name = "pgmb, ids by SQL"
    raw = "false"


def void(_: object) -> None:
    """Drops a result that nobody looks at."""
