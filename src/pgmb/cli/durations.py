"""Durations as options take them."""

from __future__ import annotations

from datetime import timedelta

import typer

from pgmb._core import durations

OFF = timedelta(seconds=-1)
"""What switches a setting of a stream off."""

show = durations.show


def parse(text: str) -> timedelta:
    """A duration; a bare number counts seconds."""
    try:
        return durations.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def parse_or_off(text: str) -> timedelta:
    """A duration, or `off`."""
    return OFF if text.strip().lower() in ("off", "never", "forever") else parse(text)
