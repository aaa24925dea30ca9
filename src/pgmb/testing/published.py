"""What was published: to look at, and to assert."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
import psycopg
from psycopg import sql

from pgmb import types as event_types
from pgmb._core import wire
from pgmb._core.patterns import compiled
from pgmb._core.statements import Statement
from pgmb._sync.calls import Calls
from pgmb.errors import StreamNotFound
from pgmb.outbox import ConnectionLike
from pgmb.testing.source import Source, connection
from pgmb.types import Event, Position

if TYPE_CHECKING:
    from pgmb._sync.calls import Pool

_ANY: Final[Any] = object()
_SHOWN_EVENTS = 20
_SHOWN_CHARACTERS = 200

_SALT = "select salt from pgmb.stream where name = %s"
# The log itself and not `between`: it also shows what the caller's own transaction has not yet committed.
_LOG = (
    "select e.seq, e.id, e.topic, e.key, e.payload, e.headers, e.published_at, 1, null from {log} e"
    " where %s::pg_snapshot is null or not pg_visible_in_snapshot(e.xid, %s::pg_snapshot)"
    " order by e.seq"
)
_DELAYED = (
    "select topic, extract(epoch from due_at - clock_timestamp())::float8 from pgmb.delayed where stream = %s"
    " order by due_at limit 100"
)


def published(
    broker: Source,
    topic: str = "#",
    *,
    stream: str = "main",
    since: Position | None = None,
    conn: ConnectionLike | None = None,
) -> list[Event]:
    """The events of a stream whose topics match a pattern, oldest first: all, or those `since` a position.

    With `conn` also those that its transaction has published and not committed. Events with a delay are not
    there before they are due.
    """
    matching = compiled(topic)
    with connection(broker, conn) as reading:
        return [event for event in _log.events(reading, stream, since) if matching.fullmatch(event.topic)]


def assert_published(
    broker: Source,
    topic: str,
    payload: Any = _ANY,
    *,
    matching: Callable[[Any], object] | None = None,
    key: Any = _ANY,
    count: int | None = None,
    stream: str = "main",
    since: Position | None = None,
    conn: ConnectionLike | None = None,
) -> list[Event]:
    """Fail unless such an event was published: at least one, or exactly `count`. Returns them.

    `topic` is a pattern. `payload` is compared as the JSON that it becomes; `matching` is called with each
    payload instead, or as well. `key` is compared too if it is given. With `conn` the events that its
    transaction has not committed count too.
    """
    # pytest shows the caller's line instead of these.
    __tracebackhide__ = True
    described = _describe(topic, payload, matching, key)
    wanted = None if payload is _ANY else msgspec.json.decode(wire.json(payload))
    pattern = compiled(topic)
    with connection(broker, conn) as reading:
        events = _log.events(reading, stream, since)
        waiting = _log.delayed(reading, stream)

    def fits(event: Event) -> bool:
        return bool(
            pattern.fullmatch(event.topic)
            and (payload is _ANY or event.payload == wanted)
            and (key is _ANY or event.key == key)
            and (matching is None or matching(event.payload))
        )

    found = [event for event in events if fits(event)]
    if len(found) == count or (count is None and found):
        return found
    number = "at least one event" if count is None else f"exactly {count} event{'' if count == 1 else 's'}"
    lines = [f"expected {number} {described} in stream {stream!r}, found {len(found)}"]
    lines += _listing(events, {event.seq for event in found}, since)
    lines += [
        f"waiting for its time: {late}, due in {seconds:.0f} s"
        for late, seconds in waiting
        if pattern.fullmatch(late)
    ]
    raise AssertionError("\n".join(lines))


class _Log(Calls):
    """Reads on the connection that it is given."""

    def events(self, reading: psycopg.Connection[Any], stream: str, since: Position | None) -> list[Event]:
        salt = self._rows(Statement(_SALT, (stream,)), reading)
        if not salt:
            raise StreamNotFound(f"stream '{stream}' does not exist")
        log = sql.SQL(_LOG).format(log=sql.Identifier("pgmb", f"log_{stream}")).as_string(reading)
        snapshot = None if since is None else since.snapshot
        rows = self._rows(Statement(cast("Any", log), (snapshot, snapshot)), reading)
        return wire.events(rows, event_types.Source(stream, salt[0][0]))

    def delayed(self, reading: psycopg.Connection[Any], stream: str) -> list[tuple[str, float]]:
        return [(topic, float(left)) for topic, left in self._rows(Statement(_DELAYED, (stream,)), reading)]


# Without connections of its own.
_log = _Log(cast("Pool", None))


def _describe(topic: str, payload: Any, matching: object, key: Any) -> str:
    parts = [f"of topic {topic!r}"]
    if payload is not _ANY:
        parts.append(f"with payload {_short(wire.json(payload))}")
    if matching is not None:
        parts.append(f"matching {getattr(matching, '__qualname__', matching)}")
    if key is not _ANY:
        parts.append(f"with key {key!r}")
    return " ".join(parts)


def _listing(events: list[Event], found: set[int], since: Position | None) -> list[str]:
    when = "" if since is None else " since that position"
    if not events:
        return [f"nothing was published{when}"]
    lines = [f"published{when} (* counts):"]
    if len(events) > _SHOWN_EVENTS:
        lines.append(f"  … {len(events) - _SHOWN_EVENTS} before these")
    for event in events[-_SHOWN_EVENTS:]:
        key = "" if event.key is None else f" key={event.key!r}"
        lines.append(f"{'*' if event.seq in found else ' '} {event.topic}{key} {_short(event.raw)}")
    return lines


def _short(raw: bytes) -> str:
    text = raw.decode(errors="replace")
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
