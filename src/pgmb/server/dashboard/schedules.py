"""Pages of schedules: due times, what they publish, and changes by operators."""

from __future__ import annotations

from urllib.parse import quote

from starlette.responses import Response

from pgmb.errors import ScheduleNotFound
from pgmb.server.dashboard.auth import Form, Visit
from pgmb.server.dashboard.formats import parse_json
from pgmb.server.dashboard.router import PageRouter
from pgmb.server.problems import invalid

_SCHEDULE = (
    "select name, cron, timezone, stream, topic, key, payload::text payload, headers::text headers, missed,"
    " next_at, last_at, paused_at from pgmb.schedules() where name = %s"
)


async def listing(router: PageRouter, visit: Visit) -> Response:
    return router.render(visit, "schedules.html", schedules=await router.broker.schedules())


async def show(router: PageRouter, visit: Visit) -> Response:
    name = visit.needed("name")
    found = await router.rows(_SCHEDULE, (name,))
    if not found:
        raise ScheduleNotFound(f"there is no schedule {name!r}")
    headers = found[0]["headers"]
    return router.render(
        visit,
        "schedule.html",
        schedule=found[0],
        payload=parse_json(found[0]["payload"]),
        headers=parse_json(headers) if headers else None,
    )


async def change(router: PageRouter, visit: Visit, form: Form) -> Response:
    """Run now, pause or resume."""
    name, action = form.get("name"), form.get("action")
    if name is None:
        raise invalid("the form names no schedule")
    said = await _changed(router, visit, form, name, action)
    return router.done(visit, f"/ui/schedule?name={quote(name, safe='')}", said)


async def _changed(router: PageRouter, visit: Visit, form: Form, name: str, action: str | None) -> str:
    broker = router.broker
    if action == "pause":
        async with router.changing(visit, "pause_schedule", name) as conn:
            await broker.pause_schedule(name, conn=conn)
        return f"{name} is paused"
    if action == "resume":
        async with router.changing(visit, "resume_schedule", name) as conn:
            await broker.resume_schedule(name, conn=conn)
        return f"{name} is resumed"
    if action == "run":
        if form.get("confirm") != "yes":
            raise invalid("this needs to be confirmed")
        detail: dict[str, object] = {}
        async with router.changing(visit, "run_schedule", name, detail) as conn:
            event = await broker.run_schedule(name, conn=conn)
            detail["event"] = str(event)
        return f"{name} published event {event}"
    raise invalid("unknown action")
