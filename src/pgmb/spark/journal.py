"""What a query writes to its log: one line a step, which names the position."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from pgmb.spark.offsets import Mark

_logger: Final = logging.getLogger("pgmb.spark")


def planned(stream: str, marks: Mapping[str, Mark], numbers: int) -> None:
    """A batch was planned."""
    for home, mark in marks.items():
        _logger.info(
            "stream %s of %s: to read up to %s, number %s, about %s events in all",
            stream,
            home,
            mark.batch or mark.done,
            mark.seq,
            numbers,
        )


def confirmed(stream: str, reader: str, marks: Mapping[str, Mark]) -> None:
    """A batch was committed, and retention was told."""
    for home, mark in marks.items():
        _logger.info("stream %s of %s: reader %s confirmed %s", stream, home, reader, mark.done)
