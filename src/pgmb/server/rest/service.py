"""What all operations of one application share: requests that wait, and which queue a lease is of."""

from __future__ import annotations

from typing import Final
from uuid import UUID

from pgmb._async.broker import AsyncBroker
from pgmb.errors import LeaseLost
from pgmb.server.asking import rows
from pgmb.server.context import Context
from pgmb.server.rest.waiting import LongPolls

_MOST_REMEMBERED: Final = 10_000
_QUEUE_OF: Final = "select pgmb.queue_of(%s)"


class LeaseQueues:
    """Which queue a lease is of. A queue's id, which its leases begin with, is never used again."""

    def __init__(self, broker: AsyncBroker) -> None:
        self._broker = broker
        self._names: dict[bytes, str] = {}

    async def check(self, lease: UUID, queue: str) -> None:
        """Refuses a lease of another queue just as one that never was: nobody learns whether it is there."""
        name = self._names.get(lease.bytes[:3])
        if name is None:
            name = (await rows(self._broker, _QUEUE_OF, (lease,)))[0][0]
            if name is not None:
                if len(self._names) >= _MOST_REMEMBERED:
                    self._names.clear()
                self._names[lease.bytes[:3]] = name
        if name != queue:
            raise _lost(lease)


class Service:
    """One for each application that runs."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.polls = LongPolls(context.broker, context.limits.long_polls)
        self.leases = LeaseQueues(context.broker)
        context.on_drain(self.polls.drain)


def _lost(lease: UUID) -> LeaseLost:
    # In the words of the database.
    error = LeaseLost(f"lease {lease} is lost")
    error.advise(
        "It expired and its events were delivered again, or the queue was moved."
        " Roll back; extend() long work in time."
    )
    return error
