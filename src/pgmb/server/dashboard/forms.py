"""Forms by which operators create and change queues and endpoints."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import quote

import msgspec
from starlette.responses import Response

from pgmb._core import durations
from pgmb._core.masking import masked_url
from pgmb.server.changes import changing
from pgmb.server.dashboard.auth import Form, Visit
from pgmb.server.dashboard.formats import iso_seconds
from pgmb.server.dashboard.router import PageRouter
from pgmb.server.problems import Problem, forbidden, invalid, problem_of

_SHOWN = "shown:"
"""The prefix of hidden fields that hold what a form showed: only what differs from it is a change."""
_AT_THE_FORM = (403, 404, 409, 422)
"""Refusals that are shown at the form, with what was typed. Other errors have a page of their own."""


class Field(msgspec.Struct, frozen=True):
    """A setting in a form."""

    name: str
    label: str
    kind: Literal["text", "lines", "whole", "number", "duration", "durations", "choice", "flag"] = "text"
    hint: str = ""
    choices: Sequence[str] = ()
    creation: bool = False
    """Whether it can be set at creation only."""
    needed: bool = False
    default: str = ""
    """What the form for something new shows."""
    cleared: Any = None
    """What stands for an emptied field. None: it cannot be emptied."""
    wide: bool = False

    def text(self, value: Any) -> str:
        """A setting as text for the form."""
        if value is None or value is False:
            return ""
        if self.kind == "duration":
            return _duration(value)
        if self.kind == "durations":
            return " ".join(map(_duration, value))
        if self.kind == "lines":
            return "\n".join(value)
        if self.kind == "flag":
            return "yes"
        return f"{value:g}" if isinstance(value, float) else str(value)

    def value(self, text: str) -> Any:
        """What was typed, as the broker takes it. Raises Problem 422."""
        try:
            if self.kind == "whole":
                return int(text)
            if self.kind == "number":
                return float(text)
            if self.kind == "duration":
                return durations.parse(text)
            if self.kind == "durations":
                return [durations.parse(word) for word in text.split()]
        except ValueError as error:
            wanted = {"whole": "a whole number", "number": "a number"}.get(self.kind)
            said = f"must be {wanted}, got {text[:40]!r}" if wanted else str(error)
            raise invalid(f"{self.label}: {said}") from None
        if self.kind == "lines":
            return [line.strip() for line in text.splitlines() if line.strip()]
        return text == "yes" if self.kind == "flag" else text


class Editor(msgspec.Struct, frozen=True):
    """The form for something new, or for what exists, and what happens when it is sent."""

    subject: Literal["queue", "endpoint"]
    fields: Sequence[Field]
    load: Callable[[PageRouter, str], Awaitable[Mapping[str, Any]]]
    """The settings of one that exists, by field."""
    create: Callable[[PageRouter, Visit, dict[str, Any]], Awaitable[Response]]
    bind: Literal["bind", "bind_endpoint"]
    """The broker's method that changes patterns and filter, and the one for other settings."""
    alter: Literal["alter_queue", "alter_endpoint"]

    async def show(self, router: PageRouter, visit: Visit) -> Response:
        if not visit.operator:
            raise forbidden("operate")
        name = visit.given("name")
        if name is None:
            return self._form(router, visit, None, {field.name: field.default for field in self.fields})
        values = await self.load(router, name)
        shown = {field.name: field.text(values.get(field.name)) for field in self.fields}
        return self._form(router, visit, name, shown, shown)

    async def save(self, router: PageRouter, visit: Visit, form: Form) -> Response:
        name = form.get("of")
        fields = self._fields(name)
        typed = {field.name: _text(form, field.name) for field in fields}
        before = {field.name: _text(form, _SHOWN + field.name) for field in fields}
        try:
            if name is None:
                return await self.create(router, visit, _created(fields, typed))
            given = _changed(fields, typed, before)
            if given:
                await self._alter(router, visit, name, given, _created(fields, typed))
            said = f"{name} is changed" if given else "Nothing was changed."
            return router.done(visit, f"/ui/{self.subject}?name={quote(name, safe='')}", said)
        except Exception as error:
            problem = problem_of(error)
            if problem is None or problem.status not in _AT_THE_FORM:
                raise
            return self._form(router, visit, name, typed, before, problem)

    async def _alter(
        self, router: PageRouter, visit: Visit, name: str, given: dict[str, Any], typed: dict[str, Any]
    ) -> None:
        assert visit.principal is not None  # noqa: S101
        asked = {field: given.pop(field) for field in ("patterns", "filter") if field in given}
        found = await self.load(router, name)
        # What the form does not show stays as it is.
        kept = {field: found[field] or None for field in ("equals", "condition", "params")}
        async with changing(router.broker, visit.principal) as change:
            await change.conn.execute("set local statement_timeout = '15s'")
            if asked:
                filtered = {**kept, "filter": typed.get("filter")}
                if self.bind == "bind":
                    filtered["no_filter"] = not any(filtered.values())
                await getattr(router.broker, self.bind)(name, typed["patterns"], **filtered, conn=change.conn)
                await change.record(self.bind, name, **asked)
            if given:
                await getattr(router.broker, self.alter)(name, **given, conn=change.conn)
                await change.record(self.alter, name, **recorded(given))

    def _fields(self, name: str | None) -> list[Field]:
        return [field for field in self.fields if name is None or not field.creation]

    def _form(
        self,
        router: PageRouter,
        visit: Visit,
        name: str | None,
        texts: Mapping[str, str],
        before: Mapping[str, str] | None = None,
        problem: Problem | None = None,
    ) -> Response:
        return router.render(
            visit,
            "form.html",
            status=200 if problem is None else problem.status,
            subject=self.subject,
            name=name,
            title=f"Create {'an' if self.subject == 'endpoint' else 'a'} {self.subject}"
            if name is None
            else f"Change {name}",
            button="Create" if name is None else "Change",
            fields=self._fields(name),
            texts=texts,
            before=before,
            problem=problem,
        )


def _text(form: Form, name: str) -> str:
    # Browsers send the ends of lines as CR LF.
    return "\n".join((form.get(name) or "").splitlines())


def _created(fields: Sequence[Field], typed: Mapping[str, str]) -> dict[str, Any]:
    for field in fields:
        if field.needed and not typed[field.name]:
            raise invalid(f"{field.label} is missing")
    return {field.name: field.value(typed[field.name]) for field in fields if typed[field.name]}


def _changed(fields: Sequence[Field], typed: Mapping[str, str], before: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in fields:
        text = typed[field.name]
        if text == before[field.name]:
            continue
        if text or field.kind == "flag":
            found[field.name] = field.value(text)
        elif field.cleared is None:
            raise invalid(f"{field.label} must not be empty")
        else:
            found[field.name] = field.cleared
    return found


def recorded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they stand in the audit log: durations as text, urls without secrets."""
    return {name: _recorded(name, value) for name, value in values.items()}


def _recorded(name: str, value: Any) -> Any:
    if name == "url":
        return masked_url(value)
    if name == "retry_after":
        return [_duration(one) for one in value]
    return _duration(value) if isinstance(value, timedelta) else value


def _duration(value: timedelta | str) -> str:
    return durations.show(value if isinstance(value, timedelta) else timedelta(seconds=iso_seconds(value)))
