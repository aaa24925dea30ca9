"""Options that say how an endpoint is posted to: requests, limits, retries, what is kept."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
import typer

from pgmb.cli import durations, moments
from pgmb.errors import InvalidArgument
from pgmb.types import Position


class Body(StrEnum):
    PAYLOAD = "payload"
    CLOUDEVENTS = "cloudevents"


class Log(StrEnum):
    FAILURES = "failures"
    ALL = "all"


def _waits(text: str) -> list[timedelta]:
    return [durations.parse(word) for word in text.split(",") if word.strip()]


def _document(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise typer.BadParameter(f"not JSON: {error}") from error


def _time(text: str) -> moments.Moment:
    named = moments.parse(text)
    if isinstance(named.at, Position) or named.named == "latest":
        raise typer.BadParameter(f"not a time: {text!r}. Write earliest, 2026-01-31T10:00, or 10m for ago.")
    return named


Batch: TypeAlias = Annotated[int | None, typer.Option(help="Maximum number of events per request.")]
BodyOf: TypeAlias = Annotated[
    Body | None,
    typer.Option(
        "--body",
        metavar="payload|cloudevents",
        help="The body: the payload, or a CloudEvents document.",
        show_default=False,
    ),
]
Rps: TypeAlias = Annotated[int | None, typer.Option(help="Maximum number of requests per second.")]
MaxInFlight: TypeAlias = Annotated[int | None, typer.Option(help="Maximum number of concurrent requests.")]
Timeout: TypeAlias = Annotated[
    timedelta | None,
    typer.Option(parser=durations.parse, metavar="DURATION", help="The timeout of a request."),
]
Headers: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--header", metavar="NAME:VALUE", help="An additional header. May be repeated."),
]
GzipAbove: TypeAlias = Annotated[
    int | None, typer.Option(help="Compress bodies larger than this many bytes.")
]
RetryAfter: TypeAlias = Annotated[
    Any,
    typer.Option(parser=_waits, metavar="DURATIONS", help="The delay after each failure: 0s,5s,5m,1h."),
]
LogOf: TypeAlias = Annotated[
    Log | None,
    typer.Option("--log", metavar="failures|all", help="Which attempts to record.", show_default=False),
]
KeepResponse: TypeAlias = Annotated[
    bool | None,
    typer.Option(
        "--keep-response/--no-keep-response",
        help="Record the first 1 KB of the response.",
        show_default=False,
    ),
]
Description: TypeAlias = Annotated[str | None, typer.Option(help="A description.")]
Metadata: TypeAlias = Annotated[
    Any, typer.Option(parser=_document, metavar="JSON", help="Your own data, stored with the endpoint.")
]
SecretFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="A file with the signing secret, whsec_… or whsk_…; - for standard input."
    ),
]
Time: TypeAlias = Annotated[
    moments.Moment | None,
    typer.Option(
        parser=_time, metavar="TIME", help="A time (2026-01-31T10:00), how long ago (10m), or earliest."
    ),
]


def given(headers: Iterable[str] | None, **settings: Any) -> dict[str, Any]:
    """The settings that were named."""
    named = {
        name: value.value if isinstance(value, StrEnum) else value
        for name, value in settings.items()
        if value is not None
    }
    if headers:
        named["headers"] = dict(_header(text) for text in headers)
    return named


def _header(text: str) -> tuple[str, str]:
    name, sign, value = text.partition(":")
    if not sign or not name.strip():
        # Not shown: it may be a password.
        refused = InvalidArgument("not a header, NAME:VALUE")
        refused.advise("For example: --header 'x-team: billing'")
        raise refused
    return name.strip(), value.strip()


def time(named: moments.Moment | None) -> datetime | None:
    """The time that was named; None for the earliest, and for none."""
    return named.at if named is not None and isinstance(named.at, datetime) else None


def read_secret(file: Path | None) -> str | None:
    if file is None:
        return None
    return (sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")).strip()
