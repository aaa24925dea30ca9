"""What type checkers see of the background publisher. mypy and pyright check this file; nothing here runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_type
from uuid import UUID

import pgmb
from pgmb._core.pending import Unpublished

if TYPE_CHECKING:

    def synchronous(broker: pgmb.Broker) -> None:
        with broker.publisher(flush_every=0.1, max_batch=10, max_pending=100) as publisher:
            assert_type(publisher, pgmb.Publisher)
            assert_type(publisher.enqueue("a", {"b": 1}, key="k", stream="s", dedup_key="d"), UUID)
            assert_type(publisher.failed, list[Unpublished])
            assert_type(publisher.discard_failed(), list[Unpublished])
            publisher.enqueue(5, 1)  # type: ignore[arg-type]

    async def asynchronous(broker: pgmb.AsyncBroker, error: pgmb.PublishFailed) -> None:
        async with broker.publisher() as publisher:
            assert_type(publisher, pgmb.AsyncPublisher)
            assert_type(await publisher.enqueue("a", 1, block=False), UUID)
            await publisher.flush(timeout=5)
        assert_type(error.events, list[pgmb.NewEvent])
