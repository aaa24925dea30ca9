"""Looking through the log."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from starlette.responses import Response

from pgmb.errors import InvalidArgument
from pgmb.server.dashboard.desk import Desk
from pgmb.server.dashboard.document import curl, read
from pgmb.server.dashboard.gate import Visit
from pgmb.server.dashboard.headers import PAGE
from pgmb.server.dashboard.queues import moment_of
from pgmb.server.problems import Problem, invalid

_SHOWN = 50
_LOOKED_AT = 20_000
_ATTEMPTS = 50

_EVENT = (
    "select seq, id, topic, key, payload::text payload, headers::text headers, published_at"
    " from pgmb.browse_event(%s, %s)"
)


async def search(desk: Desk, visit: Visit) -> Response:
    sample = await desk.sampler.latest(10.0)
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
        found = await _found(desk, stream, asked, before)
    except (InvalidArgument, Problem) as error:
        refused = str(error)
    return desk.render(
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


async def _found(desk: Desk, stream: str, asked: dict[str, str | None], before: int | None) -> dict[str, Any]:
    statement = (
        "select pgmb.browse(stream => %s, topic => %s, key => %s, id => %s, since => %s, until => %s,"
        " before => %s, max => %s, look => %s) found"
    )
    since, until = moment_of(asked["since"]), moment_of(asked["until"])
    given = (stream, asked["topic"], asked["key"], _id(asked["id"]), since, until, before, _SHOWN, _LOOKED_AT)
    found: dict[str, Any] = (await desk.rows(statement, given))[0]["found"]
    return found


async def show(desk: Desk, visit: Visit) -> Response:
    stream, event = await _one(desk, visit)
    attempts = await desk.rows(
        "select a.*, e.name from pgmb.attempt a join pgmb.endpoints e on e.id = a.endpoint"
        " where a.event_id = %s order by a.id desc limit %s",
        (event["id"], _ATTEMPTS),
    )
    return desk.render(
        visit,
        "event.html",
        stream=stream,
        event=event,
        payload=read(event["payload"]),
        headers=read(event["headers"]) if event["headers"] else None,
        curl=curl(str(visit.request.base_url), stream, event),
        attempts=attempts,
    )


async def raw(desk: Desk, visit: Visit) -> Response:
    _, event = await _one(desk, visit)
    return download(event["payload"], str(event["id"]))


def download(payload: str, name: str) -> Response:
    """A payload to the letter, as a file: nothing that a browser would show."""
    headers = {**PAGE, "Content-Disposition": f'attachment; filename="{name}.json"'}
    return Response(payload.encode("utf-8", "replace"), headers=headers, media_type="application/json")


async def _one(desk: Desk, visit: Visit) -> tuple[str, dict[str, Any]]:
    stream, seq = visit.needed("stream"), visit.number("seq")
    rows = await desk.rows(_EVENT, (stream, seq))
    if not rows:
        raise Problem(
            404,
            "not_found",
            "there is no such event",
            hint="Retention may have dropped it, or it rolled back.",
        )
    return stream, rows[0]


def _id(text: str | None) -> UUID | None:
    if text is None:
        return None
    try:
        return UUID(text)
    except ValueError:
        raise invalid(f"not an id: {text[:40]}") from None
