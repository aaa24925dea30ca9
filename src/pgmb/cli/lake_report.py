"""pgmb lake report: one HTML page on a time of streams, queues and endpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pgmb.cli import moments, output
from pgmb.cli.options import AsJson, Dsn, StorageOption, storage_options
from pgmb.cli.spark.session import Conf, Master

if TYPE_CHECKING:
    from pgmb.lake.report.figures import Figures

Gather = Callable[[str, Any, Mapping[str, str], str, list[str] | None], "Figures"]

_DAYS = timedelta(days=30)


def register(lake: typer.Typer, gather: Gather) -> None:
    """Add the command. `gather` takes the figures of a time, on Spark."""

    @lake.command()
    def report(
        dsn: Dsn = "",
        begin: Annotated[
            moments.Moment | None,
            typer.Option(
                "--from",
                parser=moments.parse,
                metavar="TIME",
                help="A time (2026-01-31T10:00), or how long ago (7d).",
                show_default="30d",
            ),
        ] = None,
        end: Annotated[
            moments.Moment | None,
            typer.Option(
                "--to",
                parser=moments.parse,
                metavar="TIME",
                help="The end, which is not included.",
                show_default="now",
            ),
        ] = None,
        out: Annotated[
            Path, typer.Option("--out", help="The file to write.", dir_okay=False, writable=True)
        ] = Path("report.html"),
        stream: Annotated[
            list[str] | None,
            typer.Option(help="Only these. By default all.", show_default=False),
        ] = None,
        sample: Annotated[
            int, typer.Option(min=1, metavar="N", help="Parse one payload in N to find its fields.")
        ] = 1,
        storage_option: StorageOption = None,
        master: Master = "local[*]",
        conf: Conf = None,
        as_json: AsJson = False,
    ) -> None:
        """Report on a time: volume, delays, failures, keys and fields, and what is unusual in them.

        Reads the log and the lake with Spark, whole hours in UTC, and writes one HTML page.
        """
        now = datetime.now(UTC)
        asked = {
            "since": _time(begin, now - _DAYS),
            "until": _time(end, now),
            "streams": stream,
            "sample": sample,
        }
        figures = gather(dsn, asked, storage_options(storage_option), master, conf)
        # Loaded by now; before, an error says what to install.
        from pgmb.lake.report.page import render
        from pgmb.lake.report.rules import judge

        judged = judge(figures)
        out.write_text(render(figures, judged), encoding="utf-8")
        if as_json:
            found = [one._asdict() for one in judged.anomalies]
            output.json({"out": str(out), "since": figures.since, "until": figures.until, "unusual": found})
            return
        for one in judged.anomalies:
            output.line(f"{one.rule}: {one.stream}: {one.name}: {output.printable(one.said)}")
        events = sum(volume.events for hours in figures.hours.values() for volume in hours.values())
        output.line(f"{events:,} events, {len(judged.anomalies):,} unusual. Written to {out}.")


def _time(named: moments.Moment | None, default: datetime) -> datetime:
    if named is None or named.named == "latest":
        return default
    if not isinstance(named.at, datetime):
        raise typer.BadParameter("--from and --to take a time (2026-01-31T10:00), or how long ago (7d).")
    return named.at
