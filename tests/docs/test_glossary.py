"""The glossary: sorted, one entry per term, and links that resolve."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "glossary.md").read_text()
ENTRIES = re.findall(r"^## (.+)\n\n((?:.+\n)+)", PAGE, re.MULTILINE)
EXPECTED = {
    "ack",
    "API key",
    "claim",
    "dead letter",
    "dedup key",
    "dispatcher",
    "endpoint",
    "event",
    "group",
    "lane",
    "lease",
    "log",
    "ordering key",
    "position",
    "queue",
    "reader",
    "retry",
    "segment",
    "service",
    "stage",
    "stream",
    "subscription",
    "tick",
    "topic",
    "watermark",
    "webhook",
    "worker",
}


def anchors(page: Path) -> set[str]:
    """The anchors that a forge derives from a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_terms_are_sorted_and_defined_once() -> None:
    terms = [term for term, _ in ENTRIES]
    assert len(terms) == PAGE.count("\n## ")
    assert terms == sorted(terms, key=str.casefold)
    assert len({term.casefold() for term in terms}) == len(terms)
    assert set(terms) >= EXPECTED


def test_every_entry_is_short_and_links_to_its_page() -> None:
    for term, body in ENTRIES:
        definition, _, link = " ".join(body.split()).rpartition(" See ")
        sentences = re.findall(r"[.!?](?=\s|$)", definition)
        assert 1 <= len(sentences) <= 2, term
        (target,) = re.findall(r"^\[[^\]]+\]\(([^)]+)\)\.$", link)
        page, _, anchor = target.partition("#")
        assert (DOCS / page).is_file(), f"{term} links to {target}"
        assert not anchor or anchor in anchors(DOCS / page), f"{term} links to {target}"
