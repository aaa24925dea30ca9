"""Points in a stream's history as a request names them, and positions that somebody else took."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime

import msgspec

from pgmb._async.broker import AsyncBroker
from pgmb.errors import ClusterChanged, ReaderBehind
from pgmb.server.problems import Problem, invalid
from pgmb.types import Position


def position(text: str) -> Position:
    try:
        return Position.parse(text)
    except ValueError as error:
        raise invalid("not a position") from error


async def point(broker: AsyncBroker, stream: str, text: str) -> Position:
    """What `earliest`, `latest`, a time or a position means in a stream."""
    if text == "earliest":
        return await broker.earliest(stream)
    if text == "latest":
        return await broker.position(stream)
    if text.startswith("("):
        return position(text)
    try:
        at = msgspec.convert(text, datetime)
    except msgspec.ValidationError:
        raise invalid("not a point in a stream", "earliest, latest, a time, or a position") from None
    return await broker.position_at(stream, at)


@contextmanager
def taken_elsewhere() -> Generator[None]:
    """Around what uses a position of the client's: if it does not fit, that is no fault of the server."""
    try:
        yield
    except ClusterChanged as error:
        raise Problem(410, "cluster_changed", str(error), hint=error.hint) from error
    except ReaderBehind as error:
        raise Problem(410, "position_ahead", str(error), hint=error.hint) from error
