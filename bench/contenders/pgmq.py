"""PGMQ, from the SQL inside PyPI's `pgmq` package, by the functions its clients call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import psycopg

from bench.contender import Consume, Publish, Receive, Settle
from bench.contenders.filling import fill
from bench.wire import Client, bigint_array, integer, jsonb, jsonb_array

_QUEUE = b"bench"
_LEASE_SECONDS = 30
_ID, _PAYLOAD = 0, 5


class Pgmq:
    """`read`, then `delete` of what was read: two round trips, two transactions, as in its own clients."""

    name = "pgmq"
    settings: Sequence[str] = ()
    copy_target: str | None = None
    read = "select * from pgmq.read($1, $2, $3)"
    remove = "select count(*) from pgmq.delete($1, $2)"

    def install(self, connection: psycopg.Connection[Any]) -> None:
        from pgmq.install import get_embedded_install_sql

        connection.execute(get_embedded_install_sql())
        connection.execute("select pgmq.create('bench')")

    def fill(self, connection: psycopg.Connection[Any], events: int) -> None:
        fill(
            connection,
            "perform pgmq.send_batch('bench', array_fill(body::jsonb, array[many]))",
            events,
        )

    def publisher(self, client: Client) -> Publish:
        call = client.prepare("select count(*) from pgmq.send_batch($1, $2)", "text", "jsonb[]")

        def publish(payloads: Sequence[bytes]) -> None:
            call(_QUEUE, jsonb_array(payloads))

        return publish

    def one_publisher(self, client: Client) -> Callable[[bytes], None]:
        call = client.prepare("select pgmq.send($1, $2)", "text", "jsonb")

        def publish(payload: bytes) -> None:
            call(_QUEUE, jsonb(payload))

        return publish

    def consumer(self, client: Client, size: int) -> Consume:
        receive, settle = self._calls(client, size, bodies=False)

        def consume() -> int:
            ids, _ = receive()
            if ids:
                settle(ids)
            return len(ids)

        return consume

    def receiver(self, client: Client, size: int) -> tuple[Receive, Settle]:
        return self._calls(client, size, bodies=True)

    def _calls(self, client: Client, size: int, bodies: bool) -> tuple[Receive, Settle]:
        read = client.prepare(self.read, "text", "integer", "integer")
        remove = client.prepare(self.remove, "text", "bigint[]")
        lease, most = integer(_LEASE_SECONDS), integer(size)

        def receive() -> tuple[list[bytes], list[bytes]]:
            got = read(_QUEUE, lease, most)
            rows = range(got.ntuples)
            ids = [got.get_value(row, _ID) or b"" for row in rows]
            return ids, [got.get_value(row, _PAYLOAD) or b"" for row in rows] if bodies else []

        def settle(ids: list[bytes]) -> None:
            remove(_QUEUE, bigint_array(ids))

        return receive, settle


class PgmqAsyncRead(Pgmq):
    """Its read does not wait for the disk either, which its functions do not offer: for reference."""

    name = "pgmq, async read"
    read = "select r.* from (select set_config('synchronous_commit', 'off', true)) s, pgmq.read($1, $2, $3) r"


class PgmqArchive(Pgmq):
    """What was read goes to the archive instead."""

    name = "pgmq, archive"
    remove = "select count(*) from pgmq.archive($1, $2)"
