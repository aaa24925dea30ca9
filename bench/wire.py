"""The client that every contender gets: one prepared statement a call, all of it binary and left raw."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import psycopg
from psycopg import pq

_BINARY = 1

_OIDS = {
    "boolean": 16,
    "bigint": 20,
    "integer": 23,
    "text": 25,
    "json": 114,
    "json[]": 199,
    "jsonb": 3802,
    "jsonb[]": 3807,
    "bigint[]": 1016,
    "uuid": 2950,
    "interval": 1186,
}
_ELEMENT = struct.Struct("!i")
_ARRAY = struct.Struct("!iiIii")
_JSONB_VERSION = b"\x01"


class Result(Protocol):
    """What is looked at of a result."""

    @property
    def ntuples(self) -> int: ...
    def get_value(self, row_number: int, column_number: int) -> bytes | None: ...


Call = Callable[..., Result]


class Client:
    """A connection in autocommit: every call is one round trip and one transaction."""

    def __init__(self, dsn: str, settings: Sequence[str] = ()) -> None:
        self.connection: psycopg.Connection[Any] = psycopg.connect(dsn, autocommit=True)
        self.backend = self.connection.info.backend_pid
        self._raw = self.connection.pgconn
        self._prepared = 0
        for setting in settings:
            self.connection.execute(f"set {setting}")

    def prepare(self, statement: str, *types: str) -> Call:
        """A function of the statement's parameters, each given in its binary form."""
        self._prepared += 1
        name = f"bench_{self._prepared}".encode()
        done = self._raw.prepare(name, statement.encode(), [_OIDS[kind] for kind in types])
        if done.status != pq.ExecStatus.COMMAND_OK:
            raise RuntimeError(f"{statement}\n{done.error_message.decode()}")
        execute, formats = self._raw.exec_prepared, [_BINARY] * len(types)

        def call(*values: bytes | None) -> Result:
            result = execute(name, values, formats, _BINARY)  # type: ignore[arg-type]  # NULL is None
            if result.status != pq.ExecStatus.TUPLES_OK and result.status != pq.ExecStatus.COMMAND_OK:
                raise RuntimeError(f"{statement}\n{result.error_message.decode()}")
            return result

        return call

    def copy(self, target: str, chunk: bytes, times: int) -> None:
        """COPY in the text format, the same rows again and again."""
        with self.connection.cursor() as cursor, cursor.copy(f"copy {target} from stdin") as copy:
            for _ in range(times):
                copy.write(chunk)

    def close(self) -> None:
        self.connection.close()


def integer(value: int) -> bytes:
    return struct.pack("!i", value)


def bigint(value: int) -> bytes:
    return struct.pack("!q", value)


def as_bigint(value: bytes | None) -> int:
    return int.from_bytes(value or b"", signed=True)


def json_array(values: Sequence[bytes]) -> bytes:
    return _array(_OIDS["json"], values)


def jsonb_array(values: Sequence[bytes]) -> bytes:
    return _array(_OIDS["jsonb"], [_JSONB_VERSION + value for value in values])


def jsonb(value: bytes) -> bytes:
    return _JSONB_VERSION + value


def bigint_array(values: Sequence[bytes]) -> bytes:
    """Out of values in their binary form."""
    return _array(_OIDS["bigint"], values)


def _array(element: int, values: Sequence[bytes]) -> bytes:
    pieces = [_ARRAY.pack(1, 0, element, len(values), 1)]
    length = _ELEMENT.pack
    for value in values:
        pieces.append(length(len(value)))
        pieces.append(value)
    return b"".join(pieces)
