"""Style sheet, script and icon: part of the package, named by content so that browsers may keep them."""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from pgmb.server.dashboard.headers import SECURITY
from pgmb.server.problems import Problem

_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class Assets:
    """Read once. `name("style.css")` is what a page refers to: `style.0f3a….css`."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._files: dict[str, tuple[bytes, str]] = {}
        files = {
            file.name: file.read_bytes()
            for file in (resources.files("pgmb.server.dashboard") / "static").iterdir()
            if "." + file.name.rpartition(".")[2] in _TYPES
        }
        # Modules name each other without a hash, so that one hash covers all of them.
        digest = hashlib.sha256(b"".join(files[name] for name in sorted(files))).hexdigest()[:16]
        for name, content in files.items():
            stem, _, ending = name.rpartition(".")
            hashed = f"{stem}.{digest}.{ending}"
            self._names[name] = hashed
            self._files[hashed] = (content, _TYPES["." + ending])
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
            return Problem(404, "not_found", "there is nothing here", headers=SECURITY).response()
        headers = {**SECURITY, "Cache-Control": "public, max-age=31536000, immutable"}
        return Response(found[0], headers=headers, media_type=found[1])
