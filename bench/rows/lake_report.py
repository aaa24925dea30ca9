"""lake-report: a month with planted anomalies and one without, judged by the rules of `pgmb lake report`."""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING

from bench.forms import Form
from bench.ground import Ground, Site
from bench.outcome import Check, Outcome

if TYPE_CHECKING:
    from pathlib import Path

    from pgmb.lake.report.figures import Figures

SEEDS = {"tiny": [7], "brief": [7], "quick": [7, 8, 9], "full": list(range(7, 27))}
STREAMS = {"main": True, "quiet": False}
"""Whether anomalies are planted."""
CHECKS = ["report: planted anomalies found", "report: false alarms"]


def run(ground: Ground, form: Form) -> Outcome:
    from harness.month import PLANTED
    from pgmb.lake.report.page import render
    from pgmb.lake.report.rules import judge

    outcome = Outcome(
        "lake-report", "a month of a shop with five anomalies, and one without, half in the lake"
    )
    found: list[int] = []
    alarms = 0
    for seed in SEEDS[form.name]:
        with contextlib.closing(ground.site("pgmb, new log")) as site:
            figures = _months(ground, site, outcome, seed)
        judged = judge(figures)
        planted = [
            one for one in judged.anomalies if one.stream == "main" and (one.rule, one.name) in PLANTED
        ]
        false = [one for one in judged.anomalies if one not in planted]
        found.append(len({one.rule for one in planted}))
        alarms += len(false)
        page = render(figures, judged)
        outcome.notes.append(f"seed {seed}: {found[-1]} found, page of {len(page):,} bytes")
        outcome.notes += [f"false alarm: {one.rule}: {one.stream}: {one.name}: {one.said}" for one in false]
    spent = [one.client_cpu / one.messages * 1e6 for one in outcome.readings]
    outcome.notes.append(f"CPU seconds per million events: {min(spent):.0f} to {max(spent):.0f}")
    outcome.checks = [
        Check(CHECKS[0], min(found), len(PLANTED), unit=" of 5"),
        Check(CHECKS[1], alarms, 0, at_least=False, unit=""),
    ]
    return outcome


def _months(ground: Ground, site: Site, outcome: Outcome, seed: int) -> Figures:
    from harness.lake import Here
    from harness.month import BEGIN, END, fill
    from pgmb.lake.archive import Archiver, init
    from pgmb.lake.report.gather import Asked, gather

    # The site's own queue waits for all events, which is worth an alarm.
    site.connection.execute("select pgmb.drop_queue(queue) from pgmb.describe_queues()")
    site.connection.execute("select pgmb.create_stream('quiet')")
    folders: list[Path] = []
    events = 0
    for stream, planted in STREAMS.items():
        queue = "billing" if planted else "dunning"
        events += fill(site.connection, planted=planted, stream=stream, queue=queue, seed=seed, segments=2)
        folders.append(ground.lab.folder())
        init(site.dsn, stream, str(folders[-1]))
        list(Archiver(site.dsn, stream, Here()).archive())
    url = site.server.url(site.database)
    taken: list[Figures] = []
    asked = Asked(since=BEGIN, until=END)
    outcome.readings.append(
        ground.lab.measure(
            "report", site.server, events, lambda: taken.append(gather(ground.lab.spark, url, asked))
        )
    )
    for folder in folders:
        shutil.rmtree(folder)
        shutil.rmtree(f"{folder}_dead")
    return taken[0]
