"""Coming in with an API key, and leaving."""

from __future__ import annotations

from starlette.responses import RedirectResponse, Response

from pgmb.server.access import COOKIE
from pgmb.server.dashboard.desk import Desk
from pgmb.server.dashboard.gate import Form, Visit, check_origin, read_form
from pgmb.server.dashboard.headers import PAGE
from pgmb.server.problems import Problem


async def show(desk: Desk, visit: Visit) -> Response:
    return desk.render(visit, "login.html", refused=None, next=_inside(visit.given("next")))


async def enter(desk: Desk, visit: Visit) -> Response:
    request = visit.request
    check_origin(request)
    form = await read_form(request)
    target = _inside(form.get("next"))
    try:
        desk.attempts.take(request.client.host if request.client else None)
    except Problem as problem:
        refused = "Too many attempts. Wait a moment and try again."
        answer = desk.render(visit, "login.html", status=429, refused=refused, next=target)
        answer.headers.update(problem.headers)
        return answer
    entered = await desk.context.access.login(form.get("key") or "")
    if entered is None:
        refused = "That is not a key, or it has been taken back."
        return desk.render(visit, "login.html", status=401, refused=refused, next=target)
    session, principal = entered
    if not principal.may("inspect"):
        await desk.context.access.logout(session)
        refused = "This key may not look at everything: it needs the scope inspect or operate."
        return desk.render(visit, "login.html", status=403, refused=refused, next=target)
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


async def leave(desk: Desk, visit: Visit, _: Form) -> Response:
    session = visit.request.cookies.get(COOKIE)
    if session is not None:
        await desk.context.access.logout(session)
    response = RedirectResponse(f"{visit.root}/ui/login", 303, PAGE)
    response.delete_cookie(COOKIE, path=visit.root or "/", httponly=True, samesite="strict")
    return response


def _inside(target: str | None) -> str:
    """Where to go after the login: a page of ours, whatever the address says."""
    if target is None or not (target == "/ui" or target.startswith(("/ui/", "/ui?"))) or "\\" in target:
        return "/ui"
    return target
