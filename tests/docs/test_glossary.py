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
        assert (DOCS / target.partition("#")[0]).is_file(), f"{term} links to {target}"
