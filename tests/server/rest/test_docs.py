"""What docs/howto/rest.md asks for is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pgmb.server.rest import OPERATIONS
from scripts import http_reference

DOCS = Path(__file__).resolve().parents[3] / "docs"
PATHS = {re.compile(re.sub(r"{\w+}", "[^/]+", operation.path)): operation for operation in OPERATIONS}


@pytest.mark.once
def test_every_address_of_the_page_is_one_of_ours() -> None:
    page = (DOCS / "howto" / "rest.md").read_text()
    asked = re.findall(r"\$PGMB(/[^\s\"?]+)", page)
    assert len(asked) > 15
    for path in asked:
        assert any(known.fullmatch(f"/v1{path}") for known in PATHS), path


@pytest.mark.once
def test_the_reference_is_that_of_the_code() -> None:
    assert (DOCS / "reference" / "http.md").read_text() == http_reference.render(), "run `make docs`"
