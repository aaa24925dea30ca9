"""Under which name a request is counted: the template of its route, never the path that was asked for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from starlette.routing import BaseRoute, Match, Mount, Route
from starlette.types import Scope

UNMATCHED: Final = "unmatched"


class Templates:
    """Knows the routes of an application, those below mounts too."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._by_endpoint: dict[Any, list[tuple[str, BaseRoute]]] = {}
        self._add(routes, "")

    def _add(self, routes: Iterable[BaseRoute], prefix: str) -> None:
        for route in routes:
            if isinstance(route, Route):
                self._by_endpoint.setdefault(route.endpoint, []).append((prefix + route.path, route))
            elif isinstance(route, Mount):
                self._by_endpoint.setdefault(route.app, []).append((f"{prefix}{route.path}/…", route))
                self._add(route.routes or (), prefix + route.path)

    def of(self, scope: Scope) -> str:
        """The template of a request that was routed: routing leaves its endpoint in the scope."""
        found = self._by_endpoint.get(scope.get("endpoint"))
        if found is None:
            return UNMATCHED
        if len(found) > 1:
            for template, route in found:
                if route.matches(scope)[0] is not Match.NONE:
                    return template
        return found[0][0]
