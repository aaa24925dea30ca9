"""The rows by name: each runs on a ground, in a form, and gives its outcome."""

from __future__ import annotations

from collections.abc import Callable

from bench.forms import Form
from bench.ground import Ground
from bench.outcome import Outcome
from bench.rows import (
    backlog,
    before,
    compat,
    consume,
    copy,
    delivery,
    delivery_isolation,
    delivery_matching,
    fan_out,
    handlers,
    isolation,
    lake_archive,
    lake_growth,
    lake_read,
    lake_report,
    latency,
    matching,
    pinned_mixed,
    pinned_xmin,
    publish,
    publish_one,
    receive_one,
    small_traffic,
    spark_growth,
    spark_read,
    spark_write,
    sse,
    steady,
    table_events,
)

Row = Callable[[Ground, Form], Outcome]

ROWS: dict[str, Row] = {
    "before": before.run,
    "small-traffic": small_traffic.run,
    "publish": publish.run,
    "publish-one": publish_one.run,
    "copy": copy.run,
    "consume": consume.run,
    "consume-20": consume.run_20,
    "receive-one": receive_one.run,
    "steady": steady.run,
    "latency": latency.run,
    "pinned-xmin": pinned_xmin.run,
    "pinned-mixed": pinned_mixed.run,
    "backlog": backlog.run,
    "isolation": isolation.run,
    "fan-out": fan_out.run,
    "handlers": handlers.run,
    "matching": matching.run,
    "compat": compat.run,
    "compat-one": compat.run_one,
    "table-events": table_events.run,
    "delivery": delivery.run,
    "delivery-isolation": delivery_isolation.run,
    "delivery-matching": delivery_matching.run,
    "sse": sse.run,
    "lake-archive": lake_archive.run,
    "lake-growth": lake_growth.run,
    "lake-read": lake_read.run,
    "lake-report": lake_report.run,
    "spark-read": spark_read.run,
    "spark-write": spark_write.run,
    "spark-growth": spark_growth.run,
}
