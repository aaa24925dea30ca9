"""What a contender must be able to do to be measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import psycopg

from bench.wire import Client

Publish = Callable[[Sequence[bytes]], None]
"""Sends a batch of payloads and commits."""

Consume = Callable[[], int]
"""Settles what it received before, receives the next batch, commits; returns how many it got."""

Receive = Callable[[], "tuple[Any, list[bytes]]"]
"""Receives without settling: what `Settle` needs, and the payloads."""

Settle = Callable[[Any], None]


class Contender(Protocol):
    name: str
    settings: Sequence[str]
    """For the consumer's and publisher's sessions."""
    copy_target: str | None

    def install(self, connection: psycopg.Connection[Any]) -> None:
        """Into an empty database."""

    def fill(self, connection: psycopg.Connection[Any], events: int) -> None:
        """A backlog, published 500 events a transaction, inside the server."""

    def publisher(self, client: Client) -> Publish: ...

    def one_publisher(self, client: Client) -> Callable[[bytes], None]:
        """Sends one payload and commits."""
        ...

    def consumer(self, client: Client, size: int) -> Consume: ...

    def receiver(self, client: Client, size: int) -> tuple[Receive, Settle]: ...
