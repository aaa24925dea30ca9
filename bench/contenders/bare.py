"""Bare PostgreSQL: a log of the same columns and the same two indexes, a reader that appends its position.

As tight as it gets, and with none of the promises: a transaction that commits late is skipped, one reader
only, no lease, no retry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import psycopg

from bench.contender import Consume, Publish, Receive, Settle
from bench.contenders.filling import fill
from bench.payload import TOPIC
from bench.wire import Client, as_bigint, bigint, json_array

_COLUMNS = "$2::uuid, seq, id, topic, key, payload, headers, published_at, 1"
_SEQ, _PAYLOAD = 1, 5
_NO_LEASE = bytes(16)


class BareLog:
    name = "bare"
    # The index walk pinned, and planned once.
    settings: Sequence[str] = (
        "enable_seqscan = off",
        "enable_bitmapscan = off",
        "enable_sort = off",
        "plan_cache_mode = force_generic_plan",
    )
    copy_target: str | None = "log (topic, payload)"
    indexes: Sequence[str] = ("create index log_seq on log (seq)", "create index log_xid on log (xid)")

    def install(self, connection: psycopg.Connection[Any]) -> None:
        connection.execute("create sequence seq as bigint cache 1")
        connection.execute(
            """
            create table log (
              xid xid8 not null default pg_current_xact_id(),
              seq bigint not null default nextval('seq'),
              id uuid,
              topic text not null,
              key text,
              payload json not null,
              headers json,
              published_at timestamptz not null default statement_timestamp()
            )"""
        )
        for index in self.indexes:
            connection.execute(index)
        connection.execute(
            "create table place (reader integer not null, id bigint generated always as identity, "
            "seq bigint not null, primary key (reader, id))"
        )

    def fill(self, connection: psycopg.Connection[Any], events: int) -> None:
        fill(
            connection,
            f"insert into log (topic, payload) select '{TOPIC}', body from generate_series(1, many)",
            events,
        )

    def publisher(self, client: Client) -> Publish:
        call = client.prepare(
            "insert into log (topic, payload) select $1, payload from unnest($2) payload", "text", "json[]"
        )
        topic = TOPIC.encode()

        def publish(payloads: Sequence[bytes]) -> None:
            call(topic, json_array(payloads))

        return publish

    def one_publisher(self, client: Client) -> Callable[[bytes], None]:
        call = client.prepare("insert into log (topic, payload) values ($1, $2)", "text", "json")
        topic = TOPIC.encode()

        def publish(payload: bytes) -> None:
            call(topic, payload)

        return publish

    def consumer(self, client: Client, size: int) -> Consume:
        read = f"select {_COLUMNS} from log where seq > $1 order by seq limit {size}"
        first = client.prepare(read, "bigint", "uuid")
        # The position of the batch before is appended with the read of the next.
        settling = client.prepare(
            f"with settled as (insert into place (reader, seq) values (1, $1)) {read}", "bigint", "uuid"
        )
        place, call = _start(client), first

        def consume() -> int:
            nonlocal place, call
            got = call(bigint(place), _NO_LEASE)
            if got.ntuples:
                place = as_bigint(got.get_value(got.ntuples - 1, _SEQ))
            call = settling if got.ntuples else first
            return got.ntuples

        return consume

    def receiver(self, client: Client, size: int) -> tuple[Receive, Settle]:
        call = client.prepare(
            f"select {_COLUMNS} from log where seq > $1 order by seq limit {size}", "bigint", "uuid"
        )
        settled = client.prepare("insert into place (reader, seq) values (1, $1)", "bigint")
        place = _start(client)

        def receive() -> tuple[int, list[bytes]]:
            nonlocal place
            got = call(bigint(place), _NO_LEASE)
            if got.ntuples:
                place = as_bigint(got.get_value(got.ntuples - 1, _SEQ))
            return place, [got.get_value(row, _PAYLOAD) or b"" for row in range(got.ntuples)]

        def settle(at: int) -> None:
            settled(bigint(at))

        return receive, settle


class BareTable(BareLog):
    """The same columns with no index at all: for COPY, what the indexes cost."""

    name = "bare, no index"
    indexes: Sequence[str] = ()


def _start(client: Client) -> int:
    row = client.connection.execute(
        "select seq from place where reader = 1 order by id desc limit 1"
    ).fetchone()
    return 0 if row is None else int(row[0])
