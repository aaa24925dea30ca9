"""Routes requests to page handlers, with what the handlers share: database, sampler, rendering."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias
from urllib.parse import quote, urlsplit

from psycopg import AsyncConnection
from psycopg.rows import dict_row
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from pgmb.errors import translated
from pgmb.server.access import Verb
from pgmb.server.application import Context
from pgmb.server.changes import changing
from pgmb.server.dashboard.auth import Form, NotSignedInError, Visit, admit, check_origin, read_form
from pgmb.server.dashboard.curves import CurveCache
from pgmb.server.dashboard.rendering import PAGE, Assets, Renderer
from pgmb.server.dashboard.sampler import Health, Sampler
from pgmb.server.limits import Rates
from pgmb.server.problems import Problem, problem_of, unauthorised

PageHandler: TypeAlias = Callable[["PageRouter", Visit], Awaitable[Response]]
ChangeHandler: TypeAlias = Callable[["PageRouter", Visit, Form], Awaitable[Response]]

_NOTE_COOKIE = "pgmb_note"


class PageRouter:
    """Checks access, calls the handler of a page, and renders its errors."""

    def __init__(self, context: Context, assets: Assets) -> None:
        self.context = context
        self.broker = context.broker
        self.sampler = Sampler(context.broker)
        self.curves = CurveCache(self.sampler)
        self.renderer = Renderer(assets)
        self.health = Health(context.broker)
        self.attempts = Rates(0.5, 10)
        """Rate limit of logins, per address."""

    async def close(self) -> None:
        await self.sampler.close()
        await self.health.close()

    async def drain(self) -> None:
        """End the live streams, which would not end by themselves."""
        self.sampler.leave()

    def open(self, handler: PageHandler) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint without authentication."""

        async def answer(request: Request) -> Response:
            visit = Visit(request, None)
            try:
                self.context.access.count_address(request)
                return await handler(self, visit)
            except Exception as error:
                return self._failed(visit, error)

        return answer

    def page(self, path: str, handler: PageHandler) -> Route:
        """A route to a page, for visitors with the scope `inspect`."""

        async def answer(request: Request) -> Response:
            visit = Visit(request, None)
            try:
                visit = await admit(self.context.access, request, "inspect")
                return await handler(self, visit)
            except NotSignedInError:
                return self._redirect_to_login(visit)
            except Exception as error:
                return self._failed(visit, error)

        return Route(path, answer, methods=["GET"])

    def change(self, path: str, handler: ChangeHandler, verb: Verb = "operate") -> Route:
        """A route to a form, with CSRF checks, for visitors with the scope `verb`."""

        async def answer(request: Request) -> Response:
            visit = Visit(request, None)
            try:
                check_origin(request)
                visit = await admit(self.context.access, request, "inspect")
                form = await read_form(request)
                assert visit.principal is not None  # noqa: S101
                self.context.access.check_csrf(visit.principal, form.get("csrf"))
                if not visit.principal.may(verb):
                    raise Problem(
                        403, "forbidden", "this session is read-only: it needs a key with the scope operate"
                    )
                return await handler(self, visit, form)
            except NotSignedInError:
                return self._redirect_to_login(visit)
            except Exception as error:
                return self._failed(visit, error)

        return Route(path, answer, methods=["POST"])

    async def nothing(self, _: PageRouter, __: Visit) -> Response:
        raise Problem(404, "not_found", "page not found")

    async def rows(self, statement: str, parameters: Any = ()) -> list[dict[str, Any]]:
        """Run a statement with a timeout of five seconds, and return its rows."""
        with translated():
            async with self.broker.own_connection() as connection, connection.transaction():
                await connection.execute("set local statement_timeout = '5s'")
                cursor = connection.cursor(row_factory=dict_row)
                await cursor.execute(statement.encode(), parameters)
                return await cursor.fetchall()

    @asynccontextmanager
    async def changing(
        self, visit: Visit, action: str, subject: str | None, detail: dict[str, Any] | None = None
    ) -> AsyncGenerator[AsyncConnection[Any]]:
        """A transaction for a change. `detail`, as it is at the end, goes into the audit log."""
        assert visit.principal is not None  # noqa: S101
        async with changing(self.broker, visit.principal) as change:
            await change.conn.execute("set local statement_timeout = '15s'")
            yield change.conn
            await change.record(action, subject, **(detail or {}))

    def render(self, visit: Visit, template: str, *, status: int = 200, **values: Any) -> Response:
        note = visit.request.cookies.get(_NOTE_COOKIE) if not visit.fragment else None
        response = self.renderer.render(
            visit, template, status=status, note=note, latest=self.sampler.newest, **values
        )
        if note is not None:
            response.delete_cookie(_NOTE_COOKIE, path=visit.root or "/", samesite="strict", httponly=True)
        return response

    def done(self, visit: Visit, path: str, note: str | None = None) -> Response:
        """Redirect to a page, which shows the note."""
        self.sampler.outdate()
        response = RedirectResponse(visit.root + path, 303, PAGE)
        if note is not None:
            response.set_cookie(
                _NOTE_COOKIE,
                quote(note[:300]),
                max_age=60,
                path=visit.root or "/",
                secure=visit.request.url.scheme == "https",
                httponly=True,
                samesite="strict",
            )
        return response

    def _redirect_to_login(self, visit: Visit) -> Response:
        if visit.fragment or visit.request.method != "GET" or visit.request.url.path.endswith("/ui/live"):
            return self._failed(visit, unauthorised())
        target = urlsplit(str(visit.request.url))
        wanted = target.path.removeprefix(visit.root) + (f"?{target.query}" if target.query else "")
        there = "" if wanted in ("/ui", "/ui/") else f"?next={quote(wanted, safe='/')}"
        return RedirectResponse(f"{visit.root}/ui/login{there}", 303, PAGE)

    def _failed(self, visit: Visit, error: Exception) -> Response:
        problem = problem_of(error)
        if problem is None:
            raise error
        if problem.status == 429 and visit.principal is None:
            # A page would cost more than what is refused.
            return problem.response()
        response = self.renderer.render(
            visit, "error.html", status=problem.status, problem=problem, latest=None
        )
        for name, value in problem.headers.items():
            response.headers[name] = value
        return response
