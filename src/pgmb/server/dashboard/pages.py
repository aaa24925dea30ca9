"""Login, overview, lists of what there is, audit log, and the stream of samples that keeps pages live."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from urllib.parse import unquote

import msgspec
from starlette.responses import RedirectResponse, Response, StreamingResponse

from pgmb.doctor import Level
from pgmb.server.access import COOKIE
from pgmb.server.dashboard.auth import MOST_LOGIN_BYTES, Form, Visit, check_origin, read_form
from pgmb.server.dashboard.curves import Scope, last_values
from pgmb.server.dashboard.formats import figure, number
from pgmb.server.dashboard.queues import moment_of
from pgmb.server.dashboard.rendering import PAGE
from pgmb.server.dashboard.router import PageRouter
from pgmb.server.dashboard.sampler import Sample
from pgmb.server.problems import Problem
from pgmb.server.sse.frames import event_frame, retry_frame

_HEARTBEAT_SECONDS = 15.0
_MOST_VIEWERS = 200
_MOST_QUEUES = 25


async def show_overview(router: PageRouter, visit: Visit) -> Response:
    sample = await router.sampler.latest()
    findings = await router.health.findings()
    problems = [finding for finding in findings if finding.problem]
    ranked = sorted(
        sample.queues, key=lambda queue: (-(queue["dead"] + queue["waiting"]), -queue["rate"], queue["queue"])
    )
    return router.render(
        visit,
        "overview.html",
        sample=sample,
        queues=ranked[:_MOST_QUEUES],
        more=max(0, len(ranked) - _MOST_QUEUES),
        problems=sorted(problems, key=lambda finding: finding.level is not Level.FAIL),
        checked=len([finding for finding in findings if finding.level is not Level.SKIP]),
        skipped=[finding for finding in findings if finding.level is Level.SKIP],
    )


async def list_streams(router: PageRouter, visit: Visit) -> Response:
    sample = await router.sampler.latest()
    streams = await router.rows("select * from pgmb.describe_streams()")
    readers = [reader["stream"] for reader in sample.readers]
    queues = [queue["stream"] for queue in sample.queues]
    for stream in streams:
        stream["rate"] = sample.published.get(stream["stream"], 0.0)
        stream["readers"] = readers.count(stream["stream"])
        stream["queues"] = queues.count(stream["stream"])
    return router.render(visit, "streams.html", streams=streams)


async def show_stream(router: PageRouter, visit: Visit) -> Response:
    name = visit.needed("name")
    sample = await router.sampler.latest()
    settings = (await router.rows("select pgmb.stream_settings(%s) settings", (name,)))[0]["settings"]
    segments = await router.rows("select * from pgmb.stream_segments(%s)", (name,))
    status = await router.rows("select * from pgmb.describe_streams() where stream = %s", (name,))
    readers = await router.rows(
        "select reader, confirmed_at, waiting, waiting_bytes, lag, held_segments, held_for, lost"
        " from pgmb.describe_readers(500) where stream = %s",
        (name,),
    )
    return router.render(
        visit,
        "stream.html",
        name=name,
        settings=settings,
        segments=segments,
        standing=status[0],
        rate=sample.published.get(name, 0.0),
        readers=readers,
        queues=[queue for queue in sample.queues if queue["stream"] == name],
    )


async def list_workers(router: PageRouter, visit: Visit) -> Response:
    return router.render(visit, "workers.html", workers=await router.broker.workers())


async def list_keys(router: PageRouter, visit: Visit) -> Response:
    # As over REST: what a key may do is for operators to know.
    keys = await router.broker.api_keys() if visit.operator else []
    return router.render(visit, "keys.html", keys=keys, now=datetime.now(UTC))


_ENTRIES_PER_PAGE = 100

_ENTRIES = (
    "select id, at, actor, action, subject, detail from pgmb.audit"
    " where id < coalesce(%(before)s, 9223372036854775807)"
    " and (%(actor)s::text is null or actor = %(actor)s)"
    " and (%(action)s::text is null or action = %(action)s)"
    " and (%(subject)s::text is null or strpos(subject, %(subject)s) > 0)"
    " and (%(since)s::timestamptz is null or at >= %(since)s)"
    " and (%(until)s::timestamptz is null or at < %(until)s)"
    " order by id desc limit %(max)s"
)


async def search_audit(router: PageRouter, visit: Visit) -> Response:
    asked = {name: visit.given(name) for name in ("actor", "action", "subject", "since", "until")}
    entries = await router.rows(
        _ENTRIES,
        {
            **asked,
            "since": moment_of(asked["since"]),
            "until": moment_of(asked["until"]),
            "before": visit.number("before"),
            "max": _ENTRIES_PER_PAGE + 1,
        },
    )
    for entry in entries:
        entry["told"] = {
            name: value if isinstance(value, str) else msgspec.json.encode(value).decode()
            for name, value in entry["detail"].items()
        }
    return router.render(
        visit,
        "audit.html",
        asked=asked,
        searching=any(asked.values()),
        entries=entries[:_ENTRIES_PER_PAGE],
        next=entries[_ENTRIES_PER_PAGE - 1]["id"] if len(entries) > _ENTRIES_PER_PAGE else None,
        before=visit.number("before"),
    )


async def show_login(router: PageRouter, visit: Visit) -> Response:
    return router.render(visit, "login.html", refused=None, next=_local_target(visit.given("next")))


async def log_in(router: PageRouter, visit: Visit) -> Response:
    request = visit.request
    check_origin(request)
    form = await read_form(request, MOST_LOGIN_BYTES)
    target = _local_target(form.get("next"))
    try:
        router.attempts.take(request.client.host if request.client else None)
    except Problem as problem:
        refused = "Too many attempts. Wait a moment and try again."
        answer = router.render(visit, "login.html", status=429, refused=refused, next=target)
        answer.headers.update(problem.headers)
        return answer
    entered = await router.context.access.login(form.get("key") or "")
    if entered is None:
        refused = "That is not a key, or it has been taken back."
        return router.render(visit, "login.html", status=401, refused=refused, next=target)
    session, principal = entered
    if not principal.may("inspect"):
        await router.context.access.logout(session)
        refused = "This key may not look at everything: it needs the scope inspect or operate."
        return router.render(visit, "login.html", status=403, refused=refused, next=target)
    response = RedirectResponse(visit.root + target, 303, PAGE)
    response.set_cookie(
        COOKIE,
        session,
        path=visit.root or "/",
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
    return response


async def log_out(router: PageRouter, visit: Visit, _: Form) -> Response:
    session = visit.request.cookies.get(COOKIE)
    if session is not None:
        await router.context.access.logout(session)
    response = RedirectResponse(f"{visit.root}/ui/login", 303, PAGE)
    response.delete_cookie(COOKIE, path=visit.root or "/", httponly=True, samesite="strict")
    return response


def _local_target(target: str | None) -> str:
    """The page to open after the login: always one of the dashboard, to prevent open redirects."""
    if target is None or not (target == "/ui" or target.startswith(("/ui/", "/ui?"))):
        return "/ui"
    # Browsers resolve dots, also encoded ones, drop control characters, and take \\ for /.
    segments = unquote(target.partition("?")[0].partition("#")[0]).split("/")
    if {".", ".."} & set(segments) or "\\" in target or not target.isprintable():
        return "/ui"
    return target


async def stream_samples(router: PageRouter, visit: Visit) -> Response:
    if router.sampler.watchers >= _MOST_VIEWERS:
        raise Problem(503, "busy", "too many viewers on this process", headers={"Retry-After": "10"})
    headers = {**PAGE, "Cache-Control": "no-store, no-transform", "X-Accel-Buffering": "no"}
    if visit.request.method == "HEAD":
        return Response(headers=headers, media_type="text/event-stream")
    return StreamingResponse(_messages(router, visit), headers=headers, media_type="text/event-stream")


async def _messages(router: PageRouter, visit: Visit) -> AsyncGenerator[bytes]:
    sampler = router.sampler
    scope = Scope(
        visit.given("queue"),
        visit.given("stream"),
        visit.given("endpoint"),
        visit.given("endpoints") is not None,
    )
    with sampler.watching():
        # Shielded: a viewer that disconnects during a statement must not break its connection.
        newest = await asyncio.shield(sampler.latest())
        yield retry_frame(2000)
        at = [round(sample.at, 1) for sample in sampler.samples]
        yield _message("history", newest, {"at": at, "curves": router.curves.of(scope)})
        async for sample in sampler.following(newest.number, _HEARTBEAT_SECONDS):
            if sample is None:
                yield b": \n\n"
            else:
                told = last_values(router.curves.of(scope))
                yield _message("sample", sample, {"at": round(sample.at, 1), "curves": told})
            # Stop when the key was revoked or the session ended elsewhere.
            if await asyncio.shield(router.context.access.principal(visit.request)) is None:
                return


def _message(event: str, sample: Sample, told: dict[str, object]) -> bytes:
    badges = {"dead": figure(sample.totals, "dead"), "tripped": number(sample.endpoints["tripped"])}
    return event_frame(msgspec.json.encode({**told, "marks": sample.marks, "badges": badges}), event=event)
