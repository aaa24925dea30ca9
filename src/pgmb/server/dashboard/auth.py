"""Visits and forms: who visits a page, and whether a form is genuine."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit

import msgspec
from starlette.requests import Request

from pgmb.server.access import Access, Principal, Verb
from pgmb.server.limits import read_body
from pgmb.server.problems import Problem, forbidden

MOST_LOGIN_BYTES = 16 << 10
"""Of a form that anybody may send."""
_MOST_FORM_BYTES = 256 << 10
_MOST_FIELDS = 2000

FRAGMENT = "x-pgmb-fragment"


class NotSignedInError(Exception):
    """No visitor is signed in: pages redirect to the login."""


class Form(msgspec.Struct, frozen=True):
    """A submitted form. Empty fields count as missing."""

    fields: list[tuple[str, str]]

    def get(self, name: str) -> str | None:
        for field, value in self.fields:
            if field == name and value:
                return value
        return None

    def all(self, name: str) -> list[str]:
        return [value for field, value in self.fields if field == name and value]


class Visit(msgspec.Struct, frozen=True):
    """A request to a page, and its visitor."""

    request: Request
    principal: Principal | None

    @property
    def root(self) -> str:
        """The prefix at which the application is mounted."""
        return str(self.request.scope.get("root_path", "")).rstrip("/")

    @property
    def fragment(self) -> bool:
        return FRAGMENT in self.request.headers

    @property
    def operator(self) -> bool:
        return self.principal is not None and self.principal.may("operate")

    def given(self, name: str) -> str | None:
        """A query parameter; None if it is empty."""
        value = self.request.query_params.get(name, "").strip()
        if "\0" in value:
            raise Problem(422, "invalid_argument", f"{name} contains a NUL character")
        return value or None

    def number(self, name: str) -> int | None:
        value = self.given(name)
        if value is None:
            return None
        if not (value.isascii() and value.isdecimal() and len(value) < 19):
            raise Problem(422, "invalid_argument", f"{name} is not a number")
        return int(value)

    def needed(self, name: str) -> str:
        value = self.given(name)
        if value is None:
            raise Problem(404, "not_found", f"the query parameter {name} is missing")
        return value


async def admit(access: Access, request: Request, verb: Verb) -> Visit:
    """Identify the visitor. Raises NotSignedInError, or Problem 403 without the scope."""
    principal = await access.principal(request)
    if principal is None:
        raise NotSignedInError
    if not principal.may(verb):
        raise forbidden(verb)
    return Visit(request, principal)


async def read_form(request: Request, most: int = _MOST_FORM_BYTES) -> Form:
    if not request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
        raise Problem(
            415, "unsupported_media_type", "forms must be sent as application/x-www-form-urlencoded"
        )
    body = await read_body(request, most)
    try:
        fields = parse_qsl(
            body.decode(), keep_blank_values=True, errors="strict", max_num_fields=_MOST_FIELDS
        )
    except ValueError as error:
        raise Problem(422, "invalid_argument", "the form cannot be read") from error
    if any("\0" in value for _, value in fields):
        raise Problem(422, "invalid_argument", "the form contains a NUL character")
    return Form([(name, value.strip()) for name, value in fields])


def check_origin(request: Request) -> None:
    """Raise Problem 403 if the browser says that another site submitted the form."""
    site = request.headers.get("sec-fetch-site")
    origin = request.headers.get("origin")
    if site is not None:
        own = site in ("same-origin", "none")
    elif origin is not None:
        own = urlsplit(origin).netloc == request.headers.get("host")
    else:
        own = True
    if not own:
        raise Problem(403, "csrf", "the form came from another site")
