"""The settings of a queue or a stream, as its `show` prints them."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import msgspec

from pgmb import Broker
from pgmb.errors import translated

_TIMES = frozenset(("created_at", "paused_at"))


def of_queue(broker: Broker, queue: str) -> dict[str, Any]:
    with broker.own_connection() as conn, translated():
        return _read(conn.execute("select pgmb.queue_settings(%s)", [queue]).fetchone())


def of_stream(broker: Broker, stream: str) -> dict[str, Any]:
    with broker.own_connection() as conn, translated():
        return _read(conn.execute("select pgmb.stream_settings(%s)", [stream]).fetchone())


def _read(row: Any) -> dict[str, Any]:
    return {name: _value(name, value) for name, value in row[0].items()}


def _value(name: str, value: Any) -> Any:
    if isinstance(value, str) and name in _TIMES:
        return msgspec.convert(value, datetime)
    if isinstance(value, str) and value.startswith(("P", "-P")):
        try:
            return msgspec.convert(value, timedelta)
        except msgspec.ValidationError:
            # A month has no fixed length.
            return value
    return value
