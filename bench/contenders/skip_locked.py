"""A table of jobs, taken by DELETE ... FOR UPDATE SKIP LOCKED. For reference: no retry, no second reader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import psycopg

from bench.contender import Consume, Publish, Receive, Settle
from bench.contenders.filling import fill
from bench.payload import TOPIC
from bench.wire import Client, json_array

_PAYLOAD = 3


class SkipLocked:
    name = "skip locked"
    settings: Sequence[str] = ("enable_seqscan = off", "enable_bitmapscan = off")
    copy_target: str | None = None

    def install(self, connection: psycopg.Connection[Any]) -> None:
        connection.execute(
            """
            create table job (
              id bigint generated always as identity primary key,
              topic text not null,
              key text,
              payload json not null,
              headers json,
              published_at timestamptz not null default statement_timestamp()
            )"""
        )

    def fill(self, connection: psycopg.Connection[Any], events: int) -> None:
        fill(
            connection,
            f"insert into job (topic, payload) select '{TOPIC}', body from generate_series(1, many)",
            events,
        )

    def publisher(self, client: Client) -> Publish:
        call = client.prepare(
            "insert into job (topic, payload) select $1, payload from unnest($2) payload", "text", "json[]"
        )
        topic = TOPIC.encode()

        def publish(payloads: Sequence[bytes]) -> None:
            call(topic, json_array(payloads))

        return publish

    def one_publisher(self, client: Client) -> Callable[[bytes], None]:
        call = client.prepare("insert into job (topic, payload) values ($1, $2)", "text", "json")
        topic = TOPIC.encode()

        def publish(payload: bytes) -> None:
            call(topic, payload)

        return publish

    def consumer(self, client: Client, size: int) -> Consume:
        call = client.prepare(_take(size))
        return lambda: call().ntuples

    def receiver(self, client: Client, size: int) -> tuple[Receive, Settle]:
        call = client.prepare(_take(size))

        def receive() -> tuple[None, list[bytes]]:
            got = call()
            return None, [got.get_value(row, _PAYLOAD) or b"" for row in range(got.ntuples)]

        return receive, lambda _: None


def _take(size: int) -> str:
    return (
        "delete from job where id = any (array("
        f"select id from job order by id limit {size} for update skip locked)) "
        "returning id, topic, key, payload, headers, published_at"
    )
