"""The README as a package index shows it: the pages and pictures that it links to are not there.

Hatchling calls this when it builds the package.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE = re.compile(r"^!\[[^\]]*\]\((?!\w+:)[^)]*\)\n\n?", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\((?!\w+:)[^)]*\)")
_WHERE = "\nThe pages that are named here are in the source archive, from `docs/README.md` on.\n"


class CustomMetadataHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": _LINK.sub(r"\1", _PICTURE.sub("", text)) + _WHERE,
        }
