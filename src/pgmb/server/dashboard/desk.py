"""What the pages share: the database, the sampler, rendering, and who may come in."""

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
from pgmb.server.audit import changing
from pgmb.server.context import Context
from pgmb.server.dashboard.assets import Assets
from pgmb.server.dashboard.curves import Drawn
from pgmb.server.dashboard.gate import Form, NobodyError, Visit, admit, check_origin, read_form
from pgmb.server.dashboard.headers import PAGE
from pgmb.server.dashboard.health import Health
from pgmb.server.dashboard.pages import Pages
from pgmb.server.dashboard.sampler import Sampler
from pgmb.server.limits import Rates
from pgmb.server.problems import Problem, problem_of, unauthorised
from pgmb.server.scopes import Verb

PageHandler: TypeAlias = Callable[["Desk", Visit], Awaitable[Response]]
ChangeHandler: TypeAlias = Callable[["Desk", Visit, Form], Awaitable[Response]]

_NOTE = "pgmb_note"


class Desk:
    def __init__(self, context: Context, assets: Assets) -> None:
        self.context = context
        self.broker = context.broker
        self.sampler = Sampler(context.broker)
        self.curves = Drawn(self.sampler)
        self.pages = Pages(assets)
        self.health = Health(context.broker)
        self.attempts = Rates(0.5, 10)
        """Of logging in, by address."""

    async def close(self) -> None:
        await self.sampler.close()
        await self.health.close()

    async def drain(self) -> None:
        """Those who watch would stay for ever."""
        self.sampler.leave()

    def open(self, handler: PageHandler) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint for whoever comes."""

        async def answer(request: Request) -> Response:
            visit = Visit(request, None)
            try:
                return await handler(self, visit)
            except Exception as error:
                return self._failed(visit, error)

        return answer

    def page(self, path: str, handler: PageHandler) -> Route:
        """A page for those who may look."""

        async def answer(request: Request) -> Response:
            visit = Visit(request, None)
            try:
                visit = await admit(self.context.access, request, "inspect")
                self._count(visit)
                return await handler(self, visit)
            except NobodyError:
                return self._away(visit)
            except Exception as error:
                return self._failed(visit, error)

        return Route(path, answer, methods=["GET"])

    def change(self, path: str, handler: ChangeHandler, verb: Verb = "operate") -> Route:
        """A form for those who may change something."""

        async def answer(request: Request) -> Response:
            visit = Visit(request, None)
            try:
                check_origin(request)
                visit = await admit(self.context.access, request, "inspect")
                self._count(visit)
                form = await read_form(request)
                assert visit.principal is not None  # noqa: S101
                self.context.access.check_csrf(visit.principal, form.get("csrf"))
                if not visit.principal.may(verb):
                    raise Problem(403, "forbidden", "this session may only look")
                return await handler(self, visit, form)
            except NobodyError:
                return self._away(visit)
            except Exception as error:
                return self._failed(visit, error)

        return Route(path, answer, methods=["POST"])

    async def nothing(self, _: Desk, __: Visit) -> Response:
        raise Problem(404, "not_found", "there is no such page")

    async def rows(self, statement: str, parameters: Any = ()) -> list[dict[str, Any]]:
        """What a statement finds, within five seconds."""
        with translated():
            async with self.broker.connection() as connection, connection.transaction():
                await connection.execute("set local statement_timeout = '5s'")
                cursor = connection.cursor(row_factory=dict_row)
                await cursor.execute(statement.encode(), parameters)
                return await cursor.fetchall()

    @asynccontextmanager
    async def changing(
        self, visit: Visit, action: str, subject: str | None, detail: dict[str, Any] | None = None
    ) -> AsyncGenerator[AsyncConnection[Any]]:
        """A transaction in which something is changed, and recorded with what `detail` holds at its end."""
        assert visit.principal is not None  # noqa: S101
        async with changing(self.broker, visit.principal) as change:
            await change.conn.execute("set local statement_timeout = '15s'")
            yield change.conn
            await change.record(action, subject, **(detail or {}))

    def render(self, visit: Visit, template: str, *, status: int = 200, **values: Any) -> Response:
        note = visit.request.cookies.get(_NOTE) if not visit.fragment else None
        response = self.pages.render(
            visit, template, status=status, note=note, latest=self.sampler.newest, **values
        )
        if note is not None:
            response.delete_cookie(_NOTE, path=visit.root or "/", samesite="strict", httponly=True)
        return response

    def done(self, visit: Visit, path: str, note: str | None = None) -> Response:
        """Back to a page, which says what was done."""
        self.sampler.outdate()
        response = RedirectResponse(visit.root + path, 303, PAGE)
        if note is not None:
            response.set_cookie(
                _NOTE,
                quote(note[:300]),
                max_age=60,
                path=visit.root or "/",
                secure=visit.request.url.scheme == "https",
                httponly=True,
                samesite="strict",
            )
        return response

    def _count(self, visit: Visit) -> None:
        if visit.principal is not None:
            self.context.rates.take(visit.principal.key)

    def _away(self, visit: Visit) -> Response:
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
        response = self.pages.render(visit, "error.html", status=problem.status, problem=problem, latest=None)
        for name, value in problem.headers.items():
            response.headers[name] = value
        return response
