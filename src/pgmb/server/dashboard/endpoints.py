"""Pages of endpoints: state, attempts, and changes by operators."""

from __future__ import annotations

from typing import Any, Final, get_args
from urllib.parse import quote
from uuid import UUID

import msgspec
from starlette.responses import Response

from pgmb.server.dashboard.auth import Form, Visit
from pgmb.server.dashboard.formats import plural
from pgmb.server.dashboard.forms import Editor, Field, recorded
from pgmb.server.dashboard.router import PageRouter
from pgmb.server.problems import Problem, invalid
from pgmb.server.rest.endpoints import shown
from pgmb.types import AttemptLog, EndpointBody

_ATTEMPTS = 100
_SHOWN = 200


async def listing(router: PageRouter, visit: Visit) -> Response:
    sample = await router.sampler.latest()
    state, wanted = visit.given("state"), visit.given("search")
    found = [
        endpoint
        for endpoint in [shown(one, visit.principal) for one in await router.broker.endpoints()]
        if (state is None or endpoint.state == state)
        and (wanted is None or wanted.lower() in f"{endpoint.name} {endpoint.url}".lower())
    ]
    worst = {"tripped": 0, "disabled": 1, "throttled": 2, "paused": 3, "active": 4}
    found.sort(key=lambda endpoint: (worst[endpoint.state], endpoint.name))
    return router.render(
        visit,
        "endpoints.html",
        endpoints=found[:_SHOWN],
        more=max(0, len(found) - _SHOWN),
        sample=sample,
        state_asked=state,
        search=wanted,
        searching=state is not None or wanted is not None,
    )


async def show(router: PageRouter, visit: Visit) -> Response:
    name = visit.needed("name")
    endpoint = shown(await router.broker.endpoint(name), visit.principal)
    attempts = await router.broker.attempts(name, _ATTEMPTS)
    return router.render(
        visit,
        "endpoint.html",
        endpoint=endpoint,
        attempts=attempts,
        slowest=max((attempt.seconds for attempt in attempts), default=0.0),
    )


_FIELDS: Final = (
    Field("name", "Name", creation=True, needed=True),
    Field("stream", "Stream", creation=True, needed=True, default="main"),
    Field("ordered", "Ordered", "flag", "one event of a key at a time", creation=True),
    Field("url", "URL", needed=True, hint="https://…", wide=True),
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
    Field("body", "Body", "choice", choices=get_args(EndpointBody)),
    Field("batch", "Events per request", "whole", "by default 1"),
    Field("max_in_flight", "Requests in flight", "whole", "by default 16"),
    Field("rps", "Requests per second", "whole", "empty: no limit", cleared=0),
    Field("timeout", "Timeout", "duration", "by default 15s"),
    Field("gzip_above", "Compress above", "whole", "bytes; empty: never", cleared=-1),
    Field("retry_after", "Retry after", "durations", "5s 5m 2h: one for each attempt", wide=True),
    Field("log", "Record attempts", "choice", choices=get_args(AttemptLog)),
    Field("keep_response", "Keep responses", "flag"),
    Field("description", "Description", cleared="", wide=True),
)


async def _load(router: PageRouter, name: str) -> dict[str, Any]:
    return msgspec.structs.asdict(await router.broker.endpoint(name))


async def _create(router: PageRouter, visit: Visit, values: dict[str, Any]) -> Response:
    name, url = values.pop("name"), values.pop("url")
    async with router.changing(visit, "create_endpoint", name, recorded({**values, "url": url})) as conn:
        if any(one.name == name for one in await router.broker.endpoints(conn=conn)):
            # create_endpoint would change it.
            raise Problem(409, "conflict", f"endpoint {name!r} exists already")
        made = await router.broker.create_endpoint(name, url, **values, conn=conn)
    if made.secret is not None:
        return router.render(visit, "secret.html", name=name, made=made)
    return router.done(visit, f"/ui/endpoint?name={quote(name, safe='')}", f"{name} is created")


editor = Editor("endpoint", _FIELDS, _load, _create, "bind_endpoint", "alter_endpoint")


async def change(router: PageRouter, visit: Visit, form: Form) -> Response:
    """Pause, resume, disable or resend."""
    name, action = form.get("name"), form.get("action")
    if name is None:
        raise invalid("the form names no endpoint")
    said = await _changed(router, visit, form, name, action)
    return router.done(visit, f"/ui/endpoint?name={quote(name, safe='')}", said)


async def _changed(router: PageRouter, visit: Visit, form: Form, name: str, action: str | None) -> str:
    broker, reason = router.broker, form.get("reason")
    if action == "pause":
        async with router.changing(visit, "pause_endpoint", name, {"reason": reason}) as conn:
            await broker.pause_endpoint(name, reason, conn=conn)
        return f"{name} is paused: events wait for it"
    if action == "resume":
        async with router.changing(visit, "resume_endpoint", name) as conn:
            await broker.resume_endpoint(name, conn=conn)
        return f"{name} is active"
    if action == "disable":
        if form.get("confirm") != "yes":
            raise invalid("this needs to be confirmed")
        async with router.changing(visit, "disable_endpoint", name, {"reason": reason}) as conn:
            await broker.disable_endpoint(name, reason, conn=conn)
        return f"{name} is disabled"
    if action == "resend":
        return await _resent(router, visit, form, name)
    if action == "redrive-failed":
        detail: dict[str, object] = {}
        async with router.changing(visit, "redrive_failed", name, detail) as conn:
            detail["count"] = count = await broker.redrive_failed(name, conn=conn)
        return f"{plural(count, 'event')} sent to {name} again"
    raise invalid("unknown action")


async def _resent(router: PageRouter, visit: Visit, form: Form, name: str) -> str:
    try:
        ids = [UUID(text) for text in form.all("event")]
    except ValueError:
        raise invalid("not the id of an event") from None
    detail: dict[str, object] = {"ids": [str(id) for id in ids]}
    async with router.changing(visit, "resend", name, detail) as conn:
        detail["count"] = count = await router.broker.resend(name, ids, conn=conn)
    return f"{plural(count, 'event')} sent to {name} again" if count else "The event is no longer in the log."
