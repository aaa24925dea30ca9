"""A line in the driver's log for every batch: where a query stands, how fast it is, what is left.

Spark's own progress has the offsets, the rows and the rates; a Python source cannot add to it. This reads it.

    from pgmb.spark.progress import log_progress
    log_progress(spark)   # then, by logger "pgmb.spark":
    # query hourly, batch 12: 5,000 events of stream main, 8,100 per second, up to (1,"9:9:",5,9,0), 12 left
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.streaming.listener import StreamingQueryListener

from pgmb.spark.source.offsets import SEGMENT_BITS, Offset, ShardOffset
from pgmb.types import Position

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.listener import (
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
        SourceProgress,
        StreamingQueryProgress,
    )

_logger: Final = logging.getLogger("pgmb.spark")
_OF_A_SEGMENT: Final = (1 << SEGMENT_BITS) - 1


def log_progress(spark: SparkSession) -> Progress:
    """Log the queries of a session, those under way included. `spark.streams.removeListener` ends it."""
    listener = Progress()
    spark.streams.addListener(listener)
    return listener


class Progress(StreamingQueryListener):
    """Logs what queries read from pgmb. Batches without events are logged at level DEBUG."""

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        pass

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        for source in event.progress.sources:
            told = line(event.progress, source)
            if told is not None:
                _logger.log(logging.INFO if source.numInputRows else logging.DEBUG, "%s", told)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        pass


def line(progress: StreamingQueryProgress, source: SourceProgress) -> str | None:
    """What a batch did with a source; None if that is not pgmb."""
    end = _offset(source.endOffset)
    if end is None:
        return None
    # A rate of nothing is no number.
    rate = source.processedRowsPerSecond if source.numInputRows else 0.0
    reached = ", ".join(f"{mark.to_position or mark.from_position}" for mark in end.shards.values())
    left = _left(end, _offset(source.latestOffset))
    return (
        f"query {progress.name or progress.id}, batch {progress.batchId}: {source.numInputRows:,} events of"
        f" stream {end.stream}, {rate:,.0f} per second, up to {reached}{left}"
    )


def _offset(text: str | None) -> Offset | None:
    try:
        given: Any = json.loads(text or "null")
        return Offset.parse(given)
    except (AttributeError, ValueError):
        return None


def _left(end: Offset, latest: Offset | None) -> str:
    if latest is None:
        return ""
    left, more = 0, ""
    for home, mark in latest.shards.items():
        first, last = _number(end.shards.get(home, mark)), _number(mark)
        if first >> SEGMENT_BITS == last >> SEGMENT_BITS:
            left += max(last - first, 0)
        else:
            # How many numbers a segment in between had is for the database to say.
            left += last & _OF_A_SEGMENT
            more = "more than "
    return f", {more}{left:,} left"


def _number(mark: ShardOffset) -> int:
    return mark.seq if mark.to_position is not None else Position.parse(mark.from_position).seq
