"""Options that say how a queue delivers: leases, retries, order, limits."""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Any, TypeAlias

import typer

from pgmb.cli import durations


class WhenFull(StrEnum):
    REFUSE = "refuse"
    DROP_OLDEST = "drop_oldest"


def _duration(text: str) -> Any:
    return typer.Option(parser=durations.parse, metavar="DURATION", help=text)


LeaseFor: TypeAlias = Annotated[timedelta | None, _duration("How long a consumer holds what it received.")]
MaxAttempts: TypeAlias = Annotated[
    int | None, typer.Option(help="Attempts before an event becomes a dead letter.")
]
BackoffBase: TypeAlias = Annotated[timedelta | None, _duration("The pause before the second attempt.")]
BackoffFactor: TypeAlias = Annotated[float | None, typer.Option(help="The factor by which the delay grows.")]
BackoffMax: TypeAlias = Annotated[timedelta | None, _duration("The longest pause.")]
BackoffJitter: TypeAlias = Annotated[float | None, typer.Option(help="The random part of the delay, 0 to 1.")]
MaxInFlight: TypeAlias = Annotated[
    int | None, typer.Option(help="Maximum number of events leased at a time.")
]
Rps: TypeAlias = Annotated[float | None, typer.Option(help="Maximum number of events delivered per second.")]
Ttl: TypeAlias = Annotated[timedelta | None, _duration("Older events go to the dead letters unseen.")]
MaxLength: TypeAlias = Annotated[int | None, typer.Option(help="Maximum number of waiting events.")]
When: TypeAlias = Annotated[
    WhenFull | None,
    typer.Option(
        "--when-full",
        metavar="refuse|drop_oldest",
        help="What happens when the queue is full.",
        show_default=False,
    ),
]


def given(**settings: Any) -> dict[str, Any]:
    """The settings that were named."""
    return {
        name: value.value if isinstance(value, WhenFull) else value
        for name, value in settings.items()
        if value is not None
    }
