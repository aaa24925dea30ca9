"""Points in a stream's history as people name them: earliest, latest, 10m (ago), a time, a position."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import typer

from pgmb import Broker, Position
from pgmb.cli import durations, output

MEANT = "earliest, latest, a time (2026-01-31T10:00), how long ago (10m), or a position"


class Moment(msgspec.Struct, frozen=True):
    """A point that was named; what it means depends on the stream."""

    named: str
    at: datetime | Position | None = None
    """None for earliest and latest."""

    def __str__(self) -> str:
        return output.cell(self.at) if isinstance(self.at, datetime) else self.named

    def position(self, broker: Broker, stream: str) -> Position:
        if isinstance(self.at, Position):
            return self.at
        if self.at is not None:
            return broker.position_at(stream, self.at)
        return broker.earliest(stream) if self.named == "earliest" else broker.position(stream)


def parse(text: str) -> Moment:
    words = text.strip()
    if words in ("earliest", "latest"):
        return Moment(words)
    if words.startswith("("):
        try:
            return Moment(words, Position.parse(words))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    try:
        # A time without a zone is this machine's.
        return Moment(words, datetime.fromisoformat(words).astimezone())
    except (ValueError, OverflowError):
        pass
    try:
        return Moment(words, datetime.now(UTC) - durations.parse(words))
    except typer.BadParameter:
        raise typer.BadParameter(f"not a point in time: {text!r}. Write {MEANT}.") from None
