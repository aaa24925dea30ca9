"""Renders templates: escaped, complete or not at all."""

from __future__ import annotations

from functools import partial
from typing import Any
from urllib.parse import unquote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.responses import HTMLResponse, Response

from pgmb.server.dashboard import formats
from pgmb.server.dashboard.assets import Assets
from pgmb.server.dashboard.gate import Visit
from pgmb.server.dashboard.headers import PAGE

THEME = "pgmb_theme"


class Pages:
    def __init__(self, assets: Assets) -> None:
        self._environment: Any = Environment(
            loader=PackageLoader("pgmb.server.dashboard", "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters.update(formats.FILTERS)
        self._environment.globals["asset"] = assets.name

    def render(self, visit: Visit, template: str, *, status: int, **values: Any) -> Response:
        """A page, or, for the script that keeps one fresh, what is inside its frame."""
        theme = visit.request.cookies.get(THEME)
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
        # Text from a database may hold what UTF-8 cannot.
        return HTMLResponse(text.encode("utf-8", "replace"), status, headers=PAGE)


def link(root: str, path: str, **query: Any) -> str:
    """An address inside the application. Names travel in the query, where no proxy touches them."""
    given = {name: value for name, value in query.items() if value is not None and value != ""}
    return f"{root}{path}?{urlencode(given)}" if given else root + path
