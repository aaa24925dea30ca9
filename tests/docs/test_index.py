"""The index of the documentation leads to every page, and nowhere else."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_index_lists_every_page() -> None:
    linked = {DOCS / target for target in re.findall(r"\]\(([^)#:]+)\)", (DOCS / "README.md").read_text())}
    pages = {page for page in DOCS.glob("*/*.md") if page.parent.name != "adr"}
    elsewhere = {DOCS / "../examples/spark/README.md"}
    assert all(page.is_file() for page in elsewhere)
    assert linked == pages | {DOCS / "adr" / "README.md", DOCS / "glossary.md"} | elsewhere
