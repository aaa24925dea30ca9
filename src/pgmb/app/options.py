"""The keywords that an app passes on, so that type checkers find a misspelt one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypedDict

from pgmb.app.handler import Backoff
from pgmb.types import Duration, WhenFull


class AnswerOptions(TypedDict, total=False):
    """Those of `App.on`, but for `batch`."""

    queue: str | None
    concurrency: int | None
    retry: Backoff
    timeout: Duration | None
    max_attempts: int | None
    stream: str | None
    localns: Mapping[str, Any] | None


class QueueOptions(TypedDict, total=False):
    """Those of `create_queue` that `App.queue` does not name."""

    backoff_base: Duration | None
    backoff_factor: float | None
    backoff_max: Duration | None
    backoff_jitter: float | None
    ordered: bool | None
    max_in_flight: int | None
    rps: float | None
    ttl: Duration | None
    max_length: int | None
    when_full: WhenFull | None
    lanes: Iterable[str] | None
    shards: int | None
    fair_by: str | None
    equals: Mapping[str, Any] | None
    filter: str | None
    condition: str | None
    params: Mapping[str, Any] | None


class ScheduleOptions(TypedDict, total=False):
    """Those of `create_schedule` that `App.every` does not name."""

    key: str | None
    headers: Any
    stream: str
    missed: Literal["last", "all"]
