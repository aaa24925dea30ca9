"""pgmb itself, by its SQL functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import psycopg

from bench.contender import Consume, Publish, Receive, Settle
from bench.contenders.filling import fill
from bench.payload import TOPIC
from bench.revision import before, install
from bench.wire import Client, Result, as_bigint, integer, json_array
from pgmb import schema
from pgmb._core import statements

QUEUE = "bench"
_RECEIVED = "select seq, id, topic, key, payload, headers, published_at, attempt, lease from pgmb.receive"
_SEQ, _PAYLOAD, _LEASE = 0, 4, 8
_FIRST_NUMBERS = 4200


class Pgmb:
    """`receive` settles the lease before it in the same round trip and commit."""

    name = "pgmb, SQL"
    settings: Sequence[str] = ()
    copy_target: str | None = "pgmb.log_main (topic, payload)"
    raw = "true"
    """Ids that nobody gave are left for the client to derive."""

    def __init__(self, queue: str = QUEUE) -> None:
        self.queue = queue

    def install(self, connection: psycopg.Connection[Any]) -> None:
        schema.install(connection)
        self.begin(connection)

    def begin(self, connection: psycopg.Connection[Any]) -> None:
        """A queue, and a log that is not new: the client's statement leaves its first numbers to receive."""
        connection.execute("select pgmb.create_queue(%s)", [self.queue])
        self.fill(connection, 5000)
        connection.execute(
            "select pgmb.ack(lease) from (select distinct lease from pgmb.receive(%s, 5000)) r", [self.queue]
        )

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
        call = self.receiving(client, size)
        lease: bytes | None = None

        def consume() -> int:
            nonlocal lease
            got = call(lease, True)
            lease = got.get_value(0, _LEASE) if got.ntuples else None
            return got.ntuples

        return consume

    def receiver(self, client: Client, size: int) -> tuple[Receive, Settle]:
        call = self.receiving(client, size)
        ack = client.prepare("select pgmb.ack($1)", "uuid")

        def receive() -> tuple[bytes | None, list[bytes]]:
            got = call(None, False)
            if not got.ntuples:
                return None, []
            bodies = [got.get_value(row, _PAYLOAD) or b"" for row in range(got.ntuples)]
            return got.get_value(0, _LEASE), bodies

        return receive, lambda lease: void(ack(lease))

    def receiving(self, client: Client, size: int) -> Callable[[bytes | None, bool], Result]:
        """A call of receive, by what it acks and whether it waits for the disk."""
        call = client.prepare(
            f"{_RECEIVED}($1, $2, ack => $3, durable => $4, raw => {self.raw})",
            *("text", "integer", "uuid", "boolean"),
        )
        queue, most = self.queue.encode(), integer(size)
        return lambda ack, durable: call(queue, most, ack, bytes([durable]))


class PgmbNewLog(Pgmb):
    """Without a queue or events, for rows that read the whole log and count its events."""

    name = "pgmb, new log"

    def begin(self, connection: psycopg.Connection[Any]) -> None:
        pass


class PgmbByClient(Pgmb):
    """As the Python client has it: after a full lease it claims and reads in one statement (ADR 35)."""

    name = "pgmb"

    def receiving(self, client: Client, size: int) -> Callable[[bytes | None, bool], Result]:
        receive = super().receiving(client, size)
        text = statements.claim("", 1, None, None, known=0, stream=1, segment=0).text
        for number in range(1, 7):
            text = text.replace("%s", f"${number}", 1)
        claim = client.prepare(text, "text", "integer", "interval", "uuid", "boolean", "bigint")
        queue, most = self.queue.encode(), integer(size)
        known: bytes | None = None

        def call(ack: bytes | None, durable: bool) -> Result:
            nonlocal known
            if known is not None:
                got = claim(queue, most, None, ack, bytes([durable]), known)
                known = _claim_of(got)
                if known is not None:
                    return got
            got = receive(ack, durable)
            # In the first numbers of a segment the client does not try.
            full = got.ntuples == size and as_bigint(got.get_value(0, _SEQ)) > _FIRST_NUMBERS
            known = _claim_of(got) if full else None
            return got

        return call


class PgmbAckApart(PgmbByClient):
    """`receive`, which does not wait for the disk, and `ack`: two round trips, two transactions."""

    name = "pgmb, ack apart"

    def consumer(self, client: Client, size: int) -> Consume:
        call = self.receiving(client, size)
        ack = client.prepare("select pgmb.ack($1)", "uuid")

        def consume() -> int:
            got = call(None, False)
            if got.ntuples:
                ack(got.get_value(0, _LEASE))
            return got.ntuples

        return consume


class PgmbBefore(Pgmb):
    """pgmb as an earlier revision has it, by its SQL functions."""

    name = "pgmb, before"

    def install(self, connection: psycopg.Connection[Any]) -> None:
        install(connection.info.dsn, before())
        self.begin(connection)


class PgmbAckApartBefore(PgmbBefore, PgmbAckApart):
    name = "pgmb, ack apart, before"
    receiving = Pgmb.receiving


class PgmbIdsBySql(Pgmb):
    """As plain SQL callers have it: ids are derived in the server."""

    name = "pgmb, ids by SQL"
    raw = "false"


def _claim_of(got: Result) -> bytes | None:
    """The claim's id, which a lease contains; none where nothing was claimed."""
    lease = got.get_value(0, _LEASE) if got.ntuples else None
    return lease and lease[3:11]


def void(_: object) -> None:
    """Drops a result that nobody looks at."""
