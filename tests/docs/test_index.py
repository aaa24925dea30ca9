"""The index of the documentation leads to every page, and nowhere else."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
ROOT = DOCS.parent


def anchors(page: Path) -> set[str]:
    """The anchors that a forge derives from a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_to_headings_resolve() -> None:
    checked = 0
    for page in [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]:
        for target, anchor in re.findall(r"\]\(([^)#: ]*)#([^) ]+)\)", page.read_text()):
            linked = page.parent / target if target else page
            assert anchor in anchors(linked), f"{page.relative_to(ROOT)} links to {target}#{anchor}"
            checked += 1
    assert checked > 5


def test_the_index_lists_every_page() -> None:
    linked = {DOCS / target for target in re.findall(r"\]\(([^)#:]+)\)", (DOCS / "README.md").read_text())}
    pages = {page for page in DOCS.glob("*/*.md") if page.parent.name != "adr"}
    elsewhere = {DOCS / "../examples/spark/README.md"}
    assert all(page.is_file() for page in elsewhere)
    assert linked == pages | {DOCS / "adr" / "README.md", DOCS / "glossary.md"} | elsewhere
