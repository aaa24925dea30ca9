"""pgmb itself, by its SQL functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any
from uuid import UUID

import psycopg

from bench.contender import Consume, Publish, Receive, Settle
from bench.contenders.filling import fill
from bench.payload import TOPIC
from bench.revision import before, install
from bench.wire import Client, Result, as_bigint, bigint, integer, json_array
from pgmb import schema
from pgmb._core.claiming import Claiming

QUEUE = "bench"
_RECEIVED = "select seq, id, topic, key, payload, headers, published_at, attempt, lease from pgmb.receive"
_SEQ, _PAYLOAD, _ATTEMPT, _LEASE = 0, 4, 7, 8


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
    """As the Python client has it: where it can, it claims and reads in one statement (ADR 35)."""

    name = "pgmb"

    def receiving(self, client: Client, size: int) -> Callable[[bytes | None, bool], Result]:
        receive = super().receiving(client, size)
        claiming = Claiming(queue=1, stream=1)
        prepared: dict[str, tuple[Callable[..., Result], list[str]]] = {}

        def call(ack: bytes | None, durable: bool) -> Result:
            lease = None if ack is None else UUID(bytes=ack)
            while claim := claiming.next(size, None, lease):
                text, parameters = claim.statement
                if text not in prepared:
                    types = _TYPES.findall(text)
                    prepared[text] = _prepare(client, text, types), types
                execute, types = prepared[text]
                got = execute(*map(_encoded, types, parameters))
                made = claiming.claimed(claim, _Rows(got, as_bigint))
                if made is not None:
                    return _Claimed(got, bytes(made)) if made.claim else _NOTHING
            got = receive(ack, durable)
            if got.ntuples:
                claiming.received(_Rows(got, bytes), size)
            return got

        return call


_TYPES = re.compile(r"%s::(\w+)")


def _prepare(client: Client, text: str, types: Sequence[str]) -> Callable[..., Result]:
    number = count(1)
    return client.prepare(re.sub("%s", lambda _: f"${next(number)}", text), *types)


def _encoded(kind: str, value: int | bool | None) -> bytes | None:
    if value is None:
        return None
    return bytes([value]) if kind == "boolean" else (bigint if kind == "bigint" else integer)(value)


class _Rows(Sequence[Any]):
    """What the client looks at of a result's rows: the number of an event, its attempt, and the lease."""

    def __init__(self, result: Result, lease: Callable[[bytes], int | bytes]) -> None:
        self._result = result
        self._lease = lease

    def __len__(self) -> int:
        return self._result.ntuples

    def __getitem__(self, place: Any) -> Any:
        row = range(len(self))[place]
        seq, attempt, lease = (self._result.get_value(row, column) for column in (_SEQ, _ATTEMPT, _LEASE))
        return [
            None if seq is None else as_bigint(seq),
            *[None] * 6,
            as_bigint(attempt),
            None if lease is None else self._lease(lease),
        ]


class _Claimed:
    """A result whose last column is the lease that the client made of the claim's number."""

    def __init__(self, result: Result, lease: bytes) -> None:
        self._result = result
        self._lease = lease
        self.ntuples = result.ntuples

    def get_value(self, row_number: int, column_number: int) -> bytes | None:
        return self._lease if column_number == _LEASE else self._result.get_value(row_number, column_number)


class _Nothing:
    ntuples = 0

    def get_value(self, row_number: int, column_number: int) -> None:
        raise IndexError(row_number, column_number)


_NOTHING = _Nothing()


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


def void(_: object) -> None:
    """Drops a result that nobody looks at."""
