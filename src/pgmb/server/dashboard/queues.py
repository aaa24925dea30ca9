"""Pages of queues: status, leases, retries, and changes by operators."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final, get_args
from urllib.parse import quote

import msgspec
from starlette.responses import Response

from pgmb.errors import PgmbError, QueueNotFound
from pgmb.server.dashboard.auth import Form, Visit
from pgmb.server.dashboard.formats import retry_schedule
from pgmb.server.dashboard.forms import Editor, Field, recorded
from pgmb.server.dashboard.router import PageRouter
from pgmb.server.problems import Problem, invalid
from pgmb.types import Holder, NextEvents, WhenFull

_SORTED_BY: Final = {
    "queue": "Queue",
    "stream": "Stream",
    "rate": "Received",
    "waiting": "Waiting",
    "oldest": "Oldest",
    "leased": "Leased",
    "retries": "Retries",
    "dead": "Dead",
}
_LEASES = 100
_NEXT = 10


async def listing(router: PageRouter, visit: Visit) -> Response:
    sample = await router.sampler.latest()
    wanted = visit.given("search")
    column = visit.given("sort") or "queue"
    if column not in _SORTED_BY:
        column = "queue"
    down = visit.given("down") is not None
    queues = [queue for queue in sample.queues if wanted is None or wanted.lower() in queue["queue"].lower()]
    queues.sort(key=lambda queue: queue["queue"])
    queues.sort(key=lambda queue: _key(queue[column]), reverse=down)
    return router.render(
        visit,
        "queues.html",
        queues=queues,
        columns=_SORTED_BY,
        sort=column,
        down=down,
        search=wanted,
        known=len(sample.queues),
    )


async def show(router: PageRouter, visit: Visit) -> Response:
    name = visit.needed("name")
    sample = await router.sampler.latest()
    settings = (await router.rows("select pgmb.queue_settings(%s) settings", (name,)))[0]["settings"]
    leases = await router.rows("select * from pgmb.queue_leases(%s, %s)", (name, _LEASES))
    for lease in leases:
        lease["holder"] = lease["holder"] and str(msgspec.convert(lease["holder"], Holder))
    disagreements = await router.rows("select message, hint from pgmb.queue_disagreements(%s)", (name,))
    curve = await router.rows("select * from pgmb.retry_curve(%s)", (name,))
    coming, refused = await _next(router, name)
    queue = sample.queue(name) or (await router.sampler.latest(0)).queue(name)
    if queue is None:
        raise QueueNotFound(f"there is no queue {name!r}")
    return router.render(
        visit,
        "queue.html",
        name=name,
        queue=queue,
        settings=settings,
        coming=coming,
        refused=refused,
        leases=leases,
        disagreements=disagreements,
        most_leases=_LEASES,
        now=datetime.now(UTC),
        curve=curve,
        due=sum(bucket["events"] for bucket in curve),
        schedule=retry_schedule(settings),
    )


async def _next(router: PageRouter, name: str) -> tuple[NextEvents | None, str | None]:
    """What the queue would deliver next; or why that cannot be told, such as a filter that raises."""
    try:
        return await router.broker.next_events(name, _NEXT), None
    except QueueNotFound:
        raise
    except PgmbError as error:
        return None, str(error)


_FIELDS: Final = (
    Field("name", "Name", creation=True, needed=True),
    Field("stream", "Stream", creation=True, needed=True, default="main"),
    Field("starting", "Read from", "choice", choices=("now", "earliest"), creation=True),
    Field("ordered", "Ordered", "flag", "one event of a key at a time", creation=True),
    Field("fair_by", "Fair by", hint="key or header:NAME", creation=True),
    Field(
        "patterns",
        "Patterns",
        "lines",
        "one a line: * is one word, # any number",
        needed=True,
        default="#",
        wide=True,
    ),
    Field("filter", "Filter", hint="jsonpath: $.payload.total > 100", cleared="", wide=True),
    Field("lease_for", "Lease for", "duration", "by default 30s"),
    Field("max_attempts", "Attempts", "whole", "by default 10"),
    Field("backoff_base", "Backoff: first", "duration", "by default 1s"),
    Field("backoff_factor", "Backoff: factor", "number", "by default 2"),
    Field("backoff_max", "Backoff: at most", "duration", "by default 1h"),
    Field("backoff_jitter", "Backoff: jitter", "number", "0 to 1, by default 0.2"),
    Field("max_in_flight", "Events in flight", "whole", "empty: no limit", cleared=0),
    Field("rps", "Events per second", "number", "empty: no limit", cleared=0),
    Field("ttl", "Time to live", "duration", "empty: no limit", cleared=0),
    Field("max_length", "Length", "whole", "empty: no limit", cleared=0),
    Field("when_full", "When full", "choice", choices=get_args(WhenFull)),
)


async def _load(router: PageRouter, name: str) -> dict[str, Any]:
    settings = (await router.rows("select pgmb.queue_settings(%s) settings", (name,)))[0]["settings"]
    queue = (await router.sampler.latest(0)).queue(name)
    if queue is None:
        raise QueueNotFound(f"there is no queue {name!r}")
    return {**settings, "patterns": queue["patterns"]}


async def _create(router: PageRouter, visit: Visit, values: dict[str, Any]) -> Response:
    name, detail = values.pop("name"), recorded(values)
    earliest = values.pop("starting", None) == "earliest"
    async with router.changing(visit, "create_queue", name, detail) as conn:
        starting = await router.broker.earliest(values["stream"], conn=conn) if earliest else None
        if not await router.broker.create_queue(name, **values, starting=starting, conn=conn):
            raise Problem(409, "conflict", f"queue {name!r} exists already")
    return router.done(visit, f"/ui/queue?name={quote(name, safe='')}", f"{name} is created")


editor = Editor("queue", _FIELDS, _load, _create, "bind", "alter_queue")


async def change(router: PageRouter, visit: Visit, form: Form) -> Response:
    """Pause, resume, seek or purge."""
    name, action = form.get("name"), form.get("action")
    if name is None:
        raise invalid("the form names no queue")
    said = await _changed(router, visit, form, name, action)
    return router.done(visit, f"/ui/queue?name={quote(name, safe='')}", said)


async def _changed(router: PageRouter, visit: Visit, form: Form, name: str, action: str | None) -> str:
    broker = router.broker
    if action == "pause":
        reason = form.get("reason")
        async with router.changing(visit, "pause", name, {"reason": reason}) as conn:
            await broker.pause(name, reason, conn=conn)
        return f"{name} is paused"
    if action == "resume":
        async with router.changing(visit, "resume", name) as conn:
            await broker.resume(name, conn=conn)
        return f"{name} is resumed"
    _confirmed(form)
    if action == "purge":
        async with router.changing(visit, "purge", name) as conn:
            await broker.purge(name, conn=conn)
        return f"{name} is purged: it goes on with what is published from now on"
    if action == "seek":
        return await _sought(router, visit, form, name)
    raise Problem(422, "invalid_argument", "unknown action")


async def _sought(router: PageRouter, visit: Visit, form: Form, name: str) -> str:
    to = form.get("to")
    at = moment_of(form.get("at")) if to == "time" else None
    if to not in ("earliest", "now", "time") or (to == "time" and at is None):
        raise invalid("seek to earliest, now, or a time")
    found = await router.rows("select pgmb.queue_settings(%s) settings", (name,))
    stream = found[0]["settings"]["stream_name"]
    said = at.strftime("%Y-%m-%d %H:%M:%S UTC") if at else to
    async with router.changing(visit, "seek", name, {"to": said}) as conn:
        if to == "earliest":
            position = await router.broker.earliest(stream, conn=conn)
        elif at is None:
            position = await router.broker.position(stream, conn=conn)
        else:
            position = await router.broker.position_at(stream, at, conn=conn)
        await router.broker.seek(name, position, conn=conn)
    return f"{name} reads on from {said}"


def moment_of(text: str | None) -> datetime | None:
    """Parse a time from a form or a query; without a time zone it is UTC."""
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise invalid(f"not a time: {text[:40]}", "Write 2026-01-31T13:45, in UTC.") from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    if not datetime(1970, 1, 1, tzinfo=UTC) < moment < datetime(9000, 1, 1, tzinfo=UTC):
        raise invalid(f"not a time that an event may have: {text[:40]}")
    return moment


def _confirmed(form: Form) -> None:
    if form.get("confirm") != "yes":
        raise invalid("this needs to be confirmed")


def _key(value: Any) -> tuple[bool, Any]:
    return (value is not None, "" if value is None else value)
