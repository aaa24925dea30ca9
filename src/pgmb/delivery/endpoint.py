"""An endpoint, and an event as it is posted to one. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, NamedTuple
from uuid import UUID

from pgmb.delivery.headers import USER_AGENT, check_headers, percent_encoded
from pgmb.delivery.signature import Secret


class Posted(NamedTuple):
    """An event as it is posted. Payload and headers are JSON text, which nothing here parses."""

    id: str
    topic: str
    key: str | None
    payload: str
    headers: str | None
    published_at: datetime


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where events are posted, and how. Headers that cannot be sent raise InvalidArgument.

    Neither secrets nor what may hold some, the url and the headers, show in its repr.
    """

    id: UUID
    name: str
    url: str = field(repr=False)
    body: Literal["payload", "cloudevents"] = "payload"
    batch: int = 1
    timeout: float = 15.0
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    secrets: tuple[Secret, ...] = field(default=(), repr=False)
    gzip_above: int | None = None
    keep_response: bool = False
    retry_after: tuple[float, ...] | None = None
    """Seconds to wait after each failure; None: as the queue says."""
    rps: float | None = None
    max_in_flight: int = 16
    source: str = "/pgmb"
    """What CloudEvents call the source: a URI reference."""
    fixed: dict[str, str] = field(init=False, repr=False, compare=False)
    """The headers of every request to it."""

    def __post_init__(self) -> None:
        # The client would add some of its own that are missing here.
        ours = {"accept": "*/*", "user-agent": USER_AGENT}
        fixed = {**ours, **check_headers(self.headers), "accept-encoding": "identity"}
        if self.batch == 1 and self.body == "payload":
            fixed |= {"ce-specversion": "1.0", "ce-source": percent_encoded(self.source)}
        object.__setattr__(self, "fixed", fixed)
