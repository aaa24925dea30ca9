"""What is sent: JSON objects of 168 bytes, distinct, with no character that COPY's text form would escape."""

from __future__ import annotations

SIZE = 168
TOPIC = "order.created"


def payload(number: int, stamp: int = 0) -> bytes:
    """The object with this number. `stamp` is a time in nanoseconds; its key stays first in jsonb too."""
    head = f'{{"t":{stamp:020d},"id":{number:010d},"note":"'.replace(":0", ":1")
    return (head + "x" * (SIZE - len(head) - 2) + '"}').encode()


def payloads(count: int) -> list[bytes]:
    return [payload(number) for number in range(count)]
