"""Other libraries' connections as `conn=`: what one must do so that pgmb's statements join its transaction.

pgmb knows asyncpg, psycopg2, pg8000, and SQLAlchemy and Django over any of them. For another library, derive
from `Driver` or `AsyncDriver` and pass an instance.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class Driver(ABC):
    """A connection of another library, used inside the transaction that it has open.

    class Mine(pgmb.drivers.Driver):
        def __init__(self, connection):
            self.connection = connection

        def execute(self, statement, parameters):
            return self.connection.run(statement, parameters)

    broker.publish("order.paid", {"order": 1}, conn=Mine(connection))
    """

    placeholder = "%s"
    """How a statement marks a parameter; "{}" in it stands for the parameter's number, from 1."""

    @abstractmethod
    def execute(self, statement: str, parameters: Sequence[str | None]) -> Sequence[Sequence[Any]]:
        """Run a statement and return its rows: none, or rows of one text.

        Parameters are text, and the statement casts them. Exceptions may be the library's own: pgmb looks for
        the SQLSTATE in `sqlstate`, `pgcode`, `args[0]["C"]`, and in what `orig` and `__cause__` name.
        """


class AsyncDriver(ABC):
    """The same for the asynchronous broker."""

    placeholder = "%s"
    """See `Driver`."""

    @abstractmethod
    async def execute(self, statement: str, parameters: Sequence[str | None]) -> Sequence[Sequence[Any]]:
        """See `Driver`."""
