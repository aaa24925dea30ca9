"""Everything at a glance: rates, depth, age, what is wrong."""

from __future__ import annotations

from starlette.responses import Response

from pgmb.doctor import Level
from pgmb.server.dashboard.desk import Desk
from pgmb.server.dashboard.gate import Visit

_MOST_QUEUES = 25


async def show(desk: Desk, visit: Visit) -> Response:
    sample = await desk.sampler.latest()
    findings = await desk.health.findings()
    problems = [finding for finding in findings if finding.problem]
    ranked = sorted(
        sample.queues, key=lambda queue: (-(queue["dead"] + queue["waiting"]), -queue["rate"], queue["queue"])
    )
    return desk.render(
        visit,
        "overview.html",
        sample=sample,
        queues=ranked[:_MOST_QUEUES],
        more=max(0, len(ranked) - _MOST_QUEUES),
        problems=sorted(problems, key=lambda finding: finding.level is not Level.FAIL),
        checked=len([finding for finding in findings if finding.level is not Level.SKIP]),
        skipped=[finding for finding in findings if finding.level is Level.SKIP],
    )
