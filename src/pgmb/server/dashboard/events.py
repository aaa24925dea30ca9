"""Pages of events: search and show."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from starlette.responses import RedirectResponse, Response

from pgmb.errors import InvalidArgument
from pgmb.server.dashboard.auth import Visit
from pgmb.server.dashboard.formats import curl, parse_json
from pgmb.server.dashboard.queues import moment_of
from pgmb.server.dashboard.rendering import PAGE
from pgmb.server.dashboard.router import PageRouter
from pgmb.server.problems import Problem, invalid
from pgmb.types import EventFate

_SHOWN = 50
_LOOKED_AT = 20_000
_ATTEMPTS = 50

_EVENT = (
    "select seq, id, topic, key, payload::text payload, headers::text headers, published_at"
    " from pgmb.browse_event(%s, %s)"
)


async def search(router: PageRouter, visit: Visit) -> Response:
    sample = await router.sampler.latest(10.0)
    streams = sorted(sample.published)
    stream = visit.given("stream") or ("main" if "main" in streams else streams[0] if streams else "main")
    asked = {
        "topic": visit.given("topic"),
        "key": visit.given("key"),
        "id": visit.given("id"),
        "since": visit.given("since"),
        "until": visit.given("until"),
    }
    before = visit.number("before")
    found: dict[str, Any] = {"events": [], "looked": 0, "next": None}
    refused = None
    try:
        found = await _found(router, stream, asked, before)
        id = _id(asked["id"]) if not found["events"] else None
        if id is not None and (await router.broker.event_fate(id)).found != "unknown":
            # It is in another stream, delayed, or dropped.
            return RedirectResponse(f"{visit.root}/ui/event?id={id}", 303, PAGE)
    except (InvalidArgument, Problem) as error:
        refused = str(error)
    return router.render(
        visit,
        "events.html",
        status=422 if refused else 200,
        refused=refused,
        streams=streams,
        stream=stream,
        asked=asked,
        searching=any(asked.values()),
        before=before,
        found=found,
    )


async def _found(
    router: PageRouter, stream: str, asked: dict[str, str | None], before: int | None
) -> dict[str, Any]:
    statement = (
        "select pgmb.browse(stream => %s, topic => %s, key => %s, id => %s, since => %s, until => %s,"
        " before => %s, max => %s, look => %s) found"
    )
    since, until = moment_of(asked["since"]), moment_of(asked["until"])
    given = (stream, asked["topic"], asked["key"], _id(asked["id"]), since, until, before, _SHOWN, _LOOKED_AT)
    found: dict[str, Any] = (await router.rows(statement, given))[0]["found"]
    return found


async def show(router: PageRouter, visit: Visit) -> Response:
    """An event by its stream and number, or by its id, and what became of it."""
    id = _id(visit.given("id"))
    stream: str | None
    if id is None:
        stream, event = await _one(router, visit)
        fate = await router.broker.event_fate(event["id"], event["published_at"])
    else:
        fate = await router.broker.event_fate(id)
        if fate.found == "unknown":
            raise _missing("It was never published, or its publisher chose the id: search by topic and time.")
        stream = fate.stream
        rows = await router.rows(_EVENT, (stream, fate.seq)) if fate.found == "log" else []
        event = rows[0] if rows else _known(fate)
    attempts = await router.rows(
        "select a.*, e.name from pgmb.attempt a join pgmb.endpoints e on e.id = a.endpoint"
        " where a.event_id = %s order by a.id desc limit %s",
        (event["id"], _ATTEMPTS),
    )
    whole = fate.found == "log"
    return router.render(
        visit,
        "event.html",
        stream=stream,
        event=event,
        fate=fate,
        whole=whole,
        payload=parse_json(event["payload"]) if event["payload"] is not None else None,
        headers=parse_json(event["headers"]) if event["headers"] else None,
        curl=curl(str(visit.request.base_url), stream, event) if whole and stream is not None else None,
        attempts=attempts,
    )


def _known(fate: EventFate) -> dict[str, Any]:
    """What is known of an event that is not in the log, in the form of one that is."""
    return {
        "id": fate.id,
        "seq": fate.seq,
        "topic": fate.topic,
        "key": fate.key,
        "payload": fate.payload,
        "headers": None,
        "published_at": fate.published_at,
    }


async def raw(router: PageRouter, visit: Visit) -> Response:
    _, event = await _one(router, visit)
    return download(event["payload"], str(event["id"]))


def download(payload: str, name: str) -> Response:
    """An unchanged payload as a download, which browsers do not display."""
    headers = {**PAGE, "Content-Disposition": f'attachment; filename="{name}.json"'}
    return Response(payload.encode("utf-8", "replace"), headers=headers, media_type="application/json")


async def _one(router: PageRouter, visit: Visit) -> tuple[str, dict[str, Any]]:
    stream, seq = visit.needed("stream"), visit.number("seq")
    rows = await router.rows(_EVENT, (stream, seq))
    if not rows:
        raise _missing("Retention may have dropped it, or it rolled back.")
    return stream, rows[0]


def _missing(hint: str) -> Problem:
    return Problem(404, "not_found", "there is no such event", hint=hint)


def _id(text: str | None) -> UUID | None:
    if text is None:
        return None
    try:
        return UUID(text)
    except ValueError:
        raise invalid(f"not an id: {text[:40]}") from None
