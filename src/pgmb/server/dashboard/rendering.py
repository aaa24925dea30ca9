"""Templates, static files and security headers."""

from __future__ import annotations

import hashlib
from functools import partial
from importlib import resources
from typing import Any, Final
from urllib.parse import unquote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from pgmb.server.dashboard.auth import Visit
from pgmb.server.dashboard.formats import FILTERS
from pgmb.server.problems import Problem

CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)

SECURITY: Final = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Not `no-referrer`: browsers would send forms with the origin "null".
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}

PAGE: Final = {**SECURITY, "Cache-Control": "no-store", "Vary": "Cookie"}


_MEDIA_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class Assets:
    """Style sheet, scripts and icon, named by content hash (`style.0f3a….css`) for caching."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._files: dict[str, tuple[bytes, str]] = {}
        files = {
            file.name: file.read_bytes()
            for file in (resources.files("pgmb.server.dashboard") / "static").iterdir()
            if "." + file.name.rpartition(".")[2] in _MEDIA_TYPES
        }
        # Scripts import each other by name, so one hash over all files names each of them.
        digest = hashlib.sha256(b"".join(files[name] for name in sorted(files))).hexdigest()[:16]
        for name, content in files.items():
            stem, _, ending = name.rpartition(".")
            hashed = f"{stem}.{digest}.{ending}"
            self._names[name] = hashed
            self._files[hashed] = (content, _MEDIA_TYPES["." + ending])
        for hashed, (content, kind) in self._files.items():
            if kind.startswith("text/javascript"):
                for name, other in self._names.items():
                    content = content.replace(f'"./{name}"'.encode(), f'"./{other}"'.encode())
                self._files[hashed] = (content, kind)

    def name(self, name: str) -> str:
        return self._names[name]

    async def serve(self, request: Request) -> Response:
        found = self._files.get(request.path_params["name"])
        if found is None:
            return Problem(404, "not_found", "not found", headers=SECURITY).response()
        headers = {**SECURITY, "Cache-Control": "public, max-age=31536000, immutable"}
        return Response(found[0], headers=headers, media_type=found[1])


THEME_COOKIE = "pgmb_theme"


class Renderer:
    def __init__(self, assets: Assets) -> None:
        self._environment: Any = Environment(
            loader=PackageLoader("pgmb.server.dashboard", "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters.update(FILTERS)
        self._environment.globals["asset"] = assets.name

    def render(self, visit: Visit, template: str, *, status: int, **values: Any) -> Response:
        """Render a page, or only its content for the script that refreshes it."""
        theme = visit.request.cookies.get(THEME_COOKIE)
        note = values.pop("note", None)
        text = self._environment.get_template(template).render(
            layout="fragment.html" if visit.fragment else "page.html",
            root=visit.root,
            here=visit.request.url.path.removeprefix(visit.root),
            link=partial(link, visit.root),
            principal=visit.principal,
            operator=visit.operator,
            csrf=visit.principal.csrf if visit.principal else None,
            theme=theme if theme in ("light", "dark") else None,
            note=unquote(note) if note else None,
            **values,
        )
        # Text of the database may contain lone surrogates.
        return HTMLResponse(text.encode("utf-8", "replace"), status, headers=PAGE)


def link(root: str, path: str, **query: Any) -> str:
    """A link within the dashboard. Names go into the query, which proxies leave unchanged."""
    given = {name: value for name, value in query.items() if value is not None and value != ""}
    return f"{root}{path}?{urlencode(given)}" if given else root + path
