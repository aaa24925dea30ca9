"""An event as one JSON document, the payload to the letter."""

from __future__ import annotations

from typing import Any

import msgspec

from pgmb import Event


def of_event(event: Event) -> dict[str, Any]:
    return {
        "seq": event.seq,
        "id": event.id,
        "topic": event.topic,
        "key": event.key,
        "payload": msgspec.Raw(event.raw),
        "headers": event.headers,
        "published_at": event.published_at,
        "attempt": event.attempt,
        "stream": event.stream,
    }
